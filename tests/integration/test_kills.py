"""A run that is killed between any two of the files that an iteration leaves goes on as if nothing had happened."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration.killed import Moment, train_in_child
from tests.tiny import tiny_tokenizer
from train.trajectory import Episode, read_episodes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # the first test imports everything

CONFIG = """\
run: {name: demo, seed: 3, deterministic: true}
model: {name: MODEL, dtype: float32}
env: {name: household, max_steps: 2}
pool: {workers: 1, envs_per_worker: 1}
agent: {context_tokens: 4096, max_new_tokens: 8, concurrency: 1}
lora: {rank: 8, alpha: 16}
grpo: {tasks: 'household/easy/train:0-9', iterations: 3, groups: 1, group_size: 2, learning_rate: 1.0e-2}
eval: {tasks: 'household/easy/eval:0-0', at_start: false}
"""
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few thousand weights, one token a byte."""
    folder = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.5,
        eos_token_id=256,
        pad_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def prepared(folder: Path, model: Path) -> Path:
    """The folder of the run that ``folder`` will hold."""
    (folder / "demo.yaml").write_text(CONFIG.replace("MODEL", str(model)))
    return folder / "runs/demo"


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    run = prepared(folder, model)
    assert train_in_child(folder) == 0, (folder / "stdout").read_text()[-2000:]
    return run


def journal(run: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / "journal.json").read_text())
    return read


def updates(run: Path) -> dict[str, dict[str, Any]]:
    """The metrics of each iteration; of one that was repeated after a kill, the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["phase"]: line for line in lines if line["phase"].startswith("grpo-")}


def without_times(episode: Episode) -> dict[str, Any]:
    return episode.model_dump(exclude={"seconds", "env_seconds"})


def test_the_run_has_something_to_lose(straight: Path) -> None:
    versions = sorted(path.name for path in (straight / "adapters").iterdir())
    assert versions == ["policy-v0000", "policy-v0001", "policy-v0002", "policy-v0003"]
    assert len({(straight / "adapters" / version / WEIGHTS).read_bytes() for version in versions}) == 4
    assert [update["optimiser_steps"] for update in updates(straight).values()] == [1, 1, 1]
    assert [path.name for path in (straight / "state").iterdir()] == ["grpo-0003"]


@pytest.mark.parametrize(
    ("moment", "finished", "left"),
    [
        pytest.param(
            Moment("os.rename", "adapters/policy-v0002"),
            ["grpo-0001"],
            ["adapters/policy-v0002.partial", "state/grpo-0001"],
            id="within saving the adapter",
        ),
        pytest.param(
            Moment("os.mkdir", "state/grpo-0002"),
            ["grpo-0001"],
            ["adapters/policy-v0002", "state/grpo-0001"],
            id="between adapter and state",
        ),
        pytest.param(
            Moment("os.rename", "state/grpo-0002/grpo_state.pt"),
            ["grpo-0001"],
            ["adapters/policy-v0002", "state/grpo-0001", "state/grpo-0002/grpo_state.pt.partial"],
            id="within saving the state",
        ),
        pytest.param(
            Moment("os.rename", "journal.json", holds="grpo-0002"),
            ["grpo-0001"],
            ["adapters/policy-v0002", "state/grpo-0001", "state/grpo-0002/grpo_state.pt", "journal.tmp"],
            id="between state and journal",
        ),
        pytest.param(
            Moment("shutil.rmtree", "state/grpo-0001"),
            ["grpo-0001", "grpo-0002"],
            ["adapters/policy-v0002", "state/grpo-0001", "state/grpo-0002/grpo_state.pt"],
            id="between journal and tidying up",
        ),
    ],
)
def test_a_kill_at_any_file_changes_nothing(
    model: Path, straight: Path, tmp_path: Path, moment: Moment, finished: list[str], left: list[str]
) -> None:
    run = prepared(tmp_path, model)
    assert train_in_child(tmp_path, kill=moment) == -signal.SIGKILL, (tmp_path / "stdout").read_text()[-2000:]
    assert list(journal(run)) == finished
    assert [name for name in left if not (run / name).exists()] == []
    assert train_in_child(tmp_path, "--resume") == 0, (tmp_path / "stdout").read_text()[-2000:]

    assert journal(run) == journal(straight)
    for number in range(4):
        file = f"adapters/policy-v000{number}/{WEIGHTS}"
        assert (run / file).read_bytes() == (straight / file).read_bytes()
    states = [torch.load(one / "state/grpo-0003/grpo_state.pt", weights_only=True) for one in (run, straight)]
    assert [state["updates"] for state in states] == [3, 3]
    torch.testing.assert_close(*(state["optimizer"]["state"] for state in states), rtol=0, atol=0)
    for phase, update in updates(straight).items():
        again = updates(run)[phase]
        assert [again[name] for name in ("loss", "grad_norm", "learning_rate", "success")] == [
            update[name] for name in ("loss", "grad_norm", "learning_rate", "success")
        ]
        played, expected = (list(read_episodes(one / f"episodes/{phase}.jsonl.gz")) for one in (run, straight))
        assert [without_times(episode) for episode in played] == [without_times(episode) for episode in expected]


def test_a_sampler_that_disagrees_with_the_trainer_is_warned_of(model: Path, straight: Path, tmp_path: Path) -> None:
    """The same run whose sampler claims each token to be exp(0.5) times as likely as it was."""
    prepared(tmp_path, model)
    assert train_in_child(tmp_path, "grpo.iterations=1", shift=0.5) == 0, (tmp_path / "stdout").read_text()[-2000:]
    assert (tmp_path / "stdout").read_text().count("warning:") == 1
    assert (
        "warning: grpo-0001: the sampler's log-probabilities differ from the trainer's by 0.500 nats on average "
        "(grpo.mismatch_warning 0.1); check that both have the same dtype and the same adapter\n"
    ) in (tmp_path / "stdout").read_text()
    assert "warning:" not in (straight.parents[1] / "stdout").read_text()
