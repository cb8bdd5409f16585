"""A memory for the eye: what ``saga memory`` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.tree import Tree

from memory.diff import content, difference, find_snapshot
from memory.grounding import normalise
from memory.records import (
    LEVEL_NAMES,
    EpisodeItem,
    Evidence,
    Link,
    MemoryRecordError,
    PrincipleItem,
    ProcedureItem,
    Trajectory,
)
from memory.samem_store import read_barriers, table_names
from memory.store import JSON, Ledger, Store, Stored
from memory.trace import Node, Trace, trace_down, trace_up
from train.tables import compact_table, percent, printable

SHOWN_LINKS = 10


def plain(text: str) -> str:
    """Text of a model, a world or a file, so that it moves no cursor and marks nothing up."""
    return escape(printable(text))


def cut(text: str, length: int = 160) -> str:
    line = " ".join(text.split())
    return plain(line if len(line) <= length else line[: length - 1] + "…")


def _console() -> Console:
    return Console(highlight=False)


def show_stats(store: Store) -> None:
    console = _console()
    stats = store.stats()
    columns = ("world", "grammar", "trajectories", "steps", "success %", "not complete")
    table = compact_table("trajectories", columns, left=("world", "grammar"))
    for row in stats.trajectories:
        table.add_row(
            plain(row.world),
            plain(row.grammar),
            str(row.trajectories),
            str(row.steps),
            percent(row.succeeded / row.trajectories),
            ", ".join(f"{count} {status}" for status, count in sorted(row.statuses.items()) if status != "complete"),
        )
    console.print(table)

    statuses = ("candidate", "audited", "validated", "rejected", "retired")
    table = compact_table("records", ("level", *statuses), left=("level",))
    for level, counts in stats.items.items():
        table.add_row(f"{LEVEL_NAMES[level]}s", *(str(counts.get(status, 0)) for status in statuses))
    console.print(table)

    links = ", ".join(f"{count} {relation}" for relation, count in stats.links.items()) or "none"
    judged = ", ".join(f"{count} {kind}" for kind, count in stats.judgements.items()) or "none"
    console.print(
        f"links: {links}; judgements: {judged}; ledger entries: {stats.credits}; snapshots: {stats.snapshots}"
    )
    for name in table_names(store):
        last = read_barriers(store, name)[-1]
        console.print(
            f"samem table {plain(name)}: {last.states} states, {last.thoughts} thoughts, snapshot {last.snapshot}"
        )
    if stats.rejected:
        table = compact_table("rejected writes", ("what", "at fault", "writes"), left=("what", "at fault"))
        for (kind, field), count in sorted(stats.rejected.items()):
            table.add_row(kind, field, str(count))
        console.print(table)
        console.print("`saga memory list --rejected` tells the reasons")
    else:
        console.print("rejected writes: none")


def list_items(
    store: Store,
    level: str,
    statuses: Sequence[str] | None,
    world: str | None,
    grammar: str | None,
    task_type: str | None,
    limit: int,
) -> None:
    number = LEVEL_NAMES.index(level)
    found = store.items(number, statuses=statuses, world=world, grammar=grammar, task_type=task_type)
    console = _console()
    for stored in found[:limit]:
        ledger = stored.ledger
        used = (
            f"shown {ledger.instantiated}, outcome with {_mean(ledger.outcome_with, ledger.episodes_with)}, "
            f"without {_mean(ledger.outcome_without, ledger.episodes_without)}"
        )
        console.print(f"[bold]{stored.id}[/bold]  [cyan]{stored.status}[/cyan]  [dim]{used}[/dim]")
        console.print(Padding(cut(stored.item.text(), 240), (0, 0, 0, 4)))
    console.print(f"{min(limit, len(found))} of {len(found)} {level}s")


def list_trajectories(store: Store, world: str | None, grammar: str | None, task_type: str | None, limit: int) -> None:
    table = compact_table("trajectories", ("id", "success", "steps", "task", "goal"), left=("id", "task", "goal"))
    found = store.trajectories(world=world, grammar=grammar, task_type=task_type)
    for record in islice(found, limit):
        success = {True: "yes", False: "no", None: "?"}[record.success]
        table.add_row(record.id, success, str(len(record.steps)), cut(record.task, 80), cut(record.goal))
    _console().print(table)


def list_rejections(store: Store, limit: int) -> None:
    table = compact_table("rejected writes", ("id", "what", "writes", "reason"), left=("id", "what", "reason"))
    found = store.rejections()
    for rejection in found[-limit:]:
        table.add_row(plain(rejection.id), rejection.kind, str(rejection.times), plain(rejection.reason))
    console = _console()
    console.print(table)
    console.print(f"{min(limit, len(found))} of {len(found)}, newest last")


def show_record(store: Store, id: str) -> None:
    """Raises: MemoryRecordError: no such record."""
    if id.startswith("t-"):
        _show_trajectory(store.trajectory(id))
        return
    stored = store.item(id)
    item = stored.item
    console = _console()
    console.print(f"[bold]{id}[/bold]  {LEVEL_NAMES[item.level]}  [cyan]{stored.status}[/cyan]")
    task_type = plain(item.task_type) or "any"
    console.print(
        f"[dim]{plain(item.world)}, grammar {plain(item.grammar)}, task type {task_type}; "
        f"built by {plain(item.builder)} in round {item.round}[/dim]\n"
    )
    for name, value in fields_of(item):
        if value:
            console.print(f"[bold]{name}[/bold]: {plain(value)}")
    console.print("\n[bold]status[/bold]")
    for change in store.history(id):
        console.print(f"  {change.time}  round {change.round}  {change.status}: {plain(change.reason)}")
    console.print("[bold]ledger[/bold]")
    console.print(f"  {_ledger(stored.ledger)}")
    console.print("[bold]judgements[/bold]")
    for judgement in store.judgements(id):
        told = "; ".join(f"{key}: {value_text(value)}" for key, value in judgement.verdict.items())
        console.print(f"  {judgement.time}  round {judgement.round}  {judgement.kind}: {plain(told)}")
    below, above = store.count_links([id])[id], store.links(lower=id)
    console.print(f"[bold]rests on[/bold] ({', '.join(f'{count} {name}' for name, count in below.items()) or 'none'})")
    for relation in below:
        for link in store.links(upper=id, relation=relation, limit=SHOWN_LINKS):
            console.print(f"  {_link(link)} {link.lower}: {_cited(link)}")
    console.print(f"[bold]above it[/bold] ({len(above)})")
    for link in above[:SHOWN_LINKS]:
        console.print(f"  {_link(link)} {link.upper}: {_cited(link)}")
    console.print(f"`saga memory trace {id}` goes on to the steps")


def show_trace(store: Store, id: str, step: int | None, limit: int) -> None:
    """Raises: MemoryRecordError: no such record or step."""
    up = id.startswith("t-")
    if step is not None and not up:
        raise MemoryRecordError(f"--step {step}: {id} is no trajectory; leave it out, or name a t-… id")
    trace = trace_up(store, id, step, limit=limit) if up else trace_down(store, id, limit=limit)
    tree = Tree(_title(trace.root))
    if up and step is not None and isinstance(trace.root.record, Trajectory):
        found = next(item for item in trace.root.record.steps if item.index == step)
        tree.add(f"step {step}: {_step(found.action, found.result)}")
    _grow(tree, trace, trace.root)
    console = _console()
    console.print(tree)
    if up and not trace.root.children:
        console.print("nothing rests on it")


def show_diff(store: Store, before: str, after: str | None) -> None:
    """Raises: MemoryRecordError: no such snapshot."""
    first = content(store, find_snapshot(store, before))
    second = content(store, None if after is None else find_snapshot(store, after))
    found = difference(first, second)
    texts = store.find([*found.added, *found.removed, *(id for id, _, _ in found.changed)])
    table = compact_table(
        f"{before} -> {after or 'now'}", ("", "id", "status", "text"), left=("", "id", "status", "text")
    )
    rows = [
        *(("+", id, status) for id, status in found.added.items()),
        *(("-", id, status) for id, status in found.removed.items()),
        *(("~", id, f"{old} -> {new}") for id, old, new in found.changed),
    ]
    for mark, id, status in rows:
        record = texts[id]
        table.add_row(mark, id, status, cut(record.item.text()) if isinstance(record, Stored) else "")
    console = _console()
    console.print(table)
    console.print(
        f"{len(found.added)} added, {len(found.removed)} removed, {len(found.changed)} changed; "
        f"trajectories {found.trajectories:+d}, links {found.links:+d}"
    )


def _show_trajectory(record: Trajectory) -> None:
    console = _console()
    console.print(f"[bold]{record.id}[/bold]  trajectory  {plain(record.world)} {plain(record.task)}")
    console.print(
        f"[dim]{plain(record.source)}; grammar {plain(record.grammar)}, task type {plain(record.task_type)}, "
        f"round {record.round}, {record.status} {plain(record.note)}[/dim]\n"
    )
    console.print(f"{plain(record.goal)}\n")
    before: str | None = None
    for step in record.steps:
        if step.observation != before:
            console.print(f"    {plain(step.observation)}")
        if step.thought:
            console.print(f"[dim]{step.index:3} {plain(step.thought)}[/dim]")
        mark = "  [red]invalid[/red]" if step.valid is False else ""
        reward = f"  [green]{step.reward:+.2f}[/green]" if step.reward else ""
        console.print(f"[cyan]{step.index:3} > {plain(step.action or '(no action)')}[/cyan]{mark}{reward}")
        console.print(f"    {plain(step.result)}")
        before = step.result
    outcome = {True: "[green]success[/green]", False: "failure", None: "outcome unknown"}[record.success]
    console.print(f"\n{outcome}, score {record.score:.2f}, {len(record.steps)} steps")


def fields_of(item: EpisodeItem | ProcedureItem | PrincipleItem) -> list[tuple[str, str]]:
    match item:
        case EpisodeItem():
            key_steps = "; ".join(f"{key.step} {key.what}" for key in item.key_steps)
            obstacles = "; ".join(item.obstacles)
            return [
                ("trajectory", item.trajectory),
                ("goal", item.goal),
                ("outcome", item.outcome),
                ("key steps", key_steps),
                ("obstacles", obstacles),
            ]
        case ProcedureItem():
            steps = " -> ".join(item.steps)
            return [("when", item.when), ("steps", steps), ("pitfalls", "; ".join(item.pitfalls))]
        case PrincipleItem():
            fields = [
                ("condition", item.condition),
                ("guidance", item.guidance),
                ("expected effect", item.expected_effect),
                ("mechanism", item.mechanism),
                ("scope", item.scope),
                ("exceptions", "; ".join(item.exceptions)),
            ]
            if item.predicate is not None:
                fields += [("trigger", item.predicate.trigger), ("requirement", item.predicate.requirement)]
            return fields


def _ledger(ledger: Ledger) -> str:
    counts = ", ".join(
        f"{name} {getattr(ledger, name)}"
        for name in ("retrieved", "instantiated", "suppressed", "followed", "violated")
    )
    return (
        f"{counts}; outcome with {_mean(ledger.outcome_with, ledger.episodes_with)} ({ledger.episodes_with} episodes), "
        f"without {_mean(ledger.outcome_without, ledger.episodes_without)} ({ledger.episodes_without})"
    )


def _mean(value: float, count: int) -> str:
    return f"{value:.3f}" if count else "–"


def value_text(value: JSON) -> str:
    if isinstance(value, list) and len(value) > SHOWN_LINKS:
        return f"{value_text(value[:3])} and {len(value) - 3} more"
    return value if isinstance(value, str) else json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: JSON) -> JSON:
    """Numbers to four digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value


def _link(link: Link) -> str:
    return "[green]supports[/green]" if link.relation == "supports" else "[red]contradicts[/red]"


def _cited(link: Link) -> str:
    shown = ", ".join(
        f"{item.trajectory} step {item.step}" + (f" “{cut(item.quote, 60)}”" if item.quote else "")
        for item in link.evidence[:3]
    )
    return shown + (f", {len(link.evidence) - 3} more" if len(link.evidence) > 3 else "")


def _step(action: str | None, result: str) -> str:
    return f"> {cut(action or '(no action)', 80)} [dim]{cut(result, 120)}[/dim]"


def _title(node: Node) -> str:
    record = node.record
    if isinstance(record, Trajectory):
        outcome = {True: "success", False: "failure", None: "outcome unknown"}[record.success]
        told = f"({outcome}, {len(record.steps)} steps) {plain(record.source)}"
        return f"[bold]{record.id}[/bold] {plain(record.task)} {told}"
    return f"[bold]{record.id}[/bold] {LEVEL_NAMES[record.item.level]}, {record.status}: {cut(record.item.text())}"


def _grow(tree: Tree, trace: Trace, node: Node) -> None:
    for child in node.children:
        branch = tree.add(f"{_link(child.links[0])} {_title(child)}")
        for item in dict.fromkeys(item for link in child.links for item in link.evidence):
            if (item.trajectory, item.step) in trace.steps:
                branch.add(_evidence(trace, item))
        _grow(branch, trace, child)
    if node.more:
        tree.add(f"… {node.more} more links; --limit shows them")


def _evidence(trace: Trace, item: Evidence) -> str:
    step = trace.steps[item.trajectory, item.step]
    told = normalise(f"{step.action} {step.result}")
    quote = f" “{cut(item.quote, 60)}”" if normalise(item.quote) not in told else ""
    return f"[dim]{item.trajectory} step {item.step}{quote}[/dim] {_step(step.action, step.result)}"
