import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envs.base import Task
from train.config import Config, ConfigError, config_from, load_config
from train.curriculum import iteration_tasks
from train.preflight import JOURNAL, Journal, check_engine, hold_folder, keep_to_one_gpu, prepare_run, task_sets

pytestmark = pytest.mark.unit


def config(tmp_path: Path, *overrides: str) -> Config:
    data = {
        "run": {"name": "demo", "dir": str(tmp_path)},
        "env": {"name": "household"},
        "eval": {"tasks": "household/easy/eval:0-3"},
    }
    return config_from(data, list(overrides))


def test_an_existing_run_is_never_silently_reused(tmp_path: Path) -> None:
    folder = prepare_run(config(tmp_path), resume=False)
    assert folder == tmp_path / "demo"
    (folder / "episodes").mkdir()
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"continue it with --resume or choose another run\.name"):
        prepare_run(config(tmp_path, "run.seed=1"), resume=False)
    assert (folder / "config.yaml").read_bytes() == before
    assert prepare_run(config(tmp_path), resume=True) == folder


def test_a_run_that_never_played_may_start_anew(tmp_path: Path) -> None:
    prepare_run(config(tmp_path), resume=False)
    folder = prepare_run(config(tmp_path, "run.seed=1"), resume=False)
    assert load_config(folder / "config.yaml").run.seed == 1


def test_a_start_that_came_to_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its journal named an adapter to go on from, perhaps another one."""
    folder = prepare_run(config(tmp_path), resume=False)
    Journal(folder / JOURNAL).finish("start", adapter="adapters/policy-v0000")
    prepare_run(config(tmp_path), resume=False)
    assert not Journal(folder / JOURNAL).done("start")


def test_a_second_start_does_not_touch_the_first(tmp_path: Path) -> None:
    folder = prepare_run(config(tmp_path), resume=False)
    with hold_folder(folder), pytest.raises(ConfigError, match="another process works in this folder"):
        prepare_run(config(tmp_path, "run.seed=1"), resume=False)
    assert load_config(folder / "config.yaml").run.seed == 0


def test_resume_wants_the_same_configuration(tmp_path: Path) -> None:
    (prepare_run(config(tmp_path), resume=False) / "episodes").mkdir()
    with pytest.raises(ConfigError, match=r"\(changed: agent\.thoughts, run\.seed\)"):
        prepare_run(config(tmp_path, "run.seed=1", "agent.thoughts=true"), resume=True)


def test_resume_from_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume: .* does not exist"):
        prepare_run(config(tmp_path), resume=True)
    assert not (tmp_path / "demo").exists()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no run"):
        prepare_run(config(tmp_path), resume=False)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["thesis.txt"]


def test_training_and_evaluation_tasks_must_differ(tmp_path: Path) -> None:
    sets = task_sets(config(tmp_path, "grpo.tasks=household/easy/train:0-9"))
    assert {name: len(tasks) for name, tasks in sets.items()} == {
        "household/easy/train:0-9": 10,
        "household/easy/eval:0-3": 4,
    }
    with pytest.raises(ConfigError, match=r"shares 2 tasks with eval\.tasks .* \(for example easy/1000002\)"):
        task_sets(config(tmp_path, "grpo.tasks=household/easy/eval:2-9"))


def test_journal_remembers_over_restarts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.json")
    journal.finish("warm-start", adapter="adapters/policy-v0000")
    journal.finish("grpo-0001", adapter="adapters/policy-v0001", trainer="state/grpo-0001")
    journal.finish("eval-final")
    again = Journal(tmp_path / "journal.json")
    assert again.done("warm-start")
    assert not again.done("grpo-0002")
    assert again.last("adapter") == "adapters/policy-v0001"
    assert again.last("nothing") is None


def test_iterations_pass_over_all_tasks_before_one_recurs() -> None:
    tasks = [Task("household", f"easy/{i}", "t") for i in range(10)]
    drawn = [iteration_tasks(tasks, 4, iteration, seed=3, first=4 * (iteration - 1)) for iteration in range(1, 6)]
    first_pass = [task for chosen in drawn for task in chosen][:10]
    assert sorted(first_pass, key=lambda task: task.id) == tasks
    assert drawn[2] == iteration_tasks(tasks, 4, 3, seed=3, first=8)
    assert drawn[0] != iteration_tasks(tasks, 4, 1, seed=4, first=0)


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharded_weights_cannot_generate_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=rf"model.engine: 'hf' cannot .* \({variable}=true\); set .* vllm or server"):
        check_engine(config(tmp_path))
    check_engine(config(tmp_path, "model.engine=server", "model.urls=[http://localhost:1]"))
    monkeypatch.setenv(variable, "false")
    check_engine(config(tmp_path))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0"}),
    ],
)
def test_a_process_without_a_launcher_keeps_to_one_gpu(given: dict[str, str], kept: dict[str, str]) -> None:
    keep_to_one_gpu(given)
    assert given == kept


def test_a_journal_knows_what_a_phase_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.json")
    journal.finish("grpo-0001", adapter="adapters/policy-v0001", signal={"pick": [1, 2]})
    again = Journal(tmp_path / "journal.json")
    assert again.left("grpo-0001")["signal"] == {"pick": [1, 2]}
    assert again.last("adapter") == "adapters/policy-v0001"


def test_a_folder_is_held_by_one_process_until_it_ends_or_is_killed(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from train.preflight import hold_folder\n"
    code += "lock = hold_folder(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another process works in this folder; wait for it, end it, or choose"):
        hold_folder(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.wait()
    with hold_folder(tmp_path), pytest.raises(ConfigError, match="another process"):
        hold_folder(tmp_path)
    hold_folder(tmp_path).release()
