#!/usr/bin/env bash
# The memory at 100,000 episodes: ingest, trace, retrieval, bytes (see memory.py).
#   scripts/bench/memory.sh                    the environment that is activated, else .venv, made on first use
#   scripts/bench/memory.sh --episodes 10000   arguments go to memory.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/memory.py "$@"
