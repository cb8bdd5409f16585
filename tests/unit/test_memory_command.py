"""``saga memory``: what its commands print, and one clear error with exit code 2 for what they cannot do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memory.store import LedgerEntry, Store
from tests.command import error_of, saga
from tests.vault import PRINCIPLE, PROCEDURE, episode, hierarchy, link, trajectory

pytestmark = pytest.mark.unit

Out = Callable[..., str]
"""Runs a command on the run folder's memory, and gives what it prints."""


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a memory; the terminal is wide, so that no word is broken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    folder = tmp_path / "run"
    folder.mkdir()
    with Store(f"sqlite:///{folder}/memory.db") as store:
        of = trajectory(goal="Get [bold]in\x1b[2J.")
        store.add_trajectories([of])
        store.snapshot("empty")
        store.write(*hierarchy(of))
        store.write([], [link(PROCEDURE.id, PRINCIPLE.id, of, quote="no such words")])
        store.set_status(PRINCIPLE.id, "audited", "direction above zero", round=3)
        store.credit([LedgerEntry(PRINCIPLE.id, "e1", 0.5, retrieved=2, instantiated=1)])
        store.judge(PRINCIPLE.id, "harm", {"harmful": True, "rates": [1 / 3, {"p": 1e-9}]})
    return folder


@pytest.fixture
def out(run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Out:
    def run(*args: str) -> str:
        assert saga(monkeypatch, "memory", *args, "--store", str(run_folder)) == 0
        return capsys.readouterr().out

    return run


def test_stats_counts_everything(out: Out) -> None:
    text = out("stats")
    for words in (
        ["vault", "v1", "1", "2", "100.0"],
        ["principles", "0", "1", "0", "0", "0"],
        ["link", "evidence.quote", "1"],
    ):
        assert any(line.split() == words for line in text.splitlines()), words
    assert "links: 3 supports; judgements: 1 harm; ledger entries: 1; snapshots: 1" in text


def test_list_shows_records_and_rejected_writes(out: Out) -> None:
    text = out("list")
    assert PRINCIPLE.id in text
    assert "When a lever is in sight: pull it first." in text
    assert "1 of 1" in text
    assert PRINCIPLE.id not in out("list", "--status", "validated", "--status", "rejected")
    assert PROCEDURE.id in out("list", "--level", "procedure", "--world", "vault")
    assert "task-0" in out("list", "--level", "trajectory")
    assert "does not occur in step 0" in out("list", "--rejected")


def test_show_prints_a_record_with_all_that_is_kept_beside_it(out: Out) -> None:
    text = out("show", PRINCIPLE.id)
    for part in (
        "guidance: pull it first",
        "round 0  candidate: built",
        "round 3  audited: direction above zero",
        "retrieved 2, instantiated 1, suppressed 0",
        "outcome with 0.500 (1 episodes), without – (0)",
        'harm: harmful: true; rates: [0.3333, {"p": 1e-09}]',
        "rests on (1 supports)",
        "step 0 “click”",
        "above it (0)",
    ):
        assert part in text, part


def test_show_prints_a_trajectory_and_no_control_characters(out: Out) -> None:
    text = out("show", trajectory(goal="Get [bold]in\x1b[2J.").id)
    assert "Get [bold]in\ufffd[2J." in text
    assert "\x1b" not in text
    assert "1 > enter  Door  +1.00" in text
    assert "success, score 1.00, 2 steps" in text


def test_trace_walks_both_ways(out: Out) -> None:
    of = trajectory(goal="Get [bold]in\x1b[2J.")
    down = out("trace", PRINCIPLE.id)
    order = [down.index(part) for part in (PRINCIPLE.id, PROCEDURE.id, episode(of).id, f"supports {of.id}")]
    assert order == sorted(order)
    assert f"{of.id} step 1 > enter Door The door is OPEN now." in down
    up = out("trace", of.id, "--step", "1")
    order = [up.index(part) for part in (of.id, "step 1: > enter Door", episode(of).id, PROCEDURE.id, PRINCIPLE.id)]
    assert order == sorted(order)


def test_diff_tells_what_came(out: Out) -> None:
    text = out("diff", "empty")
    assert "3 added, 0 removed, 0 changed; trajectories +0, links +3" in text
    assert any(line.split()[:3] == ["+", PRINCIPLE.id, "audited"] for line in text.splitlines())


def test_export_and_import_carry_a_memory_over(out: Out, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 trajectory, 1 snapshot, 1 episode" in out("export", "a.jsonl.gz")
    with Store(f"sqlite:///{run_folder}/memory.db") as store:
        name = store.snapshot()
    assert saga(monkeypatch, "memory", "import", "a.jsonl.gz", "--store", "new.db") == 0
    with Store(f"sqlite:///{run_folder.parent}/new.db") as store:
        assert store.snapshot() == name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stats"], "memory.db does not exist; name a memory file, a run folder or a URL"),
        (["stats", "--store", "mysql://x/y"], "postgresql://"),
        (["list", "--status", "sound", "--store", "run"], "status: 'sound'; name one of candidate, audited"),
        (["show", "r-1", "--store", "run"], "item: 'r-1' is not in the memory"),
        (["show", "t-1", "--store", "run"], "trajectory: 't-1' is not in the memory"),
        (["trace", "t-1", "--store", "run"], "trajectory: 't-1' is not in the memory"),
        (["trace", PRINCIPLE.id, "--step", "1", "--store", "run"], "--step 1: r-"),
        (["diff", "never", "--store", "run"], "snapshot: 'never' is not in the memory; there are: s-"),
        (["export", "no/such/a.jsonl", "--store", "run"], "folder no/such does not exist"),
        (["import", "none.jsonl", "--store", "run"], "No such file"),
    ],
)
def test_bad_input_is_one_error_with_exit_code_2(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert message in error_of(monkeypatch, capsys, "memory", *args)
    assert not (run_folder.parent / "memory.db").exists()


def test_help_needs_no_database_package() -> None:
    code = (
        "import sys, train.cli; sys.exit(any(name in sys.modules for name in ('sqlalchemy', 'pydantic', 'rich.tree')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
