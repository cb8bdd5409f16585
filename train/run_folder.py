"""What a run or an evaluation left in its folder, as far as it is there: read without the model that made it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.compare import read_evaluation
from train.config import ConfigError, read_yaml
from train.target import CONFIG, REQUEST
from train.trajectory import Episode, read_episodes

SUFFIX = ".jsonl.gz"
"""Of a phase's episode file: ``episodes/<phase>.jsonl.gz``."""


@dataclass(frozen=True)
class RunFolder:
    """``config``: as it was resolved, {} where none is kept. ``metrics``: of each phase and step the last line, in the
    order of time. ``evaluations``: by phase, in the order in which they ended. ``journal``: what each finished phase
    left. ``adapter``: the final one, "" without.
    """

    path: Path
    config: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    evaluations: dict[str, dict[str, Any]]
    journal: dict[str, dict[str, Any]]
    adapter: str = ""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def store(self) -> str | None:
        """The memory that it filled, or used: a file or a URL; None: it has none."""
        own = self.path / "memory.db"
        if own.is_file():
            return str(own)
        sections = {"memory": "store", "samem": "database"}
        named = ((self.config.get(section) or {}).get(field) for section, field in sections.items())
        return next((str(address) for address in named if address), None)


def read_run(path: Path) -> RunFolder:
    """A run's or an evaluation's folder. A run that goes on, or that was killed, shows what it has.

    Raises:
        ConfigError: no such folder, or a file in it that is not what it should be.
    """
    if not (path / CONFIG).is_file() and not (path / REQUEST).is_file():
        raise ConfigError(f"{path}: no run or evaluation (neither {CONFIG} nor {REQUEST} is there); name its folder")
    if (path / CONFIG).is_file():
        config = read_yaml(path / CONFIG)
    else:
        config = dict(_read_json(path / REQUEST).get("config") or {})
    evaluations = {file.stem: read_evaluation(file) for file in sorted((path / "evals").glob("*.json"))}
    ordered = dict(sorted(evaluations.items(), key=lambda pair: str(pair[1].get("finished", ""))))
    journal, result = (
        _read_json(file) if file.is_file() else {} for file in (path / "journal.json", path / "result.json")
    )
    metrics = _read_metrics(path / "metrics.jsonl")
    return RunFolder(path, config, metrics, ordered, journal, str(result.get("adapter") or ""))


def episode_files(run: Path) -> list[Path]:
    """The episode files of a run's or an evaluation's folder, or the file itself. Raises ConfigError: there is none."""
    if run.is_file():
        return [run]
    files = sorted((run / "episodes").glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(f"{run}: no episodes/*{SUFFIX} there; give a run or evaluation folder")
    return files


def phase_of(file: Path) -> str:
    return file.name.removesuffix(SUFFIX)


def find_episode(run: Path, id: str) -> Episode:
    """Raises: ConfigError: no such episode in the run (names the phases that exist)."""
    files = episode_files(run)
    phase = id.split("/")[0]
    for file in sorted(files, key=lambda item: phase_of(item) != phase):
        for episode in read_episodes(file):
            if episode.id == id:
                return episode
    phases = ", ".join(map(phase_of, files))
    raise ConfigError(f"--episode {id!r}: not in {run}; phases there: {phases}; `saga show {run}` lists ids")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); restore the file") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds {type(found).__name__}; it must be an object")
    return found


def _read_metrics(path: Path) -> tuple[dict[str, Any], ...]:
    """Of what was logged twice, as after a kill, the last. A torn last line, of a run that goes on, is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            key = str(record["phase"]), int(record["step"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ConfigError(f"{path}: line {number} is no record of metrics; restore the file") from None
        kept.pop(key, None)
        kept[key] = record
    return tuple(kept.values())
