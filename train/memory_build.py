"""What ``saga memory ingest`` and ``saga memory build`` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from envs.cache import cache_folder
from memory.build_report import BuildReport
from memory.builder_settings import BuilderSettings
from memory.distil import distil
from memory.embedding import EmbeddingFault, make_embedder
from memory.formats import Labels, Problem
from memory.records import MemoryRecordError, Trajectory
from memory.schema import memory_url
from memory.settings import EmbedderSettings
from memory.store import Store
from train.chat import ModelFault
from train.config import apply_override, read_yaml
from train.ingest import is_own, outside_trajectories, run_trajectories
from train.memory_show import plain

Read = TypeVar("Read", bound=BaseModel)

_NOTES = 10
"""Odd or unreadable entries of a file that are told one by one."""


class BuildConfig(BuilderSettings):
    """A builder's settings, and who embeds: what the file of ``saga memory build --config`` holds."""

    embedder: EmbedderSettings = EmbedderSettings()


def ingest(store: Store, files: Sequence[Path], labels: Labels) -> None:
    """Add the episodes of each file and say what went in.

    Raises:
        MemoryRecordError: a file that is no rollout file, or an outside one without world and grammar.
        TrajectoryError: a damaged file of this project.
    """
    for path in files:
        if not path.exists():
            raise MemoryRecordError(f"{path} does not exist; give a run folder or a file of rollouts")
        if is_own(path):
            _add(store, path, run_trajectories(path, labels.round), [])
            continue
        if not (labels.world and labels.grammar):
            raise MemoryRecordError(
                f"{path}: outside rollouts need a world and the name of their action grammar; "
                "give for example --world alfworld --grammar alfworld-0.3"
            )
        parsed = outside_trajectories(path, labels)
        _add(store, path, parsed.trajectories, parsed.problems)


def _add(store: Store, path: Path, trajectories: Iterable[Trajectory], problems: Sequence[Problem]) -> None:
    statuses: Counter[str] = Counter()
    steps = 0
    odd: list[str] = []

    def counted() -> Iterator[Trajectory]:
        nonlocal steps
        for trajectory in trajectories:
            statuses[trajectory.status] += 1
            steps += len(trajectory.steps)
            if trajectory.status == "odd":
                odd.append(f"{trajectory.source}: {trajectory.note}")
            yield trajectory

    new = store.add_trajectories(counted())
    kinds = ", ".join(f"{statuses[status]} {status}" for status in ("complete", "truncated", "odd") if statuses[status])
    typer.echo(f"{path}: {statuses.total()} episodes ({kinds or 'none'}), {new} of them new; {steps} steps")
    for what, notes in (("odd", odd), ("not read", [f"{item.source}: {item.reason}" for item in problems])):
        for note in notes[:_NOTES]:
            typer.echo(f"  {what}: {plain(note)}")
        if len(notes) > _NOTES:
            typer.echo(f"  {what}: {len(notes) - _NOTES} more")


def build(store: Store, folder: Path, config: Path | None, overrides: Sequence[str], builder: str, round: int) -> None:
    """Build ``store`` and print what came of it; progress goes to standard error.

    Raises:
        ConfigError: settings that are wrong. MemoryRecordError: see :func:`memory.distil.distil`.
        ModelFault: no embedding, or a language model that did not answer (what was built until then is kept).
    """
    build_with(store, build_config(config, overrides, builder), folder, round)


def build_with(store: Store, settings: BuildConfig, folder: Path, round: int = 0) -> None:
    """As :func:`build`, by ``settings``."""
    try:
        embedder = make_embedder(settings.embedder, cache_folder() / "vectors.db")
        report = distil(store, settings, embedder, folder, round=round, tell=lambda line: typer.echo(line, err=True))
    except EmbeddingFault as fault:
        raise ModelFault(str(fault)) from None
    for line in report.lines():
        typer.echo(plain(line))
    if isinstance(report.built, BuildReport) and report.built.failed:
        raise ModelFault(report.built.stopped)


def build_folder(where: str) -> Path:
    """Where a builder keeps its files for the store that a user named: beside an SQLite file, else here."""
    url = memory_url(where)
    return (
        Path(url.removeprefix("sqlite:///")).with_suffix(".build")
        if url.startswith("sqlite:///")
        else Path("memory.build")
    )


def build_config(config: Path | None, overrides: Sequence[str], builder: str) -> BuildConfig:
    """The settings of ``config`` with ``overrides`` (``key.sub=value``). Raises ConfigError, MemoryRecordError."""
    data: dict[str, Any] = read_yaml(config) if config else {}
    for override in overrides:
        apply_override(data, override)
    if builder:
        data["builder"] = builder
    return read_settings(BuildConfig, data)


def read_settings(kind: type[Read], data: dict[str, Any], section: str = "") -> Read:
    """Settings of ``kind`` from ``data``. Raises MemoryRecordError: a line per wrong field, within ``section``."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            field = ".".join(map(str, ([section] if section else []) + list(item["loc"]))) or "settings"
            value = "" if item["type"] in ("missing", "value_error") else f" ({item['input']!r})"
            lines.append(f"{field}: {item['msg'].removeprefix('Value error, ')}{value}")
        raise MemoryRecordError("\n".join(lines)) from None
