#!/usr/bin/env bash
# What SAMem alone learns of ALFWorld, without a language model: table, figure and result.json. No gradient, no model.
#   scripts/bench/samem.sh                           the environment that is activated, else .venv, made on first use
#   scripts/bench/samem.sh --seeds 3 --store both    arguments go to samem.py; an interrupted run goes on where it was
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/samem.py "$@"
