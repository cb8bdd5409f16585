"""``saga show`` and ``saga tasks``: runs, episodes and task sets for the eye."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from envs.tasksets import describe_task_sets, load_task_set, task_set_hash
from memory.usage import MemoryUse, Recall, Regulation
from train.metrics import failure_class, summarise
from train.run_folder import episode_files, find_episode
from train.tables import compact_table, percent
from train.trajectory import Episode, read_episodes


def show_run(run: Path) -> None:
    """A table of the run's phases; an episode's name is <phase>/<id>."""
    columns = ("phase", "episodes", "success %", "score", "steps", "inv. %", "faults", "ids")
    table = compact_table(str(run), columns, left=("phase", "ids"))
    for file in episode_files(run):
        episodes = list(read_episodes(file))
        if not episodes:
            continue
        row = summarise(episodes)
        ids = sorted(episode.id.split("/", 1)[1] for episode in episodes)
        table.add_row(
            episodes[0].phase,
            str(len(episodes)),
            percent(row["success"]),
            f"{row['score']:.3f}",
            f"{row['steps']:.1f}",
            percent(row["invalid_rate"]),
            str(row["faults"]),
            f"{ids[0]} … {ids[-1]}",
        )
    console = Console()
    console.print(table)
    result = run / "result.json"
    adapter = json.loads(result.read_text())["adapter"] if result.is_file() else None
    if adapter:
        console.print(f"adapter: {run / adapter}", highlight=False, soft_wrap=True)


def show_episode(run: Path, episode_id: str) -> None:
    """One episode: task, every turn with thought, action, reward and the world's answer, and the outcome.

    Raises:
        ConfigError: no such episode in the run (names the phases that exist).
    """
    _print_episode(find_episode(run, episode_id))


def _print_episode(episode: Episode) -> None:
    console = Console(highlight=False)
    who = " ".join(part for part in (episode.agent, episode.model, episode.adapter) if part)
    console.print(f"[bold]{escape(episode.id)}[/bold]  {episode.env} {escape(episode.task)}  seed {episode.seed}")
    console.print(f"[dim]{escape(who)}; {episode.tokens_out} tokens written; {episode.seconds:.1f} s[/dim]")
    if episode.steps:
        console.print(f"\n{escape(episode.steps[0].observation)}\n")
    if episode.memory is not None:
        _print_memory(console, episode.memory)
    for step in episode.steps:
        if step.note:
            console.print(f"[bold]note on the try before[/bold] {escape(step.note)}\n")
        mark = "" if step.valid else "  [red]invalid[/red]"
        reward = f"  [green]{step.reward:+.2f}[/green]" if step.reward else ""
        if step.recall is not None and step.recall.thought:
            _print_recall(console, step.recall)
        if step.thought:
            console.print(f"[dim]{step.index + 1:3} {escape(step.thought)}[/dim]")
        said = step.action if step.action is not None else step.text
        if step.regulation is not None:
            _print_regulation(console, step.regulation)
        console.print(f"[cyan]{step.index + 1:3} > {escape(said)}[/cyan]{mark}{reward}")
        console.print(f"    {escape(step.result)}")
    if episode.status != "ok":
        outcome = f"[red]{episode.status}[/red]: {escape(episode.error or '')}"
    elif episode.won:
        outcome = "[green]won[/green]"
    else:
        outcome = f"failed ({failure_class(episode)})"
    console.print(f"\n{outcome}, score {episode.score:.2f}, {len(episode.steps)} steps")


def _print_memory(console: Console, use: MemoryUse) -> None:
    """What the memory gave: the plan it was searched with, and of each item found what was shown, or why it was not."""
    console.print(f"[bold]memory[/bold] {use.mode}, snapshot {use.snapshot[:12]}, {use.tokens} tokens shown")
    if use.plan:
        console.print(f"    plan: {escape(use.plan)}")
    made = {instantiation.item: instantiation for instantiation in use.instantiations}
    for found in use.retrieved:
        parts = f"{found.similarity:.2f} similarity, {found.task_type:.2f} type, {found.utility:.2f} utility"
        console.print(f"    {found.item} {found.status} {found.score:.2f} [dim]({parts})[/dim]")
        if found.item in made:
            one = made[found.item]
            line = f"suppressed: {one.reason}" if one.suppressed else one.text
            console.print(f"      {escape(line)}")
    console.print()


def _print_recall(console: Console, recall: Recall) -> None:
    """What the table gave for a step, and whether it was followed."""
    how = f"{recall.mode}, {'followed' if recall.followed else 'not followed'}"
    console.print(
        f"[magenta]      state {recall.state} ({recall.value:+.3f}): {escape(recall.thought)}[/magenta] ({how})"
    )


def _print_regulation(console: Console, regulation: Regulation) -> None:
    """The proposals that predicates objected to, and what was played instead."""
    for attempt, proposal in enumerate(regulation.proposals):
        violated = [c.item for c in regulation.checks if c.attempt == attempt and c.outcome == "violated"]
        if violated:
            said = "no action" if proposal is None else proposal
            console.print(f"[yellow]      {escape(said)}: violates {', '.join(violated)}[/yellow]")
    if regulation.choice != "original":
        console.print(f"[dim]      played: {regulation.choice}[/dim]")


def show_tasks(name: str | None) -> None:
    """The known task sets, or the items of one with its hash."""
    console = Console(highlight=False, soft_wrap=True)
    if name is None:
        columns = ("name", "tasks", "what it is")
        table = compact_table("task sets", columns, left=("name", "what it is"))
        for row in describe_task_sets():
            table.add_row(*row)
        console.print(table)
        return
    tasks = load_task_set(name, {"name": name.split("/")[0]})
    for task in tasks:
        console.print(f"{task.id}  {task.type}", markup=False)
    console.print(f"{len(tasks)} tasks, sha256 {task_set_hash(tasks)}")
