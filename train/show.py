"""``saga show`` and ``saga tasks``: runs, episodes and task sets for the eye."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from envs.tasksets import describe_task_sets, load_task_set, task_set_hash
from train.config import ConfigError
from train.metrics import failure_class, summarise
from train.trajectory import Episode, read_episodes


def _episode_files(run: Path) -> list[Path]:
    if run.is_file():
        return [run]
    files = sorted((run / "episodes").glob("*.jsonl.gz"))
    if not files:
        raise ConfigError(f"{run}: no episodes/*.jsonl.gz there; give a run or evaluation folder")
    return files


def show_run(run: Path) -> None:
    """A table of the run's phases: episodes, success, steps, invalid actions."""
    table = Table(title=str(run))
    for column in ("phase", "episodes", "won", "success", "score", "steps", "invalid", "faults", "first and last id"):
        table.add_column(column, justify="left" if column in ("phase", "first and last id") else "right")
    for file in _episode_files(run):
        episodes = list(read_episodes(file))
        if not episodes:
            continue
        row = summarise(episodes)
        ids = sorted(episode.id for episode in episodes)
        table.add_row(
            episodes[0].phase,
            str(len(episodes)),
            str(sum(episode.won for episode in episodes)),
            f"{row['success']:.1%}",
            f"{row['score']:.3f}",
            f"{row['steps']:.1f}",
            f"{row['invalid_rate']:.1%}",
            str(row["faults"]),
            f"{ids[0]} … {ids[-1]}",
        )
    console = Console()
    console.print(table)
    result = run / "result.json"
    if result.is_file():
        console.print(f"adapter: {run / str(json.loads(result.read_text())['adapter'])}", highlight=False)


def show_episode(run: Path, episode_id: str) -> None:
    """One episode: task, every turn with thought, action, reward and the world's answer, and the outcome.

    Raises:
        ConfigError: no such episode in the run (names the phases that exist).
    """
    files = _episode_files(run)
    phase = episode_id.split("/")[0]
    for file in sorted(files, key=lambda item: item.name != f"{phase}.jsonl.gz"):
        for episode in read_episodes(file):
            if episode.id == episode_id:
                _print_episode(episode)
                return
    phases = ", ".join(file.name.removesuffix(".jsonl.gz") for file in files)
    raise ConfigError(f"--episode {episode_id!r}: not in {run}; phases there: {phases}; `saga show {run}` lists ids")


def _print_episode(episode: Episode) -> None:
    console = Console(highlight=False)
    who = " ".join(part for part in (episode.agent, episode.model, episode.adapter) if part)
    console.print(f"[bold]{escape(episode.id)}[/bold]  {episode.env} {escape(episode.task)}  seed {episode.seed}")
    console.print(f"[dim]{escape(who)}; {episode.tokens_out} tokens written; {episode.seconds:.1f} s[/dim]")
    if episode.steps:
        console.print(f"\n{escape(episode.steps[0].observation)}\n")
    for step in episode.steps:
        mark = "" if step.valid else "  [red]invalid[/red]"
        reward = f"  [green]{step.reward:+.2f}[/green]" if step.reward else ""
        if step.thought:
            console.print(f"[dim]{step.index + 1:3} {escape(step.thought)}[/dim]")
        said = step.action if step.action is not None else step.text
        console.print(f"[cyan]{step.index + 1:3} > {escape(said)}[/cyan]{mark}{reward}")
        console.print(f"    {escape(step.result)}")
    if episode.status != "ok":
        outcome = f"[red]{episode.status}[/red]: {escape(episode.error or '')}"
    elif episode.won:
        outcome = "[green]won[/green]"
    else:
        outcome = f"failed ({failure_class(episode)})"
    console.print(f"\n{outcome}, score {episode.score:.2f}, {len(episode.steps)} steps")


def show_tasks(name: str | None) -> None:
    """The known task sets, or the items of one with its hash."""
    console = Console(highlight=False, soft_wrap=True)
    if name is None:
        table = Table(title="task sets")
        for column in ("name", "tasks", "what it is"):
            table.add_column(column)
        for row in describe_task_sets():
            table.add_row(*row)
        console.print(table)
        return
    tasks = load_task_set(name, {"name": name.split("/")[0]})
    for task in tasks:
        console.print(f"{task.id}  {task.type}", markup=False)
    console.print(f"{len(tasks)} tasks, sha256 {task_set_hash(tasks)}")
