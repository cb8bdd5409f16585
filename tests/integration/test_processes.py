"""Learning in two processes (gloo) gives what one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import CHATML
from tests.tiny_policy import tiny_base, word_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CONFIG = """\
run: {{name: demo, seed: 1}}
model: {{name: {model}, dtype: float32}}
lora: {{rank: 8, alpha: 16}}
warm_start: {{tasks: 'household/easy/train:0-5', epochs: 2, learning_rate: 1.0e-2, tokens_per_batch: 256, tokens_per_micro_batch: 128}}
grpo:
  tasks: household/easy/train:10-19
  learning_rate: 1.0e-2
  passes: 2
  mini_batch_groups: 2
  step_weight: 0.5
  kl_coef: 0.01
  tokens_per_micro_batch: 192
eval: {{tasks: 'household/easy/eval:0-2'}}
"""  # noqa: E501
TRAIN = """\
run: {name: demo, seed: 3}
model: {dtype: float32, max_batch: 8}
env: {name: household, max_steps: 6}
pool: {workers: 1, envs_per_worker: 8}
agent: {context_tokens: 1024, max_new_tokens: 16, concurrency: 8}
lora: {rank: 16, alpha: 32, last_layers: 8}
warm_start:
  {tasks: 'household/easy/train:0-11', episodes: 12, recovery_share: 0.5, epochs: 4, learning_rate: 3.0e-3, tokens_per_batch: 512}
grpo: {tasks: 'household/easy/train:20-29', iterations: 1, groups: 2, group_size: 4, refill: 1, invalid_penalty: 0.05}
eval: {tasks: 'household/easy/eval:0-1', at_start: false}
"""  # noqa: E501


def launch(processes: int, module: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run a module in so many processes with the launcher that accelerate uses; returns what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def learn(folder: Path, processes: int) -> dict[str, Any]:
    """Run ``learn.py`` with the launcher that accelerate uses; returns its figures."""
    model = folder / "tiny"
    if not model.exists():
        tiny_base().save_pretrained(model)
        tokenizer = word_tokenizer()
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(model)
    out = folder / str(processes)
    out.mkdir()
    (folder / "demo.yaml").write_text(CONFIG.format(model=model))
    launch(processes, "tests.integration.learn", str(folder / "demo.yaml"), str(out))
    figures: dict[str, Any] = json.loads((out / "figures.json").read_text())
    assert figures["processes"] == processes
    return figures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    for processes in (1, 2):
        learn(folder, processes)
    return folder


def figures(folder: Path, processes: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / str(processes) / "figures.json").read_text())
    return read


def test_losses_and_gradients_are_those_of_one_process(folder: Path) -> None:
    one, two = (figures(folder, processes) for processes in (1, 2))
    assert len(one["sft"]) == len(two["sft"]) > 4
    for alone, shared in zip(one["sft"], two["sft"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "learning_rate"):
            assert shared[name] == pytest.approx(alone[name], rel=1e-4), name
    # Groups of 3, 2 and 4 episodes in two mini-batches; then one group of two: fewer micro-batches than processes.
    assert [update["optimiser_steps"] for update in two["grpo"]] == [4, 2]
    for alone, shared in zip(one["grpo"], two["grpo"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "base_kl", "sampler_kl", "truncated_share"):
            assert shared[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name
        assert (shared["rows"], shared["trained_tokens"]) == (alone["rows"], alone["trained_tokens"])


def test_the_adapter_is_that_of_one_process(folder: Path) -> None:
    one, two = (load_file(folder / str(p) / "adapter/adapter_model.safetensors") for p in (1, 2))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=2e-4, rtol=1e-3)
    # something was learnt at all
    assert max(float(weight.abs().max()) for name, weight in one.items() if "lora_B" in name) > 0.01


def test_the_state_holds_every_step(folder: Path) -> None:
    states = [torch.load(folder / str(p) / "state/grpo_state.pt", weights_only=True) for p in (1, 2)]
    assert [state["updates"] for state in states] == [6, 6]


def test_what_fsdp_shards_is_saved_whole_and_restored(tmp_path: Path) -> None:
    launch(2, "tests.integration.shard", str(tmp_path))
    read = json.loads((tmp_path / "figures.json").read_text())
    assert read["sharded"] == 28  # two layers, seven linear modules, A and B
    assert read["moments"] == 0
    assert read["error"] < 1e-6 < 1e-3 < read["moved"]
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert adapter["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (8, 32)


def test_saga_train_in_two_processes(smollm2_folder: Path, tmp_path: Path) -> None:
    """The whole command: rank 0 plays and evaluates, both learn."""
    (tmp_path / "demo.yaml").write_text(TRAIN)
    printed = launch(2, "train.cli", "train", "demo.yaml", cwd=tmp_path)
    assert printed.count("held-out games") == 1
    run = tmp_path / "runs/demo"
    phases = list(json.loads((run / "journal.json").read_text()))
    assert phases == ["warm-start", "eval-warm", "grpo-0001", "eval-final", "round-0001"]
    assert json.loads((run / "result.json").read_text())["adapter"] == "adapters/policy-v0001"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (update,) = [line for line in lines if line["phase"] == "grpo-0001"]
    assert update["optimiser_steps"] == 1
    assert update["sampler_max_difference"] < 1e-3  # rank 1's rows included: it learnt what rank 0 plays with
