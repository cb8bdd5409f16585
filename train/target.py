"""Who plays in ``saga eval`` and ``saga memory validate``: a run, a model or a player without one; and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError, config_from, read_yaml

CONFIG = "config.yaml"
"""A run's configuration, in its folder."""

REQUEST = "request.json"
"""What a folder was asked for: it may be resumed with the same request only."""


def configure(target: str, task_set: str, overrides: list[str], seeds: int, *, model: bool = True) -> Config:
    """The configuration under which ``target`` plays ``task_set``: a run's, or the defaults with its model.

    ``model``: whether a target that is no run names a model. Raises ConfigError.
    """
    run = run_folder(target)
    if run is not None:
        data = read_yaml(run / CONFIG)
        data["warm_start"] = data["rejection"] = data["collect"] = data["grpo"] = None
        data["rounds"] = 1
        own = run / "memory.db"  # and not one in the evaluation's folder, nor the one that the run's began with
        memory, samem = data.get("memory"), data.get("samem")
        if memory and (own.exists() or not memory.get("store")):
            memory["store"] = f"sqlite:///{own}"
        if samem and not samem.get("database"):
            samem["database"] = memory["store"] if memory else str(own)
    else:
        data = {"run": {"name": "eval"}, "env": {"name": task_set.split("/")[0]}, "eval": {}}
        if model:
            data["model"] = {"name": target}
    data["eval"].update(tasks=task_set, seeds=seeds, at_start=True)
    config = config_from(data, overrides)
    if config.samem is not None and config.samem.database is None:
        raise ConfigError(
            "samem.database: none is named, and a memory of its own would be empty; name the file or URL that "
            "`saga samem learn` wrote to"
        )
    return config


def run_folder(target: str) -> Path | None:
    """The folder of a run, if ``target`` is one."""
    return Path(target) if (Path(target) / CONFIG).is_file() else None


def chosen_adapter(target: str, adapter: Path | None) -> Path | None:
    """``adapter``, or a run's final one; None: the base model. Raises ConfigError: no such adapter, unfinished run."""
    run = run_folder(target)
    if adapter is None and run is not None:
        adapter = _final_adapter(run)
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ConfigError(f"--adapter {adapter}: no adapter_config.json there; give a PEFT adapter folder")
    return adapter


def _final_adapter(run: Path) -> Path | None:
    result = run / "result.json"
    if not result.is_file():
        raise ConfigError(f"{run}: the run has not finished (no result.json); resume it, or name one with --adapter")
    adapter = json.loads(result.read_text())["adapter"]
    return run / adapter if adapter else None


def check_folder(folder: Path, identity: dict[str, Any], resume: bool) -> None:
    """Raise ConfigError unless ``folder`` is free, or holds what ``identity`` says and may be resumed.

    One in which no episode was played yet (the server did not start, say) is free.
    """
    file = folder / REQUEST
    if file.exists() and not (folder / "episodes").exists():
        return
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--out {folder}: exists and holds no evaluation; choose another folder")
    elif not resume:
        raise ConfigError(f"--out {folder}: exists; go on with --resume or choose another folder with --out")
    elif json.loads(file.read_text()) != identity:
        raise ConfigError(
            f"--out {folder}: holds another evaluation (configuration, adapter or memory differ); choose another"
        )
