#!/usr/bin/env bash
# Seconds of an update with merged rows and with a row per step, and of an iteration beside TRL's own (see update.py).
#   scripts/bench/update.sh                    the environment that is activated, else .venv, made on first use
#   scripts/bench/update.sh --tasks 4          arguments go to update.py
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
exec python scripts/bench/update.py "$@"
