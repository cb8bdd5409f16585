"""The benchmark of the memory, at a size of seconds: its parts run, and its verdict follows its figures."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from memory.store import Store

pytestmark = pytest.mark.unit

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("memory_scale")
    monkeypatch.setattr(module, "BATCH", 10)
    monkeypatch.setattr(module, "EPISODES_A_PROCEDURE", 10)
    return module


def test_the_store_it_builds_is_what_it_says(scale: ModuleType, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/memory.db"
    figures = scale.write(url, 45)
    # 45 episode records with a link below and one above, 5 procedures, a link above each, 2 principles
    assert (figures["steps"], figures["records"]) == (900, 45 * 3 + 5 * 2 + 2)
    with Store(url) as store:
        assert [len(store.items(level)) for level in (1, 2, 3)] == [45, 5, 2]
        assert store.counts() == (45, 95)
    read = scale.read(url, 45)
    assert 0 < read["trace_down_ms"] <= read["trace_down_p95_ms"]
    assert read["trace_up_cpu_ms"] > 0


def test_the_verdict_follows_the_figures(scale: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"write.ingest_steps_per_s": 2000.0, "read.trace_up_p95_cpu_ms": 49.0, "retrieve.retrieve_cpu_ms": 19.0}
    assert scale.report(good, 10) == 0
    assert "goals: met" in capsys.readouterr().out
    assert scale.report({**good, "read.trace_down_p95_cpu_ms": 50.0}, 10) == 1
    assert "goals: MISSED: trace down under 50 ms" in capsys.readouterr().out
    assert scale.report({**good, "write.ingest_steps_per_s": 1999.0}, 10) == 1
    assert scale.report({**good, "retrieve.retrieve_cpu_ms": 20.5}, 10) == 1


def test_median_and_percentile(scale: ModuleType) -> None:
    figures = scale.spread("x", [(number / 1000, number / 2000) for number in range(1, 101)])
    assert figures == {"x_ms": 50.5, "x_p95_ms": 96.0, "x_cpu_ms": 25.25, "x_p95_cpu_ms": 48.0}


def test_the_launcher_uses_the_activated_environment(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.defpath}", "VIRTUAL_ENV": str(tmp_path)}
    result = subprocess.run(
        [BENCH / "memory_scale.sh", "--episodes", "10"], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert (result.stderr, result.stdout) == ("", "scripts/bench/memory_scale.py --episodes 10\n")


def test_no_benchmark_hides_the_package(scale: ModuleType) -> None:
    """Scripts stand first on the path of what they start: none may be named as a package."""
    assert not {path.stem for path in BENCH.glob("*.py")} & {"envs", "memory", "train", *sys.stdlib_module_names}
