"""What a round changed, as numbers: pure functions over the store's items and the round's episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memory.ledger import LedgerEntry
from memory.records import LEVEL_NAMES
from memory.store import Store
from memory.usage import Regulation
from train.memory import bounded_score, episode_ledger
from train.trajectory import Episode, Step

Statuses = Mapping[str, tuple[int, str]]
"""Of each item its level and status."""

ITEM_LEVELS = (1, 2, 3)


@dataclass(frozen=True)
class Changes:
    """Of one level: new items in use, items that became one with another, and those retired for another reason."""

    added: int = 0
    merged: int = 0
    retired: int = 0


def statuses(store: Store) -> dict[str, tuple[int, str]]:
    """The level and status of every item."""
    return {stored.id: (level, stored.status) for level in ITEM_LEVELS for stored in store.items(level)}


def level_changes(before: Statuses, after: Statuses, merged: Collection[str]) -> dict[str, Changes]:
    """What lies between two moments of a store, by level's name. ``merged``: items retired in favour of another.

    >>> level_changes({"a": (3, "candidate")}, {"a": (3, "retired"), "b": (3, "candidate")}, ["a"])["principle"]
    Changes(added=1, merged=1, retired=0)
    """
    found = {}
    for level in ITEM_LEVELS:
        now = {id: status for id, (of, status) in after.items() if of == level}
        gone = {id for id, status in now.items() if status == "retired" and before.get(id, (0, ""))[1] != "retired"}
        new = {id for id, status in now.items() if id not in before and status != "retired"}
        found[LEVEL_NAMES[level]] = Changes(len(new), len(gone & set(merged)), len(gone - set(merged)))
    return found


def in_use(found: Statuses) -> dict[str, int]:
    """The number of items that are neither rejected nor retired, by level's name."""
    levels = Counter(level for level, status in found.values() if status not in ("rejected", "retired"))
    return {LEVEL_NAMES[level]: levels[level] for level in ITEM_LEVELS}


@dataclass(frozen=True)
class RegulationFigures:
    """What the predicates did in a round.

    ``trigger_rate``: share of checked steps on which the first proposal was in some predicate's scope. ``resampled``:
    replies that were asked for again. ``rescued``: steps on which a refused action was replaced by an accepted one;
    ``overridden``: on which an accepted action gave way to a refused one. These two are known only where the admissible
    actions were recorded; None: nowhere.
    """

    checked: int
    trigger_rate: float | None
    resampled: int
    rescued: int | None
    overridden: int | None


def regulation_figures(episodes: Iterable[Episode]) -> RegulationFigures:
    """Over all steps of ``episodes`` on which a predicate was active."""
    pairs = [(step, step.regulation) for episode in episodes for step in episode.steps if step.regulation is not None]
    triggered = sum(_triggered(regulation) for _, regulation in pairs)
    judged = [
        (_admissible(regulation.proposals[0], step), step.valid)
        for step, regulation in pairs
        if regulation.choice == "resampled" and step.admissible is not None
    ]
    known = any(step.admissible is not None for step, _ in pairs)
    return RegulationFigures(
        checked=len(pairs),
        trigger_rate=triggered / len(pairs) if pairs else None,
        resampled=sum(len(regulation.proposals) - 1 for _, regulation in pairs),
        rescued=sum(not first and played for first, played in judged) if known else None,
        overridden=sum(first and not played for first, played in judged) if known else None,
    )


def _triggered(regulation: Regulation) -> bool:
    return any(check.attempt == 0 and check.outcome in ("followed", "violated") for check in regulation.checks)


def _admissible(action: str | None, step: Step) -> bool:
    return action is not None and action in (step.admissible or ())


def round_credits(episodes: Sequence[Episode], run: str) -> list[LedgerEntry]:
    """What training episodes add to the ledgers: each what it retrieved, and those that played without memory count as
    episodes without the items that were shown to others in the same task and start."""
    shown: dict[tuple[str, str, int], set[str]] = {}
    for episode in episodes:
        if episode.memory is not None:
            ids = {made.item for made in episode.memory.instantiations if not made.suppressed}
            shown.setdefault(_start(episode), set()).update(id for id in ids if not id.startswith("t-"))
    entries = []
    for episode in episodes:
        entries += episode_ledger(episode, run)
        if episode.memory is None:
            name = f"run:{run}/{episode.id}"
            items = sorted(shown.get(_start(episode), ()))
            entries += [LedgerEntry(item=item, episode=name, outcome=bounded_score(episode)) for item in items]
    return entries


def _start(episode: Episode) -> tuple[str, str, int]:
    return episode.phase, episode.task, episode.seed
