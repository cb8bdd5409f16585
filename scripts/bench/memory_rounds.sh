#!/usr/bin/env bash
# What three rounds of memory bring an agent that makes mistakes: table and result.json. Minutes on one core, no model.
#   scripts/bench/memory_rounds.sh                   the environment that is activated, else .venv, made on first use
#   scripts/bench/memory_rounds.sh --rounds 1        arguments go to memory_rounds.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/memory_rounds.py "$@"
