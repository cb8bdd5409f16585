# Sourced by quickstart.sh and test.sh: makes .venv in the repository and activates it.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

# Two torch threads that sleep while they wait: spinning ones slow each other down 10 to 100 times on busy cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-0}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

fail() {
  echo "error: $*" >&2
  exit 2
}

is_recent() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the first Python >= 3.11 on PATH.
find_python() {
  local name
  for name in python3 python3.11 python3.12 python3.13 python3.14; do
    if is_recent "$name"; then
      echo "$name"
      return
    fi
  done
  return 1
}

# The planner (fast-downward) and the Z-machine (jericho) are compiled on installation.
check_compilers() {
  local tool missing=()
  for tool in g++:g++ cc:gcc cmake:cmake make:make; do
    command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
  done
  [ ${#missing[@]} -eq 0 ] || fail "missing ${missing[*]} (for the planner); on Debian: apt-get install ${missing[*]}"
}

fingerprint() {
  cat scripts/locks/*.txt pyproject.toml | cksum
}

# prepare LOCK: .venv with the packages of scripts/locks/LOCK.txt and this repository, installed once per lock file.
prepare() {
  local lock="$1" python stamp=".venv/installed-$1"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && .venv/bin/python -c '' 2>/dev/null; then
    . .venv/bin/activate
    return
  fi
  if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    is_recent .venv/bin/python || fail ".venv holds a Python older than 3.11; remove .venv and start again"
  else
    python="$(find_python)" || fail "no Python 3.11 or newer on PATH; on Debian: apt-get install python3 python3-venv"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$python has no venv module; on Debian: apt-get install python3-venv"
    echo "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
  fi
  . .venv/bin/activate # from here on `python` exists, which the planner's build calls
  python -c 'import fast_downward, jericho' 2>/dev/null || check_compilers
  echo "installing torch"
  python -m pip install --quiet torch==2.13.0
  echo "installing scripts/locks/$lock.txt (some minutes: the planner is compiled)"
  python -m pip install --quiet --no-deps -r "scripts/locks/$lock.txt"
  python -m pip install --quiet --no-deps -e .
  fingerprint >"$stamp"
}
