"""A memory built anew from the trajectories of another one: what an arm that names its builder plays with."""

from __future__ import annotations

import json
from pathlib import Path

from memory.audit_store import audit_store
from memory.builder_settings import BuilderSettings, LanguageModelSettings
from memory.predicates import PredicateHost
from memory.store import Store
from train.arms import Built
from train.config import Config, ConfigError, MemoryConfig
from train.files import write_json
from train.memory_build import BuildConfig, build_with

BUILT = "built.json"
"""Stands in the folder of a memory that was built to its end."""


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

    One that was built to its end stays; another one goes on where it was.

    Raises:
        MemoryRecordError: no such store. ConfigError: it was built from another one. ModelFault: the model did not
            answer; what was built is kept.
    """
    url = f"sqlite:///{folder / 'memory.db'}"
    with Store(source, create=False) as old:
        origin = {"store": source, "snapshot": old.snapshot()}
        if (folder / BUILT).exists():
            if json.loads((folder / BUILT).read_text()) != origin:
                raise ConfigError(f"{folder}: was built from another memory; remove it, or choose another --out")
            return url
        trajectories = list(old.trajectories())
    folder.mkdir(parents=True, exist_ok=True)
    with Store(url) as new, PredicateHost() as host:
        new.add_trajectories(trajectories)
        build_with(new, BuildConfig(**settings.model_dump(), embedder=memory.embedder), folder)
        audit_store(new, host, memory.audit)
    write_json(folder / BUILT, origin)
    return url
