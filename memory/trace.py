"""From a principle down to the raw steps, and from a step up to all that rests on it."""

from __future__ import annotations

from dataclasses import dataclass

from memory.records import Evidence, Link, MemoryRecordError, TraceStep, Trajectory
from memory.store import Store, Stored


@dataclass(frozen=True)
class Node:
    """A record on the way. ``links``: what joins it to the record it was reached from, all of one relation.

    ``children``: the records below it (:func:`trace_down`) or above it (:func:`trace_up`); ``more``: the links that a
    limit left out.
    """

    record: Stored | Trajectory
    links: tuple[Link, ...] = ()
    children: tuple[Node, ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Trace:
    """``steps``: the steps that the links of the tree cite, by (trajectory, step); of each link the first ones."""

    root: Node
    steps: dict[tuple[str, int], TraceStep]


def trace_down(store: Store, id: str, *, limit: int = 5) -> Trace:
    """Everything that an item rests on, down to the trajectories and the steps that the links cite.

    Args:
        limit: links into one record, of those that support it and of those that contradict it, each; and cited steps
            of one link. It bounds the time.

    Raises:
        MemoryRecordError: no such item.
    """
    start = store.item(id)
    links: dict[str, list[Link]] = {}  # upper -> from below, as far as the limit goes
    more: dict[str, int] = {}
    level = [id]
    while level:
        below: dict[str, None] = {}
        for upper, found in store.count_links(level).items():
            links[upper] = [
                link for relation in found for link in store.links(upper=upper, relation=relation, limit=limit)
            ]
            more[upper] = sum(found.values()) - len(links[upper])
            below |= dict.fromkeys(link.lower for link in links[upper])
        level = [lower for lower in below if lower not in links and not lower.startswith("t-")]
    every = [link for of_upper in links.values() for link in of_upper]
    cited = {evidence for link in every for evidence in link.evidence[:limit]}
    records = store.find({link.lower for link in every} | {evidence.trajectory for evidence in cited})

    def node(id: str, joins: tuple[Link, ...]) -> Node:
        below = _grouped([(link.lower, link) for link in links.get(id, [])])
        return Node(records[id], joins, tuple(node(lower, of_lower) for lower, of_lower in below), more.get(id, 0))

    records[id] = start
    return Trace(node(id, ()), _steps(cited, records))


def trace_up(store: Store, trajectory: str, step: int | None = None, *, limit: int = 5) -> Trace:
    """Everything that rests on one step of a trajectory (None: on any): what cites it, and what stands above that.

    Args:
        limit: cited steps of one link that are looked up; no record is left out.

    Raises:
        MemoryRecordError: no such trajectory or step.
    """
    start = store.trajectory(trajectory)
    if step is not None and all(step != there.index for there in start.steps):
        raise MemoryRecordError(f"step: {step} is not in {trajectory} ({len(start.steps)} steps); name one that is")
    direct = store.citing(trajectory, step)
    above: dict[str, list[Link]] = {}
    level = list(dict.fromkeys(link.upper for link in direct))
    while level:
        for lower in level:
            above[lower] = store.links(lower=lower)
        level = list(dict.fromkeys(link.upper for lower in level for link in above[lower] if link.upper not in above))
    every = direct + [link for of_lower in above.values() for link in of_lower]
    cited = {evidence for link in every for evidence in link.evidence[:limit]}
    records = store.find({link.upper for link in every} | {evidence.trajectory for evidence in cited})

    def node(id: str, joins: tuple[Link, ...]) -> Node:
        higher = _grouped([(link.upper, link) for link in above[id]])
        return Node(records[id], joins, tuple(node(upper, of_upper) for upper, of_upper in higher))

    # What is reached through a record that cites the step itself is shown there, not a second time.
    reached = {up.upper for link in direct for up in above[link.upper]}
    lowest = _grouped([(link.upper, link) for link in direct if link.upper not in reached])
    return Trace(Node(start, (), tuple(node(upper, joins) for upper, joins in lowest)), _steps(cited, records))


def _grouped(links: list[tuple[str, Link]]) -> list[tuple[str, tuple[Link, ...]]]:
    """The links by the record they lead to and their relation, in order."""
    groups: dict[tuple[str, str], list[Link]] = {}
    for id, link in links:
        groups.setdefault((id, link.relation), []).append(link)
    return [(id, tuple(group)) for (id, _), group in groups.items()]


def _steps(cited: set[Evidence], records: dict[str, Stored | Trajectory]) -> dict[tuple[str, int], TraceStep]:
    steps: dict[tuple[str, int], TraceStep] = {}
    for evidence in cited:
        record = records[evidence.trajectory]
        assert isinstance(record, Trajectory)  # a link cites trajectories only: checked when it was written
        steps[evidence.trajectory, evidence.step] = next(step for step in record.steps if step.index == evidence.step)
    return steps
