"""The utility ledger of an item: what episodes did with it, and how they ended with and without it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memory.records import MemoryRecordError


@dataclass(frozen=True)
class LedgerEntry:
    """What one episode did with one item. ``episode``: a name unique over runs, as a trajectory's ``source``.

    ``outcome``: the episode's score in [0, 1]; None: unknown (a fault). ``retrieved`` to ``violated`` are counts.
    """

    item: str
    episode: str
    outcome: float | None
    retrieved: int = 0
    instantiated: int = 0
    suppressed: int = 0
    followed: int = 0
    violated: int = 0


COUNTS = ("retrieved", "instantiated", "suppressed", "followed", "violated")


@dataclass(frozen=True)
class Ledger:
    """The utility of an item: sums over its entries.

    ``with``: episodes in which it was instantiated (shown); ``without``: entries of episodes in which it was neither
    shown nor suppressed, which are those of a control. Where it was suppressed, because it does not apply or another
    one says the same, tells nothing of its use. Only episodes of known outcome count. ``outcome_*``: their mean
    outcome, 0.0 where there are none.
    """

    retrieved: int = 0
    instantiated: int = 0
    suppressed: int = 0
    followed: int = 0
    violated: int = 0
    episodes_with: int = 0
    outcome_with: float = 0.0
    episodes_without: int = 0
    outcome_without: float = 0.0


@dataclass(frozen=True)
class Totals:
    """Sums of ledger entries, from which the means of a :class:`Ledger` come."""

    retrieved: int = 0
    instantiated: int = 0
    suppressed: int = 0
    followed: int = 0
    violated: int = 0
    episodes_with: int = 0
    sum_with: float = 0.0
    episodes_without: int = 0
    sum_without: float = 0.0

    def ledger(self) -> Ledger:
        return Ledger(
            retrieved=self.retrieved,
            instantiated=self.instantiated,
            suppressed=self.suppressed,
            followed=self.followed,
            violated=self.violated,
            episodes_with=self.episodes_with,
            outcome_with=self.sum_with / max(self.episodes_with, 1),
            episodes_without=self.episodes_without,
            outcome_without=self.sum_without / max(self.episodes_without, 1),
        )


TOTALS = tuple(Totals.__dataclass_fields__)


def add_entry(totals: Totals, entry: LedgerEntry) -> Totals:
    """``totals`` with one more entry."""
    counts = {name: getattr(totals, name) + getattr(entry, name) for name in COUNTS}
    if entry.outcome is None:
        return replace(totals, **counts)
    if entry.instantiated:
        counts |= {"episodes_with": totals.episodes_with + 1, "sum_with": totals.sum_with + entry.outcome}
    elif not entry.suppressed:
        counts |= {"episodes_without": totals.episodes_without + 1, "sum_without": totals.sum_without + entry.outcome}
    return replace(totals, **counts)


def check_entry(entry: LedgerEntry) -> None:
    """Raises: MemoryRecordError: an outcome outside [0, 1] or a negative count."""
    if "\0" in entry.episode:  # PostgreSQL has no such text
        raise MemoryRecordError(f"episode: {entry.episode[:80]!r} holds a NUL character; remove it")
    if entry.outcome is not None and not 0 <= entry.outcome <= 1:
        raise MemoryRecordError(f"outcome: {entry.outcome} of episode {entry.episode}; give a score in [0, 1] or None")
    for name in COUNTS:
        if getattr(entry, name) < 0:
            raise MemoryRecordError(f"{name}: {getattr(entry, name)} of episode {entry.episode}; give a count")
