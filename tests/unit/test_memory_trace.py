"""From a principle down to the steps, from a step up to the principle; what changed between two snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.diff import content, difference, find_snapshot
from memory.records import MemoryRecordError, Trajectory
from memory.store import Store
from memory.trace import Node, trace_down, trace_up
from tests.vault import PRINCIPLE, PROCEDURE, episode, hierarchy, link, trajectory

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Seven trajectories, each with its episode under one procedure; one principle, contradicted once."""
    with Store(f"sqlite:///{tmp_path}/memory.db") as opened:
        many = [trajectory(number) for number in range(7)]
        opened.add_trajectories(many)
        for of in many:
            opened.write(*hierarchy(of))
        opened.write([], [link(PROCEDURE.id, PRINCIPLE.id, many[6], step=1, quote="", relation="contradicts")])
        yield opened


def ids(node: Node) -> tuple[object, ...]:
    record = node.record
    return (record.id, *(ids(child) for child in node.children))


def test_down_from_a_principle_to_the_steps(store: Store) -> None:
    trace = trace_down(store, PRINCIPLE.id, limit=2)
    ends = [(episode(of).id, (of.id,)) for of in (trajectory(0), trajectory(1))]
    procedure = (PROCEDURE.id, *ends)
    # two of the seven links that support, and the one that contradicts
    assert ids(trace.root) == (PRINCIPLE.id, procedure, procedure)
    assert [[link.relation for link in child.links] for child in trace.root.children] == [
        ["contradicts"],
        ["supports", "supports"],
    ]
    assert trace.root.more == 5
    assert trace.root.children[0].more == 5
    leaf = trace.root.children[0].children[0].children[0]
    assert leaf.record == trajectory(0)
    cited = leaf.links[0].evidence[0]
    assert trace.steps[cited.trajectory, cited.step].action == "enter  Door"
    assert trace.steps[trajectory(6).id, 1] == trajectory(6).steps[1]
    assert trace_down(store, PRINCIPLE.id, limit=7).root.more == 0
    with pytest.raises(MemoryRecordError, match="item: 'r-1' is not in the memory"):
        trace_down(store, "r-1")


def test_up_from_a_step_to_all_that_rests_on_it(store: Store) -> None:
    of = trajectory(2)
    tree = (episode(of).id, (PROCEDURE.id, *[(PRINCIPLE.id,)] * 2))
    # step 1 is cited for the episode, and by it for the procedure
    assert ids(trace_up(store, of.id, 1).root) == (of.id, tree)
    # step 0 only for the principle
    root = trace_up(store, of.id, 0).root
    assert ids(root) == (of.id, (PRINCIPLE.id,))
    assert isinstance(root.record, Trajectory)
    assert ids(trace_up(store, of.id).root)[1] == tree
    with pytest.raises(MemoryRecordError, match=r"step: 2 is not in t-.* \(2 steps\)"):
        trace_up(store, of.id, 2)
    unused = trajectory(9)
    store.add_trajectories([unused])
    assert ids(trace_up(store, unused.id, 0).root) == (unused.id,)


def test_what_changed_between_two_snapshots(store: Store) -> None:
    store.snapshot("before")
    old = {item.id: "candidate" for level in (1, 2, 3) for item in store.items(level)}
    new = trajectory(7)
    store.add_trajectories([new])
    store.write(*hierarchy(new))
    store.set_status(PRINCIPLE.id, "audited", "")
    store.snapshot("middle")
    store.set_status(PRINCIPLE.id, "retired", "")
    before, middle = (content(store, find_snapshot(store, name)) for name in ("before", "middle"))
    assert before.statuses == old
    found = difference(before, middle)
    assert found.added == {episode(new).id: "candidate"}
    assert found.removed == {}
    assert found.changed == [(PRINCIPLE.id, "candidate", "audited")]
    assert (found.trajectories, found.links) == (1, 3)
    assert difference(middle, content(store)).changed == [(PRINCIPLE.id, "audited", "retired")]
    back = difference(middle, before)
    assert (back.added, back.removed) == ({}, {episode(new).id: "candidate"})
    assert find_snapshot(store, find_snapshot(store, "before").id).label == "before"
    with pytest.raises(MemoryRecordError, match=r"snapshot: 'after' is not in the memory; there are: s-.* before, s-"):
        find_snapshot(store, "after")
