"""Memories and tables made anew from the trajectories of another memory, for arms that differ in how they are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from memory.audit_store import audit_store
from memory.builder_settings import BuilderSettings, LanguageModelSettings
from memory.predicates import PredicateHost
from memory.records import Trajectory
from memory.store import Store
from train.arms import Built
from train.config import Config, ConfigError, MemoryConfig, SamemConfig
from train.files import write_json
from train.memory_build import BuildConfig, build_with
from train.samem import learn_new, open_with

MADE = "made.json"
"""Stands in the folder of a memory that was made to its end."""


def builder_settings(built: Built, config: Config) -> BuilderSettings:
    """The settings of an arm's builder: those of the section ``memory.builder``, with who it is.

    Raises:
        ConfigError: it is a model, and none is named.
    """
    assert config.memory is not None  # arms that build have one
    settings = config.memory.builder
    if built == "offline":
        return settings.model_copy(update={"builder": "offline"})
    if built == "policy":
        if config.model.engine not in ("server", "api"):
            raise ConfigError(
                f"--arms builder-policy: the policy must answer at an address, but model.engine is "
                f"{config.model.engine!r}; set model.engine=server and model.urls=[http://HOST:PORT]"
            )
        own = {"url": config.model.urls[0], "model": config.model.name}
        limits = settings.model.model_dump() if settings.model else {}
        return settings.model_copy(
            update={"builder": "model", "model": LanguageModelSettings.model_validate(limits | own)}
        )
    if settings.model is None:
        raise ConfigError(
            "--arms builder-strong: who builds? give memory.builder.model.url=https://… and memory.builder.model.model"
        )
    return settings.model_copy(update={"builder": "model"})


def rebuild(source: str, settings: BuilderSettings, memory: MemoryConfig, folder: Path) -> str:
    """URL of the memory in ``folder`` that ``settings`` make of the trajectories of the store ``source``, audited.

    One that was made to its end stays; another one goes on where it was.

    Raises:
        MemoryRecordError: no such store. ConfigError: it was made of another one. ModelFault: the model did not answer;
            what was built is kept.
    """

    def make(store: Store, trajectories: Sequence[Trajectory]) -> None:
        build_with(store, BuildConfig(**settings.model_dump(), embedder=memory.embedder), folder)
        with PredicateHost() as host:
            audit_store(store, host, memory.audit)

    return _anew(source, folder, make)


def relearn(source: str, settings: SamemConfig, folder: Path) -> str:
    """URL of the table in ``folder`` that is learnt with ``settings`` from the trajectories of the store ``source``.

    Raises:
        MemoryRecordError: no such store, or nothing there that the table values. ConfigError: as :func:`rebuild`.
    """

    def make(store: Store, trajectories: Sequence[Trajectory]) -> None:
        table, words = open_with(store, settings.table, settings)
        learn_new(store, table, words, trajectories, name=settings.table)

    return _anew(source, folder, make)


def _anew(source: str, folder: Path, make: Callable[[Store, Sequence[Trajectory]], None]) -> str:
    url = f"sqlite:///{folder / 'memory.db'}"
    with Store(source, create=False) as old:
        origin = {"store": source, "snapshot": old.snapshot()}
        if (folder / MADE).exists():
            if json.loads((folder / MADE).read_text()) != origin:
                raise ConfigError(f"{folder}: was made of another memory; remove it, or choose another --out")
            return url
        trajectories = list(old.trajectories())
    folder.mkdir(parents=True, exist_ok=True)
    with Store(url) as new:
        new.add_trajectories(trajectories)
        make(new, trajectories)
    write_json(folder / MADE, origin)
    return url
