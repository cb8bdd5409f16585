"""``saga memory audit``: predicates judged on the trajectories of a memory, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from memory.audit_checks import Check
from memory.audit_store import audit_store
from memory.predicates import PredicateHost
from memory.settings import AuditSettings
from memory.store import Store
from train.config import apply_override
from train.memory_build import read_settings
from train.tables import compact_table, percent

# The share of steps at which it fires, of good moves that it stops, the differences in good moves between following and
# violating steps, and the share of firings at which no other action passes.
COLUMNS = {
    "trigger_rate": "fires %",
    "false_positives": "good %",
    "direction": "direction",
    "risk_set": "equal times",
    "way_out": "stuck",
}


def audit_and_show(store: Store, world: str | None, grammar: str | None, overrides: Sequence[str]) -> None:
    """Audit, write judgements and statuses, and print the figures. Raises ConfigError, MemoryRecordError: overrides."""
    data: dict[str, Any] = {}
    for override in overrides:
        apply_override(data, override)
    settings = read_settings(AuditSettings, data)
    with PredicateHost() as host:
        audited = audit_store(store, host, settings, world=world, grammar=grammar)
    console = Console()
    if not audited:
        console.print("no principle in use has a predicate")
        return
    table = compact_table("Audit, in per cent (95 % intervals)", ["id", *COLUMNS.values()])
    for row in audited:
        checks = {check.name: check for check in row.audit.checks}
        table.add_row(row.stored.id[:8], *(audit_cell(checks.get(name)) for name in COLUMNS))
    console.print(table)
    for row in audited:
        found = row.audit
        why = found.reason or f"passed on {found.steps} steps of {found.episodes} episodes"
        # The table has no room for whole ids.
        console.print(f"{row.stored.id} {row.status}: {why}", highlight=False, markup=False, soft_wrap=True)


def audit_cell(check: Check | None) -> str:
    if check is None or check.estimate is None or check.low is None or check.high is None:
        return "–"
    if check.name == "way_out":
        return percent(check.estimate)
    low, estimate, high = 100 * check.low, 100 * check.estimate, 100 * check.high
    if check.name == "false_positives":
        return f"{estimate:.1f} (≤{high:.1f})"
    digits = 1 if check.name == "trigger_rate" and check.high < 0.1 else 0
    return f"{estimate:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
