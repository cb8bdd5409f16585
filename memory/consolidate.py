"""Consolidation: what says the same becomes one record, and no level grows beyond its size.

Nothing is deleted: what leaves is ``retired`` with the reason, and its links stay where they are, so that what rests on
it can still be traced.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from memory.builder_settings import ConsolidationSettings
from memory.embedding import Embedder, Vectors
from memory.records import LEVEL_NAMES, AnyItem, EpisodeItem, PrincipleItem, ProcedureItem
from memory.retrieve import utility
from memory.store import Store, Stored

_OUT_OF_USE = ("retired", "rejected")
_STANDING = {"candidate": 0, "audited": 1, "validated": 2}
_NEGATIONS = frozenset(
    {"no", "not", "never", "none", "nothing", "without", "avoid", "unless"}
    | {"cannot", "can't", "don't", "doesn't", "won't", "shouldn't"}
)
_SLOT = re.compile(r"\{\d+\}")


@dataclass(frozen=True)
class Merge:
    """``retired`` says what ``kept`` says; ``cosine`` of their texts."""

    retired: str
    kept: str
    cosine: float


@dataclass(frozen=True)
class Removal:
    """``id`` was taken out because its level was too large; ``utility`` in [-1, 1]."""

    id: str
    level: int
    utility: float


@dataclass
class ConsolidationReport:
    merges: list[Merge] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for the eye."""
        lines = [f"merged: {len(self.merges)}; removed for size: {len(self.removals)}"]
        lines += [f"  {merge.retired} into {merge.kept} (cosine {merge.cosine:.3f})" for merge in self.merges]
        lines += [f"  {removal.id} (utility {removal.utility:+.3f})" for removal in self.removals]
        return lines


def consolidate(
    store: Store, embedder: Embedder, settings: ConsolidationSettings, round: int = 0
) -> ConsolidationReport:
    """Merge duplicates and keep each level of each world and grammar within its limit. Raises EmbeddingFault."""
    report = ConsolidationReport()
    limits = {1: settings.limits.episodes, 2: settings.limits.procedures, 3: settings.limits.principles}
    for level, limit in limits.items():
        scopes: dict[tuple[str, str], list[Stored]] = defaultdict(list)
        for stored in store.items(level):
            if stored.status not in _OUT_OF_USE:
                scopes[stored.item.world, stored.item.grammar].append(stored)
        for scope, members in sorted(scopes.items()):
            support = _support(store, members, level)
            kept = _merge_duplicates(store, members, support, embedder, settings.similarity, round, report)
            _remove_surplus(store, kept, support, limit, f"{'/'.join(scope)}", round, report)
    return report


def duplicates(items: Sequence[AnyItem], vectors: Vectors, similarity: float) -> list[tuple[int, int, float]]:
    """(index of a duplicate, index of the one that it repeats, cosine), for items in order of preference.

    Leader clustering: an item repeats the nearest earlier one that repeats none itself, if their cosine is at least
    ``similarity`` and they do not differ in what an embedding does not see (see :func:`compatible`).

    Args:
        vectors: of the items' texts, shape (n, d), rows of length one.
    """
    found = []
    leaders: list[int] = []
    for index, vector in enumerate(vectors):
        cosines = vectors[leaders] @ vector
        near = [place for place in np.argsort(-cosines, kind="stable") if cosines[place] >= similarity]
        same = next((place for place in near if compatible(items[leaders[place]], items[index])), None)
        if same is None:
            leaders.append(index)
        else:
            found.append((index, leaders[same], float(cosines[same])))
    return found


def compatible(one: AnyItem, other: AnyItem) -> bool:
    """Whether two items of near texts can be one.

    Not if one negates what the other says ("open it" and "do not open it" are near), if their checks differ, if the
    actions of procedures differ, or the outcomes of episodes.
    """
    if one.task_type != other.task_type:
        return False
    if isinstance(one, EpisodeItem) and isinstance(other, EpisodeItem):
        return one.outcome == other.outcome
    if isinstance(one, ProcedureItem) and isinstance(other, ProcedureItem):
        return _forms(one) == _forms(other)
    if isinstance(one, PrincipleItem) and isinstance(other, PrincipleItem):
        checks = {item.predicate for item in (one, other) if item.predicate is not None}
        return len(checks) <= 1 and negated(one.guidance) == negated(other.guidance)
    return False


def negated(text: str) -> bool:
    """Whether an odd number of negating words stands in ``text``."""
    words = re.findall(r"[\w']+", text.lower().replace("’", "'"))
    return sum(word in _NEGATIONS for word in words) % 2 == 1


def _forms(item: ProcedureItem) -> frozenset[str]:
    """The procedure's actions without which slot is which."""
    return frozenset(_SLOT.sub("{}", " ".join(step.lower().split())) for step in item.steps)


def _support(store: Store, members: Sequence[Stored], level: int) -> dict[str, int]:
    """Supporting less contradicting links of each; an episode rests on its one trajectory."""
    ids = [stored.id for stored in members]
    if level == 1:
        return dict.fromkeys(ids, 1)
    counts = store.count_links(ids)
    return {id: counts[id].get("supports", 0) - counts[id].get("contradicts", 0) for id in ids}


def _merge_duplicates(
    store: Store,
    members: Sequence[Stored],
    support: dict[str, int],
    embedder: Embedder,
    similarity: float,
    round: int,
    report: ConsolidationReport,
) -> list[Stored]:
    """Retire duplicates in favour of the better one; returns what is left, in insertion order."""

    def preference(stored: Stored) -> tuple[int, bool, float, int]:
        checks = isinstance(stored.item, PrincipleItem) and stored.item.predicate is not None
        return (_STANDING[stored.status], checks, utility(stored.ledger), support[stored.id])

    by_type: dict[str, list[Stored]] = defaultdict(list)
    for stored in members:
        by_type[stored.item.task_type].append(stored)
    gone = set()
    for of_type in by_type.values():
        ranked = sorted(of_type, key=preference, reverse=True)  # stable: the older one of equals comes first
        items = [stored.item for stored in ranked]
        vectors = embedder.embed([item.text() for item in items])
        for index, leader, cosine in duplicates(items, vectors, similarity):
            _merge(store, ranked[index], ranked[leader], cosine, round)
            report.merges.append(Merge(ranked[index].id, ranked[leader].id, cosine))
            gone.add(ranked[index].id)
    return [stored for stored in members if stored.id not in gone]


def _merge(store: Store, retired: Stored, kept: Stored, cosine: float, round: int) -> None:
    """What ``retired`` rests on supports ``kept``, what rests on it rests on ``kept``, and its credit goes along.

    An episode tells of its own trajectory alone, so that its links stay with it.
    """
    if retired.item.level > 1:
        below = [link.model_copy(update={"upper": kept.id}) for link in store.links(upper=retired.id)]
        above = [link.model_copy(update={"lower": kept.id}) for link in store.links(lower=retired.id)]
        store.write([], [*below, *above])
    known = {entry.episode for entry in store.entries(kept.id)}
    store.credit([replace(entry, item=kept.id) for entry in store.entries(retired.id) if entry.episode not in known])
    store.set_status(retired.id, "retired", f"says what {kept.id} says (cosine {cosine:.3f})", round)


def _remove_surplus(
    store: Store,
    members: Sequence[Stored],
    support: dict[str, int],
    limit: int,
    scope: str,
    round: int,
    report: ConsolidationReport,
) -> None:
    """Retire the items of lowest standing, and of equals those of lower utility, of less support, the older ones."""
    surplus = len(members) - limit
    if surplus <= 0:
        return
    fresh = [store.item(stored.id) for stored in members]  # merging has credited some
    fresh.sort(key=lambda stored: (_STANDING[stored.status], utility(stored.ledger), support[stored.id]))
    for stored in fresh[:surplus]:
        value = utility(stored.ledger)
        name = LEVEL_NAMES[stored.item.level]
        reason = f"over the limit of {limit} {name}s of {scope}; {stored.status}, with utility {value:+.3f}"
        store.set_status(stored.id, "retired", reason, round)
        report.removals.append(Removal(stored.id, stored.item.level, value))
