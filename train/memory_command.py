"""``saga memory``: fill a memory, build it, look at it, and take it from one place to another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from memory.store import Store

app = typer.Typer(
    help="The memory: fill and build it, look at it, trace its rules to the steps they rest on, move it.",
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


class Outcome(StrEnum):
    success = "success"
    failure = "failure"


class Builder(StrEnum):
    offline = "offline"
    model = "model"


@app.command()
def ingest(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="Run folders (without their evaluations) or their episodes/*.jsonl.gz; or outside rollouts as .json, "
            ".jsonl (also .gz, .xz).",
        ),
    ],
    world: Annotated[str, typer.Option(help="Outside rollouts: their world, for example alfworld.")] = "",
    grammar: Annotated[
        str, typer.Option(help="Outside rollouts: the form of their actions, for example alfworld-0.3.")
    ] = "",
    agent: Annotated[str, typer.Option(help="Outside rollouts: who played.")] = "",
    task_type: Annotated[str, typer.Option(help="Outside rollouts: the task type where none is stated.")] = "",
    outcome: Annotated[
        Outcome | None,
        typer.Option(help="Outside rollouts: how those ended that do not say (demonstrations: success)."),
    ] = None,
    refusal: Annotated[
        list[str] | None,
        typer.Option(help="Outside rollouts: how the world begins its answer to an action it refuses; repeatable."),
    ] = None,
    round: Annotated[int, typer.Option(min=0, help="The round they belong to.")] = 0,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Add rollouts as level 0, each episode once; truncated and odd ones go in with their status and a note."""
    from memory.formats import Labels
    from train.memory_build import ingest as run

    success = None if outcome is None else outcome == Outcome.success
    labels = Labels(world, grammar, tuple(refusal or ()), agent, task_type, success, round)
    with open_store(store, create=True) as opened:
        run(opened, files, labels)


@app.command()
def build(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as key.sub=value, for example model.url=http://127.0.0.1:8000.")
    ] = None,
    builder: Annotated[
        Builder | None, typer.Option(help="Without a model, or by the language model at model.url (default: offline).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with settings (fields: memory/builder_settings.py).")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where a model's answers and the journal are kept; default: beside the memory file."),
    ] = None,
    round: Annotated[int, typer.Option(min=0, help="The round that new records are stamped with.")] = 0,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Build episodes, procedures and principles from what is new, and merge what says the same.

    By a language model: saga memory build --builder model model.url=https://api.openai.com model.model=NAME

    With a limit: model.max_cost=5 model.price_in=2 model.price_out=8 (prices per million tokens).

    The key is read from the environment variable OPENAI_API_KEY, or the one that model.key names. Answers are cached:
    building the same again costs nothing.
    """
    from train.memory_build import build as run
    from train.memory_build import build_folder

    with open_store(store) as opened:
        run(opened, folder or build_folder(store), config, overrides or [], builder.value if builder else "", round)


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
def audit(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, for example min_episodes=10.")
    ] = None,
    world: Annotated[str | None, typer.Option(help="Only principles of this world.")] = None,
    grammar: Annotated[str | None, typer.Option(help="Only principles of this action grammar.")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Judge predicates on the memory's own trajectories: who passes may block actions, who fails is rejected.

    Fields of the settings: AuditSettings in memory/settings.py.
    """
    from train.memory_audit import audit_and_show

    with open_store(store) as opened:
        audit_and_show(opened, world, grammar, overrides or [])


@app.command()
def validate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Who plays: a run folder, or a model (name, folder or hub id).")
    ],
    task_set: Annotated[
        str,
        typer.Option(
            "--set",
            help="Training tasks to try on, for example household/easy/train:500-599; the memory's are left out.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of the run as key.sub=value, for example memory.validation.samples=4."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="A PEFT adapter folder; default: the run's final one, none for a model.")
    ] = None,
    round: Annotated[
        int | None, typer.Option(min=1, help="That verdicts are stamped with; default: one more than the last.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for episodes and result; default: validations/<target>-<set>-<round>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted validation.")] = False,
    store: Annotated[
        str | None, typer.Option("--store", help="As elsewhere; default: the run's memory, or memory.db for a model.")
    ] = None,
) -> None:
    """Play tasks with and without each principle; what helps is validated, what does not is rejected.

    The most promising are tried first, within memory.validation.episodes (default 256). Differences are paired by task,
    their intervals bootstrapped, and p-values corrected for the number of principles tried (Holm).
    """
    from train.memory_validate import validate_target

    validate_target(
        target, task_set, overrides or [], store=store, adapter=adapter, round=round, out=out, resume=resume
    )


@app.command()
def calibrate(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The embedder, for example embedder.kind=hashing.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Trajectories that are compared: the first ones.")] = 500,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """How near summaries of the same and of different states are, and a clustering threshold for the embedder."""
    from itertools import islice

    from envs.cache import cache_folder
    from memory.embedding import make_embedder
    from train.samem import calibrate as run
    from train.samem import read_settings
    from train.samem_show import show_calibration

    settings = read_settings(None, overrides or [])
    with open_store(store) as opened:
        embedder = make_embedder(settings.embedder, cache_folder() / "vectors.db")
        show_calibration(run(list(islice(opened.trajectories(), limit)), embedder), embedder.name)


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
