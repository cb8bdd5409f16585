"""Rejection-sampling fine-tuning on a policy that has learnt four games by heart, so that it wins some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.trajectory import read_episodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CONFIG = """\
run: {name: demo, seed: 3}
model: {dtype: float32, max_batch: 8}
env: {name: household, max_steps: 10}
pool: {workers: 1, envs_per_worker: 8}
agent: {context_tokens: 1024, max_new_tokens: 16, concurrency: 8}
lora: {rank: 16, alpha: 32, last_layers: 8}
warm_start: {tasks: 'household/easy/train:0-3', episodes: 4, recovery_share: 0, epochs: 12, learning_rate: 3.0e-3, tokens_per_batch: 512}
rejection: {tasks: 'household/easy/train:0-3', episodes: 4, samples: 3, temperature: 0.5}
eval: {tasks: 'household/easy/eval:0-1'}
"""  # noqa: E501


def test_the_shortest_own_successes_are_learnt_from(smollm2_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "train.cli", "train", "demo.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=1400)
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "runs/demo"
    played = list(read_episodes(run / "episodes/rejection.jsonl.gz"))
    assert len(played) == 12
    assert {episode.adapter for episode in played} == {"policy-v0000"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (figures,) = [line for line in lines if line["phase"] == "rejection-rollouts"]
    assert figures["kept"] == len({episode.task for episode in played if episode.won}) > 0
    losses = [line["loss"] for line in lines if line["phase"] == "rejection"]
    assert losses
    assert json.loads((run / "result.json").read_text())["adapter"] == "adapters/policy-v0001"
    assert "after rejection sampling" in (run / "report/report.html").read_text()
