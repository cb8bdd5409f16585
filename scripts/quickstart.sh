#!/usr/bin/env bash
# From a bare machine (Python 3.11+, a C++ compiler) to a trained policy and a table of success rates.
#   scripts/quickstart.sh              the first time, or after removing runs/quickstart
#   scripts/quickstart.sh --resume     go on with an interrupted run
# Further arguments go to `saga train`, for example run.name=second run.seed=1.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare cpu
exec saga train configs/quickstart.yaml "$@"
