#!/usr/bin/env bash
# What kept keys and values save in rollouts with the in-process engine (see kv_cache.py).
#   scripts/bench/kv_cache.sh                  the environment that is activated, else .venv, made on first use
#   scripts/bench/kv_cache.sh --tasks 4        arguments go to kv_cache.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/kv_cache.py "$@"
