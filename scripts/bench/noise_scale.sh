#!/usr/bin/env bash
# How many groups of rollouts a policy gradient needs, from those a run has stored (see noise_scale.py).
#   scripts/bench/noise_scale.sh runs/learning-household-grpo --groups 48
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/noise_scale.py "$@"
