"""What a report tells of a run's memory: its principles with their judgements, and who leads and loses in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memory.audit_checks import Check
from memory.samem_store import KeptBarrier, read_barriers, table_names
from memory.store import Judgement, Ledger, Stats, Store, Stored
from memory.validation import ledger_interval
from train.memory_audit import COLUMNS, audit_cell

SHOWN = 5
"""Leaders, and losers."""

PRINCIPLES = 40
"""Principles that are listed: validated ones first, then audited ones, hypotheses, rejected and retired ones."""

_ORDER = ("validated", "audited", "candidate", "rejected", "retired")


@dataclass(frozen=True)
class Judged:
    """A principle with its newest judgements. ``cells``: of its audit, as ``saga memory audit`` prints them."""

    stored: Stored
    cells: list[str]
    audit: str
    validation: dict[str, Any] | None


@dataclass(frozen=True)
class Standing:
    """An item's mean outcome with it less without it, and the 95 % interval (Newcombe)."""

    stored: Stored
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class MemoryTables:
    stats: Stats
    columns: list[str]
    judged: list[Judged]
    more: int
    """Principles that are not listed."""
    leaders: list[Standing]
    losers: list[Standing]
    most_shown: list[Stored]
    """Where nothing was played without it: there is no difference to tell."""
    values: dict[str, list[KeptBarrier]]


def memory_tables(store: Store) -> MemoryTables:
    """All of it, as the memory is now."""
    principles = sorted(store.items(3), key=lambda stored: _ORDER.index(stored.status))
    every = [stored for level in (3, 2, 1) for stored in store.items(level)]
    standings = rank([stored for stored in every if has_control(stored.ledger)])
    shown = sorted(every, key=lambda stored: -stored.ledger.instantiated)[:SHOWN]
    return MemoryTables(
        store.stats(),
        list(COLUMNS.values()),
        [_judged(store, stored) for stored in principles[:PRINCIPLES]],
        max(0, len(principles) - PRINCIPLES),
        [one for one in standings if one.difference > 0][:SHOWN],
        [one for one in reversed(standings) if one.difference < 0][:SHOWN],
        [] if standings else [stored for stored in shown if stored.ledger.instantiated],
        {name: read_barriers(store, name) for name in table_names(store)},
    )


def has_control(ledger: Ledger) -> bool:
    return min(ledger.episodes_with, ledger.episodes_without) > 0


def rank(items: Sequence[Stored]) -> list[Standing]:
    """The items by the difference of their mean outcomes, the highest first; of equals the most used one."""
    found = [
        Standing(stored, stored.ledger.outcome_with - stored.ledger.outcome_without, *ledger_interval(stored.ledger))
        for stored in items
    ]
    return sorted(found, key=lambda one: (-one.difference, -one.stored.ledger.episodes_with, one.stored.id))


def _judged(store: Store, stored: Stored) -> Judged:
    newest: dict[str, Judgement] = {judgement.kind: judgement for judgement in store.judgements(stored.id)}
    audit = newest["audit"].verdict if "audit" in newest else {}
    found = audit.get("checks")
    checks = {one["name"]: Check(**one) for one in found if isinstance(one, dict)} if isinstance(found, list) else {}  # type: ignore[arg-type]
    said = str(audit.get("reason") or audit.get("decision") or "no audit")
    validation = newest["validation"].verdict if "validation" in newest else None
    return Judged(stored, [audit_cell(checks.get(name)) for name in COLUMNS], said, validation)
