import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from train.config import ConfigError, TrackingConfig
from train.tracking import Tracker

pytestmark = pytest.mark.unit


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str]] = []
        self.finished = 0

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the module: ``inits`` holds the arguments of init, ``run`` what it returned."""
    for name in ("MODE", "PROJECT", "ENTITY", "TAGS", "DIR", "NAME", "RUN_ID", "RESUME"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    module = SimpleNamespace(run=FakeRun(), inits=[])

    def init(**settings: Any) -> FakeRun:
        module.inits.append(settings)
        return module.run

    module.init = init
    module.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_record_is_on_disk_at_once_with_step_phase_and_time(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, TrackingConfig(), {})
    tracker.log(3, "grpo-0003", success=0.5, adapter="policy-v0003", spl=None)
    [record] = lines(tmp_path)
    time = record.pop("time")
    assert record == {"step": 3, "phase": "grpo-0003", "success": 0.5, "adapter": "policy-v0003", "spl": None}
    assert time > 1.7e9
    tracker.close()
    tracker.close()


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    with Tracker(tmp_path, TrackingConfig(), {}) as tracker:
        tracker.log(1, "x", loss=np.float32(0.5), rows=np.int64(3))
    [record] = lines(tmp_path)
    assert (record["loss"], record["rows"]) == (0.5, 3)


def test_a_resumed_run_appends_after_a_line_that_a_kill_tore(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "pha')
    with Tracker(tmp_path, TrackingConfig(), {}) as tracker:
        tracker.log(2, "x")
    assert [record["step"] for record in lines(tmp_path)] == [1, 2]


def test_wandb_is_not_imported_when_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Tracker(tmp_path, TrackingConfig(), {}) as tracker:
        tracker.table("rollouts", [{"id": 1}])


def test_wandb_gets_the_settings_and_one_axis_for_numbered_phases(tmp_path: Path, wandb: SimpleNamespace) -> None:
    with Tracker(tmp_path, TrackingConfig(wandb="offline", tags=["a"]), {"seed": 1}) as tracker:
        tracker.log(1, "grpo-0001", success=0.25)
        tracker.log(2, "grpo-0002", success=0.5)
        tracker.table("rollouts", [{"id": "e1", "won": True}, {"id": "e2", "won": False}])
    [settings] = wandb.inits
    assert settings.pop("id") == (tmp_path / "wandb_id.txt").read_text()
    assert settings == {
        "config": {"seed": 1},
        "mode": "offline",
        "project": "saga",
        "entity": None,
        "tags": ["a"],
        "dir": str(tmp_path),
        "name": tmp_path.name,
        "resume": "allow",
    }
    assert wandb.run.axes == [("grpo/*", "grpo/step")]
    assert wandb.run.logged == [
        {"grpo/step": 1, "grpo/success": 0.25},
        {"grpo/step": 2, "grpo/success": 0.5},
        {"rollouts": (["id", "won"], [["e1", True], ["e2", False]])},
    ]
    assert wandb.run.finished == 1


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path, wandb: SimpleNamespace) -> None:
    for _ in range(2):
        Tracker(tmp_path, TrackingConfig(wandb="offline"), {}).close()
    first, second = (settings["id"] for settings in wandb.inits)
    assert first == second


def test_wandbs_own_variables_win(tmp_path: Path, wandb: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    Tracker(tmp_path, TrackingConfig(wandb="online"), {}).close()
    assert set(wandb.inits[0]) == {"config", "entity", "tags", "dir", "name", "resume"}


def test_a_failure_after_the_start_costs_one_warning(
    tmp_path: Path, wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(values: dict[str, Any]) -> None:
        raise OSError("disk full")

    wandb.run.log = broken
    with caplog.at_level(logging.WARNING), Tracker(tmp_path, TrackingConfig(wandb="online"), {}) as tracker:
        tracker.log(1, "a", x=1.0)
        tracker.log(2, "a", x=2.0)
        tracker.table("rollouts", [{"id": 1}])
    assert [record.getMessage() for record in caplog.records] == [
        "wandb failed (OSError: disk full); metrics go on in metrics.jsonl only"
    ]
    assert [record["x"] for record in lines(tmp_path)] == [1.0, 2.0]


def test_a_failure_to_start_names_the_field_and_the_remedy(tmp_path: Path, wandb: SimpleNamespace) -> None:
    def init(**settings: Any) -> FakeRun:
        raise RuntimeError("no API key")

    wandb.init = init
    with pytest.raises(ConfigError, match=r"tracking\.wandb: 'online' did not start \(no API key\).*offline or off"):
        Tracker(tmp_path, TrackingConfig(wandb="online"), {})


def test_wandb_missing_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed; pip install wandb"):
        Tracker(tmp_path, TrackingConfig(wandb="offline"), {})
