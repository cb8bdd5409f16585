#!/usr/bin/env bash
# Memory, tokens/s and MFU of an update of Qwen2.5-7B's architecture on one GPU (see gpu_update.py).
#   scripts/bench/gpu_update.sh                the environment that is activated, else .venv, made on first use
#   scripts/bench/gpu_update.sh --tiny         arguments go to gpu_update.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/gpu_update.py "$@"
