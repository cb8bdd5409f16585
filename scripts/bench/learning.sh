#!/usr/bin/env bash
# What reinforcement learning adds to a warm start: table, figure and result.json. Hours on a laptop; a second call goes on
# where the first was stopped.
#   scripts/bench/learning.sh household      generated households, no download
#   scripts/bench/learning.sh alfworld       official games; needs ALFWORLD_DATA
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
prepare cpu
exec python scripts/bench/learning.py "$@"
