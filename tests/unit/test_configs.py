import re
from pathlib import Path

import pytest

from envs.tasksets import describe_task_sets
from train.ablate import base_config
from train.arms import arm_config, parse_arms
from train.config import load_config

pytestmark = pytest.mark.unit

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
KNOWN_SETS = {name.removesuffix(":a-b") for name, _, _ in describe_task_sets()}


def test_the_configs_are_found() -> None:
    assert {"quickstart.yaml", "alfworld-qwen7b.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_validates_and_starts_with_the_command_that_runs_it(path: Path) -> None:
    config = load_config(path)
    assert path.read_text().splitlines()[0] == f"# saga train configs/{path.name}"
    assert config.run.name == path.stem


PAPERS = sorted((Path(__file__).parents[2] / "configs/papers").glob("*.yaml"))


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.name)
def test_an_experiment_of_a_paper_loads_and_says_how_it_is_run(path: Path) -> None:
    """The first line is the command; its arms can be had; episodes in flight find a game to play."""
    config, text = load_config(path), path.read_text()
    assert config.run.name == path.stem
    command = text.splitlines()[0].removeprefix("# ")
    assert f" configs/papers/{path.name}" in command
    assert text.split(".yaml")[0].startswith(("# saga train ", "# saga ablate "))
    arms = re.search(r"--arms (\S+)", command)
    for name, arm in parse_arms(arms[1].split(",")).items() if arms else ():
        arm_config(base_config(str(path), [], 2), name, arm)
    assert config.agent.concurrency <= config.pool.workers * config.pool.envs_per_worker
    sections = [getattr(config, name, None) for name in ("warm_start", "rejection", "collect", "grpo", "eval")]
    assert {section.tasks.split(":")[0] for section in sections if section is not None} <= KNOWN_SETS
    header = " ".join(text.split("\n\n")[0].replace("#", " ").split())
    assert "ublished" in header or "report" in header
    assert "ot yet run" in header


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_can_do_what_it_says(path: Path) -> None:
    """Episodes in flight find a game to play, and the task sets exist."""
    config = load_config(path)
    assert config.agent.concurrency <= config.pool.workers * config.pool.envs_per_worker
    assert config.warm_start is not None
    assert config.grpo is not None
    for tasks in (config.warm_start.tasks, config.grpo.tasks, config.eval.tasks):
        assert tasks.split(":")[0] in KNOWN_SETS


@pytest.mark.parametrize("path", [path for path in CONFIGS if "qwen" in path.name], ids=lambda path: path.name)
def test_a_cluster_recipe_shows_a_server_that_fits_it(path: Path) -> None:
    config, text = load_config(path), path.read_text()
    assert config.warm_start is not None
    assert config.grpo is not None
    for section in (config.warm_start, config.grpo):  # the memory that a forward pass is sized for
        assert section.tokens_per_micro_batch >= config.agent.context_tokens
    assert "Not yet run on GPU." in text
    assert f"vllm serve {config.model.name} " in text
    assert f"--max-lora-rank {config.lora.rank} " in text
    assert f"--max-model-len {config.agent.context_tokens} " in text
    assert "--generation-config vllm --logprobs-mode processed_logprobs" in text
