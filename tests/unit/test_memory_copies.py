"""Copies of a store, and a run's store brought back to its last finished phase."""

from pathlib import Path

import pytest

from memory.copies import copy_memory
from memory.records import MemoryRecordError, TraceStep, Trajectory
from memory.store import Store
from train.config import config_from
from train.knowledge import Knowledge
from train.preflight import Journal

pytestmark = pytest.mark.unit


def trajectory(name: str) -> Trajectory:
    step = TraceStep(index=0, observation="You see a box.", action="open box", result="It is open.", valid=True)
    return Trajectory(
        source=name, world="household", grammar="alfworld-0.4", task=name, success=True, score=1.0, steps=(step,)
    )


def names(file: Path) -> list[str]:
    with Store(f"sqlite:///{file}", create=False) as store:
        return [found.source for found in store.trajectories()]


def test_a_copy_holds_what_is_still_in_the_log(tmp_path: Path) -> None:
    target = tmp_path / "state/copy.db"
    with Store(f"sqlite:///{tmp_path}/live.db") as store:
        store.add_trajectories([trajectory("one")])
        copy_memory(f"sqlite:///{tmp_path}/live.db", target)
        store.add_trajectories([trajectory("two")])
        assert names(target) == ["one"]
        copy_memory(f"sqlite:///{tmp_path}/live.db", target)
    assert names(target) == ["one", "two"]
    assert [file.name for file in target.parent.iterdir()] == ["copy.db"]


def test_there_must_be_a_memory_to_copy(tmp_path: Path) -> None:
    with pytest.raises(MemoryRecordError, match="does not exist"):
        copy_memory(f"sqlite:///{tmp_path}/none.db", tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


def knowledge(folder: Path, *, finished: bool = False, store: str | None = None) -> tuple[Knowledge, Journal]:
    data = {
        "run": {"name": "demo"},
        "env": {"name": "household"},
        "memory": {"store": store, "embedder": {"kind": "hashing"}},
        "collect": {"tasks": "household/easy/train:0-3"},
        "eval": {"tasks": "household/easy/eval:0-3"},
    }
    journal = Journal(folder / "journal.json")
    return Knowledge(config_from(data, []), folder, journal, finished=finished), journal


def test_half_a_phase_is_undone(tmp_path: Path) -> None:
    first, journal = knowledge(tmp_path)
    empty = first.names["memory"]
    assert journal.left("memory")["memory"] == empty
    first.store.add_trajectories([trajectory("one")])
    kept = first.keep("learn-0001")
    assert first.names["memory"] != empty
    journal.finish("learn-0001", store=kept, **first.names)
    first.store.add_trajectories([trajectory("two")])  # a phase that did not end
    first.close()

    again, _ = knowledge(tmp_path)
    assert [found.source for found in again.store.trajectories()] == ["one"]
    assert again.names == {"memory": journal.left("learn-0001")["memory"]}
    again.close()


def test_what_was_added_to_a_finished_run_stays(tmp_path: Path) -> None:
    first, _ = knowledge(tmp_path)
    first.store.add_trajectories([trajectory("one")])
    first.close()
    again, _ = knowledge(tmp_path, finished=True)
    assert [found.source for found in again.store.trajectories()] == ["one"]
    again.close()


def test_a_run_begins_with_a_copy_of_the_memory_that_is_named(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/other.db") as other:
        other.add_trajectories([trajectory("one")])
    run = tmp_path / "run"
    run.mkdir()
    begun, _ = knowledge(run, store=f"sqlite:///{tmp_path}/other.db")
    begun.store.add_trajectories([trajectory("two")])
    begun.close()
    assert names(run / "memory.db") == ["one", "two"]
    assert names(tmp_path / "other.db") == ["one"]
    memory, states = knowledge(run, store="ignored once it has begun")[0].guides()
    assert memory is None  # trajectories alone are nothing to show
    assert states is None


def test_what_a_start_left_that_came_to_nothing_is_removed(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/memory.db") as left:
        left.add_trajectories([trajectory("one")])
    begun, _ = knowledge(tmp_path)
    assert list(begun.store.trajectories()) == []
    begun.close()
