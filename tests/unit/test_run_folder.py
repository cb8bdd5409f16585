"""Reading what a run left: repeated lines, torn ones, and a run that has hardly begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.test_compare import evaluation, item
from train.config import ConfigError
from train.run_folder import episode_files, find_episode, read_run
from train.trajectory import Episode, append_episode

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: demo}\n")
    return folder


def test_a_run_that_has_hardly_begun(run: Path) -> None:
    found = read_run(run)
    assert (found.name, found.metrics, found.evaluations, found.journal, found.adapter) == ("demo", (), {}, {}, "")
    assert found.store is None
    with pytest.raises(ConfigError, match=r"no episodes/\*\.jsonl\.gz there"):
        episode_files(run)


def test_of_a_step_that_was_repeated_the_last_line_counts_and_a_torn_end_is_left_out(run: Path) -> None:
    lines = [("grpo-0001", 0.1), ("grpo-0002", 0.2), ("grpo-0002", 0.3)]
    text = "".join(json.dumps({"phase": name, "step": 1, "time": 0, "success": won}) + "\n" for name, won in lines)
    (run / "metrics.jsonl").write_text(text + '{"phase": "grpo-00')
    assert [(line["phase"], line["success"]) for line in read_run(run).metrics] == [
        ("grpo-0001", 0.1),
        ("grpo-0002", 0.3),
    ]
    (run / "metrics.jsonl").write_text('{"phase": "grpo-00\n' + text)
    with pytest.raises(ConfigError, match="line 1 is no record of metrics"):
        read_run(run)


def test_evaluations_stand_in_the_order_in_which_they_ended(run: Path) -> None:
    (run / "evals").mkdir()
    for name, hour in (("eval-final", 12), ("eval-start", 9), ("eval-round-0001", 11)):
        result = evaluation(item("g", True), finished=f"2026-01-01T{hour:02}:00:00+00:00")
        (run / "evals" / f"{name}.json").write_text(json.dumps(result))
    (run / "result.json").write_text('{"adapter": "adapters/policy-v0002", "evals": []}')
    found = read_run(run)
    assert list(found.evaluations) == ["eval-start", "eval-round-0001", "eval-final"]
    assert found.adapter == "adapters/policy-v0002"
    (run / "result.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds list; it must be an object"):
        read_run(run)


def test_the_memory_is_the_runs_own_or_the_one_that_it_names(run: Path) -> None:
    (run / "config.yaml").write_text("memory: {store: 'postgresql://host/m'}\nsamem: {database: other.db}\n")
    assert read_run(run).store == "postgresql://host/m"
    (run / "config.yaml").write_text("memory: null\nsamem: {database: other.db}\n")
    assert read_run(run).store == "other.db"
    (run / "memory.db").touch()
    assert read_run(run).store == str(run / "memory.db")


def test_an_evaluations_folder_holds_its_configuration_in_the_request(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"config": {"memory": {"store": "m.db"}}, "adapter_hash": ""}')
    assert read_run(tmp_path).store == "m.db"
    with pytest.raises(ConfigError, match=r"no run or evaluation \(neither config.yaml nor request.json is there\)"):
        read_run(tmp_path / "elsewhere")


def test_an_episode_is_found_by_its_id(run: Path) -> None:
    for phase in ("eval", "grpo-0001"):
        one = Episode(id=f"{phase}/0", phase=phase, env="w", task="t", task_type="k", seed=0)
        append_episode(run / "episodes" / f"{phase}.jsonl.gz", one)
    assert find_episode(run, "grpo-0001/0").phase == "grpo-0001"
    with pytest.raises(ConfigError, match=r"not in .*; phases there: eval, grpo-0001"):
        find_episode(run, "grpo-0001/1")
