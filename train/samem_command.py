"""``saga samem``: learn a table of state-thought values from rollouts, and look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from train.memory_command import DEFAULT_STORE, StoreOption, open_store

app = typer.Typer(
    help="SAMem: values of thoughts in states, learnt by Q-learning from rollouts.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TableOption = Annotated[str, typer.Option("--table", help="Name of the table in the store.")]


@app.command()
def learn(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN…] [key=value…]",
            help="Run folders or episode files (default: all that the memory holds), and settings "
            "(fields: memory/samem_settings.py).",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with settings.")] = None,
    lifted: Annotated[
        bool, typer.Option("--lifted", help="Value actions with roles for names instead of written thoughts.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Episodes between two barriers.")] = 64,
    table: TableOption = "main",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Learn from rollouts, each episode once; episodes that the table has learnt from are left out."""
    from train.samem import learn_offline

    words = runs or []
    paths = [Path(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word] + (["lifted=true"] if lifted else [])
    with open_store(store, create=True) as opened:
        done = learn_offline(opened, paths, name=table, config=config, overrides=overrides, batch=batch)
    typer.echo(
        f"learnt from {done.episodes} episodes ({done.known} known), {done.updates} updates, "
        f"{done.forgotten} thoughts forgotten; snapshot {done.snapshot}"
    )


@app.command()
def stats(table: TableOption = "main", store: StoreOption = DEFAULT_STORE) -> None:
    """States, thoughts and values; growth of the state space, and the share of steps that found a state, by round."""
    from train.samem_show import show_stats

    with open_store(store) as opened:
        show_stats(opened, table)


@app.command()
def show(
    state: Annotated[int, typer.Argument(metavar="STATE", help="Number of the state.")],
    limit: Annotated[int, typer.Option(min=1, help="Thoughts, and updates of each.")] = 10,
    table: TableOption = "main",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """One state: its thoughts with value and visits, what was forgotten and why, and the steps behind the values."""
    from train.samem_show import show_state

    with open_store(store) as opened:
        show_state(opened, table, state, limit)


@app.command()
def policy(
    limit: Annotated[int, typer.Option(min=1, help="States, the most visited first.")] = 50,
    table: TableOption = "main",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """What would be recalled in each state."""
    from train.samem_show import show_policy

    with open_store(store) as opened:
        show_policy(opened, table, limit)
