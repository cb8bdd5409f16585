"""``saga memory``: look at a memory, and take it from one place to another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from memory.store import Store

app = typer.Typer(
    help="The memory: look at it, trace its rules to the steps they rest on, move it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StoreOption = Annotated[
    str,
    typer.Option("--store", help="A memory file, a run folder (its memory.db), or a postgresql:// URL."),
]
DEFAULT_STORE = "memory.db"


class Level(StrEnum):
    trajectory = "trajectory"
    episode = "episode"
    procedure = "procedure"
    principle = "principle"


def open_store(where: str, *, create: bool = False) -> Store:
    """The store that a user named; a command that only reads makes no new one."""
    from memory.schema import memory_url
    from memory.store import Store

    return Store(memory_url(where), create=create)


@app.command()
def stats(store: StoreOption = DEFAULT_STORE) -> None:
    """Count what is in it: trajectories by world, records by level and status, rejected writes by reason."""
    from train.memory_show import show_stats

    with open_store(store) as opened:
        show_stats(opened)


@app.command(name="list")
def list_records(
    level: Annotated[Level, typer.Option(help="Which records.")] = Level.principle,
    status: Annotated[list[str] | None, typer.Option(help="Of this status; may be given several times.")] = None,
    world: Annotated[str | None, typer.Option(help="Of this world.")] = None,
    grammar: Annotated[str | None, typer.Option(help="Of this action grammar.")] = None,
    task_type: Annotated[str | None, typer.Option(help="For this task type (records of any type come too).")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="The rejected writes with their reasons instead.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """List records of one level with status and utility."""
    from train.memory_show import list_items, list_rejections, list_trajectories

    with open_store(store) as opened:
        if rejected:
            list_rejections(opened, limit)
        elif level == Level.trajectory:
            list_trajectories(opened, world, grammar, task_type, limit)
        else:
            list_items(opened, level.value, status, world, grammar, task_type, limit)


@app.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="Of a record, for example r-0123456789abcdef.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Print one record with its status history, utility ledger, judgements and links; or a trajectory's steps."""
    from train.memory_show import show_record

    with open_store(store) as opened:
        show_record(opened, id)


@app.command()
def trace(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A record: what it rests on. A trajectory: what rests on it.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Of a trajectory: what rests on this step.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Links into one record, of each relation.")] = 5,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Walk from a record down to the raw steps, or from a trajectory's step up to all that rests on it."""
    from train.memory_show import show_trace

    with open_store(store) as opened:
        show_trace(opened, id, step, limit)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="Id or label of a snapshot.")],
    after: Annotated[str | None, typer.Argument(help="Another one; default: what is there now.")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Tell what changed between two snapshots: records added, and statuses before and after."""
    from train.memory_show import show_diff

    with open_store(store) as opened:
        show_diff(opened, before, after)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A new file, *.jsonl or *.jsonl.gz.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write everything as JSON lines (format: memory/exchange.py)."""
    from memory.exchange import export_memory

    with open_store(store) as opened:
        counts = export_memory(opened, file)
    typer.echo(f"{file}: {_counted(counts)}")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `saga memory export` wrote.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Read JSON lines into a memory, new or not: all checked, all or nothing."""
    from memory.exchange import import_memory

    with open_store(store, create=True) as opened:
        counts = import_memory(opened, file)
    typer.echo(f"{store}: {_counted(counts)}")


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "nothing new"
