#!/usr/bin/env bash
# The memory at 100,000 episodes: ingest, trace, retrieval, bytes (see memory_scale.py).
#   scripts/bench/memory_scale.sh                    the environment that is activated, else .venv, made on first use
#   scripts/bench/memory_scale.sh --episodes 10000   arguments go to memory_scale.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/memory_scale.py "$@"
