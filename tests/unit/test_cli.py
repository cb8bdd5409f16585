"""The command line: instant help, and one clear error with exit code 2 for each kind of bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.cli import main
from train.trajectory import Episode, Step, append_episode

pytestmark = pytest.mark.unit

CONFIG = """\
run: {name: demo}
env: {name: household}
eval: {tasks: 'household/easy/eval:0-3'}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "demo.yaml").write_text(CONFIG)
    return tmp_path


def saga(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["saga", *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["validate", "none.yaml"], "config none.yaml: No such file or directory"),
        (["train", "demo.yaml", "agent.thought=1"], "agent.thought: unknown key (value 1); did you mean 'thoughts'?"),
        (["train", "demo.yaml", "eval.tasks=household/easy/eval-49"], "household/easy/eval-48"),
        (["train", "demo.yaml", "--resume"], "--resume: runs/demo does not exist"),
        (["eval", "expert", "--set", "alfworld/valid_seen"], "ALFWORLD_DATA"),
        (["eval", "expert", "--set", "nowhere/at-all"], "env.name: 'nowhere'"),
        (["eval", "expert", "--set", "household/easy/eval:0-1", "--adapter", "x"], "--adapter x: no adapter_config"),
        (["eval", "no/such/model", "--set", "household/easy/eval:0-1"], "model.name: 'no/such/model'"),
        (["play", "household", "--task", "easy/x"], "easy/x"),
        (["play", "jericho", "--folder", "nowhere"], "nowhere"),
        (["show", "nowhere"], "nowhere: no episodes"),
        (["tasks", "household/easy"], "household/easy"),
        (["export", "nowhere", "--adapter", "out"], "nowhere"),
        (["export", "nowhere"], "give exactly one of --adapter DIR, --merged DIR, --dataset DIR"),
        (["data", "scienceworld"], "only alfworld needs a download"),
    ],
)
def test_bad_input_is_one_error_with_exit_code_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    before = sorted(folder.rglob("*"))
    assert saga(monkeypatch, *args) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert len(output.err.strip().splitlines()) == 1
    assert [path for path in sorted(folder.rglob("*")) if "cache" not in str(path)] == before


def episode(**changes: object) -> Episode:
    step = Step(index=0, observation="A [room].", text="Action: look", action="look", result="A room.", reward=0.5)
    base = Episode(id="demos/0000", phase="demos", env="household", task="easy/1", task_type="t", seed=0, steps=[step])
    return base.model_copy(update=changes)


def test_show_lists_a_run_and_prints_an_episode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "runs/demo/episodes/demos.jsonl.gz"
    append_episode(file, episode())
    append_episode(file, episode(id="demos/0001", status="env_error", error="the simulator is gone"))
    saga(monkeypatch, "show", "runs/demo")
    listing = capsys.readouterr().out
    assert "demos" in listing
    assert "0000 … 0001" in listing
    saga(monkeypatch, "show", "runs/demo", "--episode", "demos/0000")
    shown = capsys.readouterr().out
    assert "A [room]." in shown
    assert "1 > look  +0.50" in shown
    assert "failed (knowledge)" in shown
    saga(monkeypatch, "show", "runs/demo", "--episode", "demos/0001")
    assert "env_error: the simulator is gone" in capsys.readouterr().out
    assert saga(monkeypatch, "show", "runs/demo", "--episode", "demos/7") == 2
    assert "not in runs/demo; phases there: demos" in capsys.readouterr().err


def test_a_truncated_trajectory_file_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "runs/demo/episodes/demos.jsonl.gz"
    append_episode(file, episode())
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    assert saga(monkeypatch, "show", "runs/demo") == 2
    assert "demos.jsonl.gz: truncated in episode 1" in capsys.readouterr().err
    assert file.read_bytes() == whole[:-3]


def test_an_existing_evaluation_is_resumed_only_on_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("x")
    args = ["eval", "expert", "--set", "household/easy/eval:0-1", "--out", "out"]
    assert saga(monkeypatch, *args) == 2
    assert "exists and holds no evaluation" in capsys.readouterr().err
    (folder / "out" / "mine.txt").unlink()
    (folder / "out" / "request.json").write_text("{}")
    (folder / "out" / "episodes").mkdir()
    assert saga(monkeypatch, *args) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert saga(monkeypatch, *args, "--resume") == 2
    assert "holds another evaluation" in capsys.readouterr().err


def test_an_evaluation_that_never_played_may_start_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "request.json").write_text("{}")
    (folder / "out" / "vllm.log").write_text("CUDA out of memory")
    assert saga(monkeypatch, "eval", "no/such/model", "--set", "household/easy/eval:0-1", "--out", "out") == 2
    assert "model.name: 'no/such/model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [("train", "demo.yaml"), ("eval", "smollm2-135m-instruct", "--set", "household/easy/eval:0-1")]
)
def test_a_server_of_vllm_without_vllm_is_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    monkeypatch.setattr("train.vllm_server.vllm_build", lambda: None)
    monkeypatch.setattr("train.load.load_tokenizer", lambda config: pytest.fail("the model was loaded"))
    before = sorted(folder.rglob("*"))
    assert saga(monkeypatch, *args, "model.engine=vllm") == 2
    assert capsys.readouterr().err.startswith("error: model.engine: 'vllm' needs vLLM, which is not installed; pip")
    assert sorted(folder.rglob("*")) == before


def test_help_and_validate_load_no_torch(folder: Path) -> None:
    """The limits on their time (1 s, 2 s) rest on what they import."""
    code = (
        "import sys; from train.cli import main\n"
        "sys.argv = ['saga', *{args}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {{'torch', 'transformers', 'pandas', 'textworld', 'datasets'}} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    root = str(Path(__file__).parents[2])
    for args in (["--help"], ["train", "--help"], ["validate", "demo.yaml"]):
        subprocess.run(
            [sys.executable, "-c", code.format(args=args)],
            check=True,
            capture_output=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": root},
        )
