from pathlib import Path

import pytest

from train.config import TrackingConfig
from train.tracking import Tracker

pytestmark = pytest.mark.integration


def test_an_offline_run_can_be_synced_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package: its data file and the table of rollouts lie in the run's folder."""
    pytest.importorskip("wandb")
    for name in ("MODE", "DIR", "RUN_ID", "RESUME"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Tracker(tmp_path, TrackingConfig(wandb="offline"), {"run": {"seed": 0}}) as tracker:
        tracker.log(1, "grpo-0001", success=0.5)
        tracker.table("rollouts", [{"id": "grpo-0001/0", "won": True}])
    run_id = (tmp_path / "wandb_id.txt").read_text()
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    assert (folder / f"run-{run_id}.wandb").stat().st_size > 0
    [table] = (folder / "files" / "media" / "table").glob("rollouts_*.json")
    assert "grpo-0001/0" in table.read_text()
