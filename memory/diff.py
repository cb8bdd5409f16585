"""What changed between two contents of a memory: which items came, which changed their status."""

from __future__ import annotations

from dataclasses import dataclass

from memory.records import MemoryRecordError, Status
from memory.store import Snapshot, Store


@dataclass(frozen=True)
class Content:
    """``statuses``: of every item; ``trajectories``, ``links``: their numbers."""

    statuses: dict[str, Status]
    trajectories: int
    links: int


@dataclass(frozen=True)
class Difference:
    """``added``, ``removed``: items with their status; ``changed``: (item, status before, status after).

    A memory removes nothing: ``removed`` is filled where the second content is the older one, or of another memory.
    """

    added: dict[str, Status]
    removed: dict[str, Status]
    changed: list[tuple[str, Status, Status]]
    trajectories: int
    links: int


def difference(before: Content, after: Content) -> Difference:
    old, new = before.statuses, after.statuses
    return Difference(
        added={id: status for id, status in new.items() if id not in old},
        removed={id: status for id, status in old.items() if id not in new},
        changed=[(id, old[id], status) for id, status in new.items() if id in old and old[id] != status],
        trajectories=after.trajectories - before.trajectories,
        links=after.links - before.links,
    )


def find_snapshot(store: Store, name: str) -> Snapshot:
    """The newest snapshot of this id or label.

    Raises:
        MemoryRecordError: there is none (names those that there are).
    """
    known = store.snapshots()
    for snapshot in reversed(known):
        if name in (snapshot.id, snapshot.label):
            return snapshot
    named = ", ".join(f"{item.id} {item.label}".strip() for item in known[-10:]) or "none yet"
    raise MemoryRecordError(f"snapshot: {name!r} is not in the memory; there are: {named}")


def content(store: Store, snapshot: Snapshot | None = None) -> Content:
    """What a snapshot covers; None: everything there is now."""
    return Content(store.statuses(snapshot), *store.counts(snapshot))
