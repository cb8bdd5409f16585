"""The table in the database: written barrier by barrier, taken up again as it was, one writer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.embedding import HashingEmbedder
from memory.experience import Experience, Visit
from memory.forgetting import Trial, Verdict
from memory.qtable import QTable
from memory.records import MemoryRecordError, TraceStep, Trajectory
from memory.samem_settings import SamemSettings
from memory.samem_store import (
    find_table,
    learnt_trajectories,
    load_table,
    read_barriers,
    read_updates,
    save_barrier,
    table_names,
    table_provenance,
)
from memory.store import Store
from memory.summary import Words

pytestmark = pytest.mark.unit

SETTINGS = SamemSettings(threshold=0.9, thought_threshold=0.9, alpha=0.5, gamma=0.5)
WORDS = Words(kinds=("door",))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/memory.db") as opened:
        yield opened


def forget_all(trial: Trial) -> Verdict:
    return Verdict(trial.thought, False, "unsound\0", "test", trial.value)


def batch(number: int, thoughts: int = 1) -> list[Experience]:
    visits = tuple(Visit(n, "the hall", f"thought{n}", (1.0 + n,)) for n in range(thoughts))
    return [Experience(f"t-{number}", str(number), visits, round=number)]


def test_a_table_is_taken_up_as_it_was_left(store: Store) -> None:
    table = QTable(SETTINGS, HashingEmbedder(), forget_all)
    first = table.learn(batch(0, thoughts=7))
    save_barrier(store, table, first, None)
    again, words = load_table(store, SETTINGS, HashingEmbedder(), judge=forget_all)
    assert words is None
    assert again.snapshot().id == table.snapshot().id == first.snapshot
    assert again.forgotten == table.forgotten != set()
    assert again.judged == {0: Verdict(0, False, "unsound\ufffd", "test", table.judged[0].value)}
    for learner in (table, again):
        second = learner.learn([*batch(1, thoughts=3), Experience("t-2", "2", (Visit(0, "a cellar", "dig", (0.5,)),))])
    assert again.snapshot().id == table.snapshot().id
    save_barrier(store, again, second, WORDS)
    third, words = load_table(store, SETTINGS, HashingEmbedder())
    assert words == WORDS
    assert third.snapshot().id == table.snapshot().id
    assert (third.episodes, third.barriers) == (3, 2)
    assert third.find_state("a cellar")[0] == 1
    assert third.find_thought(0, "thought3") == 3


def test_every_update_names_its_step_and_every_barrier_its_snapshot(store: Store) -> None:
    table = QTable(SETTINGS, HashingEmbedder())
    barrier = table.learn(batch(0, thoughts=2))
    save_barrier(store, table, barrier, None, name="mine")
    assert read_updates(store, name="mine") == barrier.updates
    [update] = read_updates(store, name="mine", thought=1, limit=1)
    assert (update.trajectory, update.step, update.reward, update.before, update.after) == ("t-0", 1, 2.0, 0.0, 1.0)
    assert learnt_trajectories(store, "mine") == {"t-0"}
    [kept] = read_barriers(store, "mine")
    assert (kept.steps, kept.matched, kept.states, kept.thoughts, kept.updates) == (2, 0, 1, 2, 2)
    assert kept.snapshot == table.snapshot().id
    assert table_names(store) == ["mine"]
    assert find_table(store) is None
    assert read_updates(store) == []


def test_two_writers_do_not_overwrite_each_other(store: Store) -> None:
    one, _ = load_table(store, SETTINGS, HashingEmbedder())
    other, _ = load_table(store, SETTINGS, HashingEmbedder())
    save_barrier(store, one, one.learn(batch(0)), None)
    with pytest.raises(MemoryRecordError, match="another process has learnt meanwhile: load the table again"):
        save_barrier(store, other, other.learn(batch(1)), None)
    assert learnt_trajectories(store) == {"t-0"}


def test_a_table_is_used_with_the_states_it_was_learnt_with(store: Store) -> None:
    table = QTable(SETTINGS, HashingEmbedder())
    save_barrier(store, table, table.learn(batch(0)), None)
    load_table(store, SETTINGS.model_copy(update={"alpha": 0.1, "recall": "hint"}), HashingEmbedder())
    with pytest.raises(MemoryRecordError, match=r"samem table 'main' was learnt with threshold 0.9, not 0.8; set the"):
        load_table(store, SETTINGS.model_copy(update={"threshold": 0.8}), HashingEmbedder())


def test_what_a_table_rests_on(store: Store) -> None:
    trajectories = [
        Trajectory(
            source=f"s{task}",
            world="w",
            grammar="g",
            task=task,
            steps=(TraceStep(index=0, observation="o", action="go"),),
        )
        for task in ("a", "b")
    ]
    store.add_trajectories(trajectories)
    assert table_provenance(store) == frozenset()
    table = QTable(SETTINGS, HashingEmbedder())
    of = [Experience(trajectories[0].id, "0", (Visit(0, "the hall", "go", (1.0,)),))]
    save_barrier(store, table, table.learn(of), None)
    assert table_provenance(store) == {("w", "a")}
    assert table_provenance(store, "other") == frozenset()
