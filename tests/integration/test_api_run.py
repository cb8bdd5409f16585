"""The outer loop and an ablation with a chat API as the policy: knowledge is learnt, weights are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import error_of, saga
from tests.scripted_server import Reply, ScriptedServer
from train.trajectory import read_episodes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def recipe(folder: Path, url: str) -> Path:
    hashing = {"embedder": {"kind": "hashing"}}
    sections: dict[str, Any] = {
        "run": {"name": "api", "dir": str(folder / "runs")},
        "rounds": 2,
        "model": {"engine": "api", "name": "strong", "urls": [url]},
        "env": {"name": "household", "max_steps": 4},
        "pool": {"workers": 1},
        "agent": {"thoughts": True, "max_new_tokens": 64, "concurrency": 8},
        "collect": {"tasks": "household/easy/train:0-99", "episodes": 6},
        "memory": {"plan_tokens": 0, "validation": {"episodes": 0}, **hashing},
        "samem": {"recall": "hint", **hashing},
        "eval": {"tasks": "household/easy/eval:0-2", "temperature": 0.4, "at_start": False},
    }
    file = folder / "api.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def answer(body: dict[str, Any]) -> Reply:
    """Look around, and open the first drawer that was seen."""
    seen = body["messages"][-1]["content"]
    return Reply("Thought: See what is there.\nAction: " + ("look" if "middle of a room" in seen else "inventory"))


def test_rounds_and_arms_by_an_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ScriptedServer(answer) as server:
        config = recipe(tmp_path, server.url)
        assert saga(monkeypatch, "train", str(config)) == 0
        run = tmp_path / "runs/api"
        collected = list(read_episodes(run / "episodes/collect-0002.jsonl.gz"))
        assert len(collected) == 6
        assert {episode.status for episode in collected} == {"ok"}
        assert all(episode.contexts == [] for episode in collected)
        recalled = [step.recall for episode in collected for step in episode.steps if step.recall is not None]
        assert recalled, "the second round plays with the table of the first"
        assert json.loads((run / "result.json").read_text())["adapter"] is None
        out = tmp_path / "out"
        arms = "trajectory,samem,samem-action,both,reflexion"
        assert saga(monkeypatch, "ablate", str(run), "--arms", arms, "--out", str(out)) == 0
    found = json.loads((out / "ablation.json").read_text())
    assert [row["arm"] for row in found["rows"]] == ["none", *arms.split(",")]
    assert {header.get("Authorization") for header, _ in server.requests} == {"Bearer secret"}
    told = {name: json.loads((out / f"evals/{name}.json").read_text()) for name in ("none", "samem", "samem-action")}
    assert told["none"]["samem"] is None
    assert told["samem"]["samem"]["snapshot"] != told["samem-action"]["samem"]["snapshot"]
    assert (out / "arms/samem-action/made.json").exists()
    assert not (out / "arms/samem").exists()
    notes = [episode.steps[0].note for episode in read_episodes(out / "episodes/reflexion.jsonl.gz")]
    assert sum(map(bool, notes)) == 2 * 6, "three items, two samples, all lost: two further tries each"
    capsys.readouterr()
    refused = error_of(
        monkeypatch, capsys, "train", str(config), "run.name=other", "grpo.tasks=household/easy/train:0-9"
    )
    assert "cannot be trained" in refused
