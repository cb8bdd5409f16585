#!/usr/bin/env bash
# Concurrent episodes beside lock-step batches on one vLLM server (see rollout.py).
#   scripts/bench/rollout.sh                   the environment that is activated, else .venv, made on first use
#   scripts/bench/rollout.sh --rounds 2        arguments go to rollout.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu-dev # this lock holds vLLM's CPU build
exec python scripts/bench/rollout.py "$@"
