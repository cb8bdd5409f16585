"""``saga memory validate``: what it refuses before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from train.config import ConfigError
from train.memory_validate import validate_target

pytestmark = pytest.mark.unit


def run_folder(folder: Path, **sections: Any) -> str:
    config = {"run": {"name": "night"}, "eval": {"tasks": "household/easy/train:100-119"}} | sections
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder)


@pytest.mark.parametrize(
    ("sections", "tasks", "message"),
    [
        ({}, "household/easy/train:0-19", "the run has no memory; name one with --store"),
        (
            {"memory": {"mode": "shuffled"}},
            "household/easy/train:0-19",
            "memory.mode 'shuffled': no principle is tried in it; set memory.mode=full or direct",
        ),
        (
            {"memory": {}},
            "household/easy/train:110-129",
            "--set household/easy/train:110-129: shares 10 tasks with the run's eval.tasks "
            "'household/easy/train:100-119'",
        ),
    ],
)
def test_refused(tmp_path: Path, sections: dict[str, Any], tasks: str, message: str) -> None:
    run, out = run_folder(tmp_path, **sections), tmp_path / "out"
    with pytest.raises(ConfigError) as error:
        validate_target(run, tasks, [], store=None, adapter=None, round=1, out=out, resume=False)
    assert message in str(error.value)
