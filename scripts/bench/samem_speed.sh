#!/usr/bin/env bash
# SAMem at a million states: recall, learner, share of an agent's step; on one core, 5 GB of memory (see samem_speed.py).
#   scripts/bench/samem_speed.sh                    the environment that is activated, else .venv, made on first use
#   scripts/bench/samem_speed.sh --states 100000    arguments go to samem_speed.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
export OMP_NUM_THREADS=1
exec python scripts/bench/samem_speed.py "$@"
