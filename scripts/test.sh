#!/usr/bin/env bash
# Lint, types and tests in the repository's own environment.
#   scripts/test.sh                    everything but the slow tests
#   scripts/test.sh tests/unit -k rows   what pytest is given
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare cpu-dev
[ $# -gt 0 ] || set -- -m "unit or integration"
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
