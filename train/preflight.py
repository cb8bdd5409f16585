"""What is checked before a run starts, without torch: engine, tasks, folder, and what an earlier start left there."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from envs.base import Task
from envs.tasksets import load_task_set
from train.config import TRAINING_SECTIONS, Config, ConfigError, load_config, save_config
from train.files import write_json
from train.vllm_server import installed_build


def check_engine(config: Config) -> None:
    """Raise ConfigError when ``model.engine`` is not installed here, or does not go with how the launcher shards."""
    if config.model.engine == "vllm":
        installed_build()
    sharded = [name for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED") if os.environ.get(name) == "true"]
    if sharded and config.model.engine == "hf":
        raise ConfigError(
            f"model.engine: 'hf' cannot generate with weights that are sharded over processes ({sharded[0]}=true); "
            "set model.engine to vllm or server"
        )


def keep_to_one_gpu(environment: MutableMapping[str, str]) -> None:
    """Without a launcher a process trains on the first GPU that it sees: TRL would copy the model to each, and refuses.

    To be called before torch is imported. The run's own server has its devices from ``vllm.devices``.
    """
    if "LOCAL_RANK" not in environment:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]


def task_sets(config: Config) -> dict[str, list[Task]]:
    """The task sets that ``config`` names, by name.

    Raises:
        TaskError: unknown set, missing data. ConfigError: a training set shares tasks with the evaluation set.
    """
    sets = {
        section.tasks: load_task_set(section.tasks, config.env.model_dump(mode="json"))
        for section in (config.warm_start, config.rejection, config.collect, config.grpo, config.eval)
        if section is not None
    }
    _check_disjoint(config, sets)
    return sets


def _check_disjoint(config: Config, sets: dict[str, list[Task]]) -> None:
    held_out = {task.id for task in sets[config.eval.tasks]}
    for name in TRAINING_SECTIONS:
        section = getattr(config, name)
        shared = held_out & {task.id for task in sets[section.tasks]} if section else set()
        if shared:
            raise ConfigError(
                f"{name}.tasks {section.tasks!r} shares {len(shared)} tasks with eval.tasks {config.eval.tasks!r} "
                f"(for example {min(shared)}); train on other tasks"
            )


def changed_fields(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """The names (``section.field``) under which two configurations differ."""
    changed = []
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_fields(old, new, f"{prefix}{key}.")
        elif old != new:
            changed.append(f"{prefix}{key}")
    return sorted(changed)


JOURNAL = "journal.json"


class Journal:
    """The finished phases of a run, each with what it left behind, in ``journal.json``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._phases: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def done(self, phase: str) -> bool:
        return phase in self._phases

    @property
    def phases(self) -> list[str]:
        """The finished phases, in the order in which they ended."""
        return list(self._phases)

    def finish(self, phase: str, **left: Any) -> None:
        self._phases[phase] = left
        write_json(self._path, self._phases)

    def left(self, phase: str) -> dict[str, Any]:
        """What the finished ``phase`` left behind."""
        return self._phases[phase]

    def last(self, key: str) -> Any:
        """The newest value that a finished phase left under ``key``; None when there is none."""
        return next((left[key] for left in reversed(self._phases.values()) if key in left), None)


def prepare_run(config: Config, *, resume: bool) -> Path:
    """Make the run folder, or check that an existing one may be resumed.

    A folder in which no episode was played yet (the model could not be loaded, say) counts as new.

    Raises:
        ConfigError: the folder exists and ``resume`` is not set; it does not exist and ``resume`` is set; its
            configuration differs from ``config``.
    """
    folder = config.run.dir / config.run.name
    saved = folder / "config.yaml"
    if saved.exists() and (folder / "episodes").exists():
        if not resume:
            raise ConfigError(f"run.name: {folder} exists; continue it with --resume or choose another run.name")
        before = load_config(saved)
        if before != config:
            changed = changed_fields(before.model_dump(mode="json"), config.model_dump(mode="json"))
            raise ConfigError(
                f"{saved} was written by another configuration (changed: {', '.join(changed)}); "
                f"resume with the old values or choose another run.name"
            )
        return folder
    if folder.exists() and any(folder.iterdir()) and not saved.exists():
        raise ConfigError(f"run.name: {folder} exists and is no run (no config.yaml); choose another run.name")
    if resume and not folder.exists():
        raise ConfigError(f"--resume: {folder} does not exist; start it without --resume")
    folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(folder):
        (folder / JOURNAL).unlink(missing_ok=True)  # of a start that came to nothing, perhaps with another adapter
        save_config(config, saved)
    return folder


def hold_folder(folder: Path) -> FileLock:
    """Keep other processes out of ``folder`` as long as this one lives (the system lets go when it is killed).

    Raises:
        ConfigError: another process works there.
    """
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"{folder}: another process works in this folder; wait for it, end it, or choose another name"
        ) from None
    return lock
