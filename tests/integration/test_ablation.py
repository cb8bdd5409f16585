"""``saga ablate`` finds a known effect, and a kill costs it no finished episode."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import train.ablate
import train.trajectory
from envs.base import Task
from memory.store import Store
from tests.gambling import Gambler, Table
from tests.vault import trajectory
from train.config import Config
from train.trajectory import read_episodes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
ITEMS = [Task("household", f"easy/{number}", "put") for number in range(24)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    url = f"sqlite:///{tmp_path}/memory.db"
    with Store(url) as store:
        store.add_trajectories([trajectory(grammar="alfworld-0.4")])
    sections = {
        "run": {"name": "recipe"},
        "env": {"name": "household"},
        "memory": {"store": url, "embedder": {"kind": "hashing"}, "plan_tokens": 0},
        "eval": {"tasks": "household/easy/eval-48", "temperature": 0.4},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def test_intervals_hold_the_truth(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 experiments on fresh items: 24 of uniform difficulty, two samples an arm; memory mends a third of them.

    A mended item is won with 0.9 if that is more: the mean gain of one is the integral of 0.9 - p over p below 0.9,
    0.405, and a third of that is 0.135. The control has no effect. All is the command's own but model and world.
    """
    agents: list[Gambler] = []

    async def play(configs: Mapping[str, Config], tasks: Any, adapter: Any, folder: Path, digest: str) -> None:
        await train.ablate.play_arms(Table(), agents[-1], configs, tasks, folder, digest)  # type: ignore[arg-type]

    monkeypatch.setattr(train.ablate, "_play", play)
    monkeypatch.setattr(train.ablate, "load_task_set", lambda name, env: ITEMS)
    monkeypatch.setattr(train.trajectory.os, "fsync", lambda file: None)
    truth = {"full": 0.135, "shuffled": 0.0}
    covered, told_apart = Counter[str](), Counter[str]()
    for number in range(100):
        generator = random.Random(f"items {number}")
        chances = {task.id: (generator.random(), generator.random() < 1 / 3) for task in ITEMS}

        def chance(config: Config, task: Task, chances: dict[str, tuple[float, bool]] = chances) -> float:
            usual, mended = chances[task.id]
            helps = mended and config.memory is not None and config.memory.mode == "full"
            return max(usual, 0.9) if helps else usual

        agents.append(Gambler(chance))
        out = tmp_path / str(number)
        train.ablate.ablate_target(str(recipe), list(truth), [f"run.seed={number}"], 2, None, out, False)
        for row in json.loads((out / "ablation.json").read_text())["rows"]:
            if row["arm"] in truth:
                effect = row["effect"]
                covered[row["arm"]] += effect["low"] <= truth[row["arm"]] <= effect["high"]
                told_apart[row["arm"]] += row["p"] < 0.05
    print(f"intervals that hold the truth, of 100: {dict(covered)}; told from no effect: {dict(told_apart)}")
    assert min(covered[arm] for arm in truth) >= 90, covered
    assert told_apart["shuffled"] <= 9, told_apart
    assert told_apart["full"] >= 15, told_apart


def test_a_kill_loses_no_finished_episode(recipe: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    """A language model in real households: killed in the second arm, and gone on with."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "train.cli", "ablate", str(recipe), f"model.name={smollm2_folder}"]
    command += ["eval.tasks=household/easy/train:0-7", "env.max_steps=2", "agent.max_new_tokens=8"]
    command += [
        "model.dtype=float32",
        "--arms",
        "trajectory,reflexion+agent.note_tokens=8+eval.tries=2",
        "--out",
        str(out),
    ]
    second = out / "episodes/trajectory.jsonl.gz"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
        while not second.exists():
            assert first.poll() is None, first.stderr and first.stderr.read()
            time.sleep(0.2)
        first.kill()
    before = {name: (out / f"episodes/{name}.jsonl.gz").read_bytes() for name in ("none", "trajectory")}
    done = subprocess.run([*command, "--resume"], cwd=ROOT, text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "household/easy/train:0-7: 8 items, 2 samples an arm" in " ".join(done.stdout.split())
    assert (out / "episodes/none.jsonl.gz").read_bytes() == before["none"]
    whole = list(read_episodes(second))
    assert second.read_bytes().startswith(before["trajectory"][: len(before["trajectory"]) // 2])
    assert Counter(episode.task for episode in whole) == {f"easy/{number}": 2 for number in range(8)}
    assert all(episode.memory and episode.memory.tokens for episode in whole)
    (tries,) = (out / "episodes").glob("reflexion*")
    retried = [episode for episode in read_episodes(tries) if episode.id.endswith("-try2")]
    assert retried, "two steps win hardly a game"
    for episode in retried:
        assert episode.steps[0].note or not episode.steps[0].text
        assert [span.role for context in episode.contexts for span in context.spans] == ["note", "action", "action"]
