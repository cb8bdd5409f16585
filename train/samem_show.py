"""A table of values for the eye: what ``saga samem`` prints."""

from __future__ import annotations

from itertools import pairwise

from rich.console import Console

from memory.qlearning import Candidate, best_tried
from memory.qtable import QTable
from memory.records import MemoryRecordError
from memory.samem_store import read_barriers, read_updates
from memory.store import Store
from train.memory_show import cut, plain
from train.samem import Calibration, check_table, open_table
from train.tables import compact_table, percent


def _open(store: Store, name: str) -> QTable:
    check_table(store, name)
    return open_table(store, name, None, [])[0]


def show_stats(store: Store, name: str) -> None:
    """Raises: MemoryRecordError: no such table."""
    table = _open(store, name)
    console = Console(highlight=False)
    columns = ("round", "episodes", "steps", "found a state %", "states", "thoughts", "updates")
    rows = compact_table(f"samem table {name}", columns)
    barriers = read_barriers(store, name)
    for number in sorted({barrier.round for barrier in barriers}):
        own = [barrier for barrier in barriers if barrier.round == number]
        steps = sum(barrier.steps for barrier in own)
        rows.add_row(
            str(number),
            str(sum(barrier.episodes for barrier in own)),
            str(steps),
            percent(sum(barrier.matched for barrier in own) / max(1, steps)),
            str(own[-1].states),
            str(own[-1].thoughts),
            str(sum(barrier.updates for barrier in own)),
        )
    console.print(rows)
    tried = [value for value, visits in zip(table.values, table.visits, strict=True) if visits]
    positive, negative = (sum(sign * value > 0 for value in tried) for sign in (1, -1))
    console.print(
        f"values: {positive} positive, {negative} negative, highest {max(tried, default=0):.3f}; "
        f"forgotten: {len(table.forgotten)}; snapshot {table.snapshot().id}"
    )


def show_state(store: Store, name: str, state: int, limit: int) -> None:
    """Raises: MemoryRecordError: no such table or state."""
    table = _open(store, name)
    if not table.states:
        raise MemoryRecordError(f"state: table {name!r} has none yet; `saga samem learn` first")
    if not 0 <= state < len(table.states):
        raise MemoryRecordError(f"state: {state} is not in table {name!r}; give 0 to {len(table.states) - 1}")
    console = Console(highlight=False)
    founder = table.states[state]
    console.print(f"[bold]state {state}[/bold]  {plain(founder.text)}")
    console.print(f"[dim]founded by {plain(founder.trajectory)} step {founder.step}, round {founder.round}[/dim]\n")
    best = _best(table, state)
    order = sorted(table.thoughts_of[state], key=lambda thought: (thought in table.forgotten, -table.values[thought]))
    for thought in order[:limit]:
        mark = " [green]recalled[/green]" if thought == best else ""
        mark = " [red]forgotten[/red]" if thought in table.forgotten else mark
        console.print(
            f"{table.values[thought]:+.3f}  {table.visits[thought]:4} visits  "
            f"{table.led_on[thought]}/{table.trials[thought]} led on  {cut(table.thoughts[thought].text)}{mark}"
        )
        if thought in table.judged:
            verdict = table.judged[thought]
            console.print(
                f"        judged {'sound' if verdict.sound else 'unsound'} at {verdict.value:+.3f} "
                f"by {plain(verdict.judge)}: {plain(verdict.reason)}"
            )
        for update in read_updates(store, name=name, thought=thought, limit=min(limit, 3)):
            console.print(
                f"[dim]        {plain(update.trajectory)} step {update.step}: reward {update.reward:+.2f}, "
                f"target {update.target:+.3f}, {update.before:+.3f} -> {update.after:+.3f}[/dim]"
            )
    console.print(f"{min(limit, len(order))} of {len(order)} thoughts")


def show_policy(store: Store, name: str, limit: int) -> None:
    """Raises: MemoryRecordError: no such table."""
    table = _open(store, name)
    rows = compact_table(f"samem table {name}", ("state", "value", "visits", "thought", "in"), left=("thought", "in"))
    visits = [sum(table.visits[thought] for thought in thoughts) for thoughts in table.thoughts_of]
    for state in sorted(range(len(table.states)), key=lambda state: (-visits[state], state))[:limit]:
        best = _best(table, state)
        value = "" if best is None else f"{table.values[best]:+.3f}"
        thought = "" if best is None else cut(table.thoughts[best].text, 60)
        rows.add_row(str(state), value, str(visits[state]), thought, cut(table.states[state].text, 100))
    console = Console(highlight=False)
    console.print(rows)
    console.print(f"{min(limit, len(table.states))} of {len(table.states)} states")


def show_calibration(found: Calibration, embedder: str) -> None:
    rows = compact_table(f"cosines of summaries, {embedder}", ("cosine", "same state %", "different state %"))
    edges = [-1.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.01]
    for low, high in pairwise(edges):
        shares = [sum(low <= value < high for value in kind) / len(kind) for kind in (found.same, found.different)]
        rows.add_row(f"{max(low, 0):.3f}–{min(high, 1):.3f}", *map(percent, shares))
    console = Console(highlight=False)
    console.print(rows)
    for threshold in sorted({0.85, found.threshold}):
        same, different = found.merged(threshold)
        console.print(
            f"threshold {threshold:.3f}: joins {percent(same)} % of the same, {percent(different)} % of others"
        )
    console.print(f"proposed: threshold={found.threshold:.3f} ({len(found.same)} and {len(found.different)} pairs)")


def _best(table: QTable, state: int) -> int | None:
    known = [thought for thought in table.thoughts_of[state] if thought not in table.forgotten]
    candidates = [
        Candidate(table.thoughts[thought].text, table.values[thought], table.visits[thought]) for thought in known
    ]
    place = best_tried(candidates)
    return None if place is None else known[place]
