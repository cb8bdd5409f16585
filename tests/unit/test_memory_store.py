"""The store: what is written is read, claims without evidence are rejected, ledgers add up, snapshots name contents."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.records import (
    EpisodeItem,
    Evidence,
    KeyStep,
    Link,
    MemoryRecordError,
    PrincipleItem,
    ProcedureItem,
    TraceStep,
    Trajectory,
)
from memory.store import Ledger, LedgerEntry, Store

pytestmark = pytest.mark.unit


def trajectory(number: int = 0, **changes: object) -> Trajectory:
    steps = (
        TraceStep(index=0, observation="You are in a vault.", thought="Open it.", action="pull lever", result="Click."),
        TraceStep(index=1, observation="Click.", action="enter  Door", result="The door\nis OPEN now.", reward=1.0),
    )
    base = Trajectory(
        source=f"file#{number}", world="vault", grammar="v1", task=f"task-{number}", task_type="open", goal="Get in.",
        success=True, score=1.0, steps=steps,
    )  # fmt: skip
    return base.model_copy(update=changes)


def episode(of: Trajectory, **changes: object) -> EpisodeItem:
    base = EpisodeItem(
        world=of.world, grammar=of.grammar, task_type=of.task_type, trajectory=of.id, goal=of.goal, outcome="success",
        key_steps=(KeyStep(step=0, what="the lever unlocks"),),
    )  # fmt: skip
    return base.model_copy(update=changes)


PROCEDURE = ProcedureItem(world="vault", grammar="v1", task_type="open", when="a door is shut", steps=("pull {0}",))
PRINCIPLE = PrincipleItem(world="vault", grammar="v1", condition="a lever is in sight", guidance="pull it first")


def link(lower: str, upper: str, of: Trajectory, step: int = 0, quote: str = "click", **changes: object) -> Link:
    base = Link(lower=lower, upper=upper, evidence=(Evidence(trajectory=of.id, step=step, quote=quote),))
    return base.model_copy(update=changes)


def hierarchy(of: Trajectory) -> tuple[list[EpisodeItem | ProcedureItem | PrincipleItem], list[Link]]:
    told = episode(of)
    return [PRINCIPLE, PROCEDURE, told], [
        link(PROCEDURE.id, PRINCIPLE.id, of),
        link(told.id, PROCEDURE.id, of, step=1, quote="the door is open"),
        link(of.id, told.id, of, step=1, quote="enter door"),
    ]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path}/memory.db")


def test_trajectories_come_back_as_they_were_and_in_order(store: Store) -> None:
    first, second = trajectory(0), trajectory(1, task_type="close", round=3)
    assert store.add_trajectories([first, second, first]) == 2
    assert store.add_trajectories([second, trajectory(2)]) == 1
    assert store.trajectory(first.id) == first
    assert list(store.trajectories()) == [first, second, trajectory(2)]
    assert list(store.trajectories(task_type="close")) == [second]
    assert list(store.trajectories(since_round=3)) == [second]
    assert list(store.trajectories(world="elsewhere")) == []
    with pytest.raises(MemoryRecordError, match=r"trajectory: 't-0' is not in the memory"):
        store.trajectory("t-0")


def test_a_hierarchy_is_written_in_one_call_whatever_its_order(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    items, links = hierarchy(of)
    report = store.write(items, links)
    assert (sorted(report.accepted), report.known, report.rejected) == (sorted(item.id for item in items), [], [])
    assert report.links == 3
    assert store.item(PRINCIPLE.id).item == PRINCIPLE
    assert [stored.item for stored in store.items(2)] == [PROCEDURE]
    assert store.item(PRINCIPLE.id).ledger == Ledger()
    assert store.links(upper=PRINCIPLE.id) == [links[0]]
    assert store.links(lower=of.id) == [links[2]]
    again = store.write(items, links)
    assert (again.accepted, again.rejected, again.links) == ([], [], 0)
    assert again.known == [item.id for item in items]


def test_the_ledger_adds_up(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    id = PRINCIPLE.id
    entries = [
        LedgerEntry(id, "e1", 1.0, retrieved=1, instantiated=1, followed=3, violated=1),
        LedgerEntry(id, "e2", 0.5, retrieved=1, instantiated=1),
        LedgerEntry(id, "e3", 0.25, retrieved=1, suppressed=1),
        LedgerEntry(id, "e4", None, retrieved=1, instantiated=1),
    ]
    expected = Ledger(
        retrieved=4, instantiated=3, suppressed=1, followed=3, violated=1,
        episodes_with=2, outcome_with=0.75, episodes_without=1, outcome_without=0.25,
    )  # fmt: skip
    store.credit(entries)
    assert store.ledger(id) == expected
    store.credit(entries[:2])  # again: changes nothing
    assert store.ledger(id) == expected
    store.credit([LedgerEntry(id, "e2", 0.0, retrieved=1, instantiated=1)])
    assert store.ledger(id).outcome_with == 0.5
    with pytest.raises(MemoryRecordError, match=r"outcome: 1.5 of episode e5"):
        store.credit([LedgerEntry(id, "e5", 1.5)])


def test_statuses_and_judgements_keep_their_history(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    store.set_status(PRINCIPLE.id, "audited", "direction 0.2 to 0.4", round=2)
    assert [(change.status, change.reason, change.round) for change in store.history(PRINCIPLE.id)] == [
        ("candidate", "built", 0),
        ("audited", "direction 0.2 to 0.4", 2),
    ]
    assert store.item(PRINCIPLE.id).status == "audited"
    assert store.items(3, statuses=["candidate"]) == []
    assert [stored.id for stored in store.items(3, statuses={"audited"})] == [PRINCIPLE.id]
    with pytest.raises(MemoryRecordError, match="only principles are judged"):
        store.set_status(PROCEDURE.id, "validated", "")
    store.judge(PRINCIPLE.id, "harm", {"harmful": False})
    store.judge(PRINCIPLE.id, "harm", {"harmful": True, "evidence": [1]}, round=2)
    assert [item.verdict for item in store.judgements(PRINCIPLE.id, "harm")] == [
        {"harmful": False},
        {"harmful": True, "evidence": [1]},
    ]


def test_a_snapshot_names_the_content(store: Store, tmp_path: Path) -> None:
    of = trajectory()
    empty = store.snapshot()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    full = store.snapshot("full")
    assert store.snapshot() == full != empty
    store.set_status(PRINCIPLE.id, "retired", "worn out")
    assert store.snapshot() != full
    store.set_status(PRINCIPLE.id, "candidate", "back")
    assert store.snapshot("back") == full
    other = Store(f"sqlite:///{tmp_path}/other.db")
    other.add_trajectories([trajectory()])
    items, links = hierarchy(of)
    other.write(items[1:], links[1:])
    other.write(items, links)
    assert other.snapshot() == full


def test_provenance_follows_links_and_evidence(store: Store) -> None:
    of, unused, cited = trajectory(0), trajectory(1), trajectory(2)
    store.add_trajectories([of, unused, cited])
    items, links = hierarchy(of)
    store.write(items, [*links, link(PROCEDURE.id, PRINCIPLE.id, cited, relation="contradicts")])
    assert store.provenance() == {("vault", "task-0"), ("vault", "task-2")}
    store.set_status(PRINCIPLE.id, "retired", "")
    assert store.provenance() == {("vault", "task-0")}
    for id in (PROCEDURE.id, episode(of).id):
        store.set_status(id, "retired", "")
    assert store.provenance() == set()
