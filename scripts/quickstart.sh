#!/usr/bin/env bash
# From a bare machine (Python 3.11+, a C++ compiler) to a trained policy and a table of success rates.
#   scripts/quickstart.sh                          a run that exists goes on where it was (remove runs/quickstart to start anew)
#   scripts/quickstart.sh run.name=second run.seed=1   arguments go to `saga train`
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare cpu
if [ $# -eq 0 ] && [ -f runs/quickstart/config.yaml ]; then
  echo "runs/quickstart exists: going on with it"
  set -- --resume
fi
exec saga train configs/quickstart.yaml "$@"
