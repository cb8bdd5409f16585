"""Metrics of a run: always ``metrics.jsonl``, and Weights & Biases when the configuration asks for it."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from train.config import ConfigError, TrackingConfig

_log = logging.getLogger(__name__)


class Tracker:
    """Writes metrics as they come.

    ``metrics.jsonl`` gets one JSON object a line (``step``, ``phase``, ``time`` in Unix seconds, and the metrics), each
    flushed at once; an existing file is continued. With ``config.wandb`` other than "off" the same goes to wandb,
    which a resumed run continues too. wandb failing after its start costs one warning, never the run.

    Args:
        run_dir: the run's folder (exists).
        run_config: the resolved configuration, shown by wandb.

    Raises:
        ConfigError: wandb is asked for but is not installed or does not start.
    """

    def __init__(self, run_dir: Path, config: TrackingConfig, run_config: dict[str, Any]) -> None:
        path = run_dir / "metrics.jsonl"
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._charts: set[str] = set()
        self._wandb: Any = None
        if config.wandb != "off":
            self._wandb = _start_wandb(run_dir, config, run_config)

    def log(self, step: int, phase: str, **metrics: float | str | None) -> None:
        """Record ``metrics`` of ``phase`` at ``step`` (each phase counts its own steps)."""
        record = {"step": step, "phase": phase, "time": round(time.time(), 3), **metrics}
        self._file.write(json.dumps(record, ensure_ascii=False, default=float) + "\n")
        self._file.flush()
        self._to_wandb(lambda run: self._log_wandb(run, step, phase, metrics))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show ``rows`` (equal keys) as a table in wandb; the episodes themselves are in the run's folder."""
        if not rows:
            return
        columns: list[str | int] = [*rows[0]]

        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Table(columns=columns, data=[[row[column] for column in rows[0]] for row in rows])})

        self._to_wandb(send)

    def close(self) -> None:
        """Finish the wandb run and close the file. May be called twice."""
        self._to_wandb(lambda run: run.finish())
        self._wandb = None
        self._file.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log_wandb(self, run: Any, step: int, phase: str, metrics: Mapping[str, Any]) -> None:
        # grpo-0001, grpo-0002, ... make one curve. wandb's own step must grow over the whole run, while phases count
        # from their start, so each chart has its own axis.
        chart = re.sub(r"-\d+(?=-|$)", "", phase)
        if chart not in self._charts:
            run.define_metric(f"{chart}/*", step_metric=f"{chart}/step")
            self._charts.add(chart)
        run.log({f"{chart}/step": step, **{f"{chart}/{key}": value for key, value in metrics.items()}})

    def _to_wandb(self, send: Callable[[Any], None]) -> None:
        if self._wandb is None:
            return
        try:
            send(self._wandb)
        except Exception as error:  # whatever a tracking service does must not end a training run
            self._wandb = None
            _log.warning("wandb failed (%s: %s); metrics go on in metrics.jsonl only", type(error).__name__, error)


def _start_wandb(run_dir: Path, config: TrackingConfig, run_config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            f"tracking.wandb: {config.wandb!r} but wandb is not installed; pip install wandb, or set tracking.wandb=off"
        ) from None
    settings: dict[str, tuple[str, Any]] = {
        "WANDB_MODE": ("mode", config.wandb),
        "WANDB_PROJECT": ("project", config.project),
        "WANDB_ENTITY": ("entity", config.entity),
        "WANDB_TAGS": ("tags", config.tags),
        "WANDB_DIR": ("dir", str(run_dir)),
        "WANDB_NAME": ("name", run_dir.name),
        "WANDB_RUN_ID": ("id", _wandb_id(run_dir)),
        "WANDB_RESUME": ("resume", "allow"),
    }
    # wandb reads these variables by itself, but an argument would win over them.
    given = {key: value for variable, (key, value) in settings.items() if variable not in os.environ}
    try:
        return wandb.init(config=run_config, **given)
    except Exception as error:  # wandb raises classes of its own, requests' and pydantic's
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"tracking.wandb: {config.wandb!r} did not start ({reason}); run `wandb login`, "
            "or set tracking.wandb=offline or off"
        ) from error


def _wandb_id(run_dir: Path) -> str:
    """The run's id at wandb, kept in the run's folder so that a resumed run continues its curves."""
    path = run_dir / "wandb_id.txt"
    if not path.exists():
        path.write_text(os.urandom(6).hex())
    return path.read_text().strip()


def _cut_torn_line(path: Path) -> None:
    """Cut off the last line where a kill interrupted its writing, so that appending starts on a line of its own."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
