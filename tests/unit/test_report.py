"""The report file: what stands in it, that nothing in it acts, and what it says of runs that have little."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memory.records import Trajectory
from memory.store import LedgerEntry, Store
from tests.command import error_of, saga
from tests.unit.test_compare import evaluation, item
from tests.vault import PRINCIPLE, hierarchy, trajectory
from train.figures import Bar, Series, intervals, lines, save, svg
from train.report import write_report
from train.report_memory import memory_tables, rank
from train.report_runs import short_names
from train.trajectory import Episode, append_episode

pytestmark = pytest.mark.unit

HOSTILE = "<script>alert('x')</script>\u202egnp.exe $\\frac{1}{"
"""A task type as a file may hold it: markup, a turn of the writing, and what would be mathematics."""


def result(*items: dict[str, Any], hour: int, success: float, kinds: dict[str, float]) -> dict[str, Any]:
    def metrics(share: float, count: int) -> dict[str, Any]:
        base = {"episodes": count, "items": count, "success": share, "success_interval": [0.0, 1.0], "score": share}
        rates = {"steps": 3.0, "spl": None, "invalid_rate": 0.25, "repeated_rate": 0.0, "faults": 0}
        return base | rates | {"tokens_in": 0, "tokens_out": 0, "failures": {"budget": 1}}

    whole = metrics(success, len(items))
    whole["by_type"] = {kind: metrics(share, 2) for kind, share in kinds.items()}
    return evaluation(*items, metrics=whole, finished=f"2026-01-01T{hour:02}:00:00+00:00")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four items; the start won one of them, the end three."""
    folder = tmp_path / "demo-a"
    (folder / "evals").mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: demo-a}\nmodel: {name: <b>m</b>}\ngrpo: {iterations: 2}\n")
    kinds = ["put", "put", HOSTILE, HOSTILE]
    for phase, hour, count in (("eval-start", 9, 1), ("eval-final", 10, 3)):
        items = [item(f"g{number}", number < count, kind=kind) for number, kind in enumerate(kinds)]
        told = result(
            *items, hour=hour, success=count / 4, kinds={"put": min(1, count / 2), HOSTILE: max(0, count - 2) / 2}
        )
        (folder / "evals" / f"{phase}.json").write_text(json.dumps(told))
    logged = [
        {
            "phase": f"grpo-{n:04d}",
            "step": n,
            "time": 60.0 * n,
            "success": n / 4,
            "loss": -n / 10,
            "iteration_seconds": 60,
        }
        for n in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    for n in (1, 2):
        for number, kind in enumerate(kinds):
            one = Episode(
                id=f"grpo-{n:04d}/{number}", phase=f"grpo-{n:04d}", env="w", task=f"t{number}", task_type=kind,
                seed=0, won=number < n, tokens_in=1000, tokens_out=50,
            )  # fmt: skip
            append_episode(folder / "episodes" / f"grpo-{n:04d}.jsonl.gz", one)
    return folder


def text_of(html: str) -> str:
    """What a reader sees, without the figures."""
    html = re.sub(r"<svg.*?</svg>|<style>.*?</style>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_one_run(run: Path) -> None:
    file = write_report([run])
    assert file == run / "report" / "report.html"
    html = file.read_text()
    text = text_of(html)
    assert "at the start 4 25.0 (0–100) 0.250 3.0 – 25.0 0.0 0" in text
    assert "after RL 4 75.0 (0–100)" in text
    assert "weights after RL – at the start 4 +50.0" in text
    assert "grpo 2 8 0 8,000 400 2 min" in text
    assert "all 2 8 0 8,000 400 2 min" in text
    assert "Memory" not in text
    pictures = sorted(path.name for path in file.parent.glob("*.png"))
    assert pictures == [
        "by-type.png", "contributions.png", "grpo-loss.png", "held-out.png", "training-grpo-by-type-0.png",
        "training-grpo.png",
    ]  # fmt: skip
    assert write_report([run]) == file  # a report is written anew


def test_nothing_in_a_report_acts_or_is_fetched(run: Path) -> None:
    html = write_report([run]).read_text()
    assert "<script" not in html
    assert "<b>m" not in html
    assert "\u202e" not in html
    assert "&lt;script&gt;" in html
    assert not re.search(r"(src|href)=\"(?!#|data:,\")|url\((?!#)|@import", html)
    assert "default-src 'none'" in html
    assert "onerror" not in html


def test_several_runs_are_paired_by_item(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "demo-b"
    (other / "evals").mkdir(parents=True)
    (other / "config.yaml").write_text("run: {name: demo-b}\n")
    items = [item(f"g{number}", True, kind="put") for number in range(5)]
    told = result(*items, hour=11, success=1.0, kinds={"put": 1.0})
    (other / "evals" / "eval-final.json").write_text(json.dumps(told))
    text = text_of(write_report([run, other], tmp_path / "out").read_text())
    assert text.startswith("a · b · saga report")
    assert "b – a" in text
    assert "all success 4 75.0 100.0 +25.0" in text  # the fifth item has no partner
    assert "1 items are in B only and were left out (for example g4)" in text
    assert "more won on 1 items, less on 0, as much on 3" in text


def test_a_run_without_results_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: new}\n")
    text = text_of(write_report([tmp_path]).read_text())
    assert "No evaluation has ended yet." in text


def test_the_command_and_its_mistakes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saga(monkeypatch, "report", str(run)) == 0
    assert capsys.readouterr().out == f"{run / 'report' / 'report.html'}\n"
    assert "a run is named twice" in error_of(monkeypatch, capsys, "report", str(run), str(run))
    assert "no run or evaluation" in error_of(monkeypatch, capsys, "report", str(tmp_path))


def test_names_are_as_long_as_it_takes() -> None:
    def names(*paths: str) -> list[str]:
        return short_names([Path(path) for path in paths])

    assert names("/runs/maze-warm") == ["maze-warm"]
    assert names("/runs/maze-warm", "/runs/maze-grpo") == ["warm", "grpo"]
    assert names("/runs/maze-warm", "/runs/maze-warmer") == ["warm", "warmer"]
    assert names("/runs/maze", "/runs/maze-grpo") == ["maze", "maze-grpo"]
    assert names("/new/maze", "/old/maze") == ["new/maze", "old/maze"]


def test_a_figure_takes_the_colours_of_its_page(tmp_path: Path) -> None:
    draw = lines(
        [Series("$a_{", [(1, 0.5), (2, 1.0)], 0), Series("b & <c>", [(1, 0.25)], 1)], x="x", y="y", percent=True
    )
    text = svg(draw, "demo")
    assert {"var(--s0)", "var(--s1)", "var(--text)", "var(--grid)"} <= set(re.findall(r"var\(--\w+\)", text))
    assert not re.search(r"#0[123]0\d0\d\b", text)  # no stand-in is left
    assert "$a_{" in text
    assert "b &amp; &lt;c&gt;" in text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert ids
    assert all(id.startswith("demo-") for id in ids)
    assert text == svg(draw, "demo")
    save(
        intervals([Bar("a", 0.5, 0.25, 0.75), Bar("a", 0.5, 0.4, 0.6, 1)], x="won", legend={0: "p", 1: "q"}),
        tmp_path / "f.png",
    )
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def kept(store: Store, of: Trajectory) -> None:
    store.add_trajectories([of])
    store.write(*hierarchy(of))


def test_leaders_and_losers_of_a_memory(tmp_path: Path, run: Path) -> None:
    with Store(f"sqlite:///{run / 'memory.db'}") as store:
        kept(store, trajectory())
        procedure = store.items(2)[0].id
        episode = store.items(1)[0].id
        shown = [LedgerEntry(PRINCIPLE.id, f"e{n}", 1.0, retrieved=1, instantiated=1) for n in range(3)]
        store.credit([*shown, LedgerEntry(PRINCIPLE.id, "e3", 0.5)])
        store.credit([LedgerEntry(procedure, "e0", 0.25, instantiated=1), LedgerEntry(procedure, "e1", 1.0)])
        store.credit([LedgerEntry(episode, "e0", 1.0, instantiated=1)])  # never played without it
        check = {"name": "trigger_rate", "state": "passed", "estimate": 0.2, "low": 0.1, "high": 0.3, "k": 2, "n": 10}
        store.judge(PRINCIPLE.id, "audit", {"decision": "passed", "reason": "", "checks": [check | {"note": "fires"}]})
        found = memory_tables(store)
        standings = rank(store.items(3) + store.items(2))
    assert [(one.stored.id, one.difference) for one in found.leaders] == [(PRINCIPLE.id, 0.5)]
    assert [(one.stored.id, one.difference) for one in found.losers] == [(procedure, -0.75)]
    assert [one.difference for one in standings] == [0.5, -0.75]
    assert all(one.low < one.difference < one.high for one in standings)
    assert found.most_shown == []
    assert found.judged[0].cells[0] == "20 (10–30)"
    text = text_of(write_report([run]).read_text())
    assert f"+0.500 ({standings[0].low:+.3f} to {standings[0].high:+.3f}) 1.000 (3) 0.500 (1)" in text
    assert "fires % 20 (10–30); good % –" in text
