"""The benchmarks of SAMem, at a size of seconds: their parts run, their verdict follows their figures."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from train.config import load_config

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return importlib.import_module("samem_speed")


def test_states_that_differ_in_one_part_are_apart(speed: ModuleType) -> None:
    of = speed.sums(np.array([0, 1, 24, 25]), speed.made_up_words())  # two digits: 00, 01, 10, 11
    cosines = of @ of.T
    assert np.allclose(np.diag(cosines), 1)
    assert cosines[0, 1] == pytest.approx(5 / 6, abs=0.06)
    assert cosines[0, 3] == pytest.approx(4 / 6, abs=0.06)


def test_recall_and_learner_at_a_small_size(speed: ModuleType) -> None:
    found = speed.recall(300, 40)
    assert (found["agreement"], found["matched"]) == (1.0, 0.5)
    assert 0 < found["known_50_ms"] < found["recall_50_ms"] <= found["recall_99_ms"]
    assert speed.learner(300, 1000)["updates_a_minute"] > 1e5


def test_a_missed_goal_is_told(speed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"recall.recall_50_ms": 1.0, "recall.recall_99_ms": 9.99, "recall.agreement": 0.95}
    assert speed.report(good, 1000) == 0
    assert "recall, ms (median, 99 %)               1.00        9.99" in capsys.readouterr().out
    assert speed.report({**good, "recall.agreement": 0.949, "step.share": 0.05}, 1000) == 1
    assert capsys.readouterr().out.endswith("goals: MISSED: agreement of 95 %; 5 % of the generation time\n")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("actions", {"hint": ("thought", True, "hint"), "replace": ("action", False, "replace")}),
        ("thoughts", {"hint": ("thought", False, "hint"), "replace": ("thought", False, "replace")}),
    ],
)
def test_the_arms_with_recall_are_what_they_say(
    tmp_path: Path, kind: str, settings: dict[str, tuple[str, bool, str]]
) -> None:
    """The script with a stand-in for saga: its overrides make configurations, and name tables that were learnt so."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    tool = tmp_path / "bin" / "saga"
    tool.parent.mkdir()
    tool.write_text('#!/usr/bin/env bash\necho "$@"\n')
    tool.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": "here"}
    script = str(tmp_path / "scripts" / "bench" / "samem_recall.sh")
    told = subprocess.run([script, kind], env=variables, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in told.splitlines()]
    trained = [word for word in lines[0] if word.startswith(("agent.", "grpo="))]
    arms = {}
    for words in lines:
        name = next((word.removeprefix("samem.table=") for word in words if word.startswith("samem.table=")), None)
        if words[0] != "eval" or name is None:
            continue
        overrides = [word for word in words if "=" in word]
        config = load_config(ROOT / "configs" / "learning-household.yaml", [*trained, *overrides])
        assert config.samem is not None
        arms[name] = (config.samem.store, config.samem.lifted, config.samem.recall)
        [learn] = [other for other in lines if other[:2] == ["samem", "learn"] and f"--table {name}" in " ".join(other)]
        own = {word.removeprefix("samem.") for word in overrides if word.startswith("samem.")}
        assert {word for word in learn if "=" in word} == {
            word for word in own if word.partition("=")[0] not in ("database", "table", "recall")
        }
    assert arms == settings
