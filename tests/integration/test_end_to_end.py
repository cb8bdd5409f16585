"""A whole small run on the real engine and a real language model: killed, resumed, evaluated, exported, served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.chat import Sampling
from train.server_model import ServerModel
from train.tokens import TokenCodec
from train.trajectory import Episode, read_episodes
from train.vllm_server import VLLMServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
CONFIG = """\
run: {name: demo, seed: 3, deterministic: true}
model: {dtype: float32, max_batch: 4}
env: {name: household, max_steps: 4}
pool: {workers: 1, envs_per_worker: 4}
agent: {context_tokens: 1024, max_new_tokens: 16, concurrency: 1}
lora: {rank: 8, alpha: 16, last_layers: 6}
warm_start:
  tasks: household/easy/train:0-5
  episodes: 6
  recovery_share: 0.5
  epochs: 3
  learning_rate: 3.0e-3
  tokens_per_batch: 1024
grpo:
  tasks: household/easy/train:10-19
  iterations: 2
  groups: 2
  group_size: 4
  learning_rate: 1.0e-4
  invalid_penalty: 0.05 # a signal even where nothing is won
eval: {tasks: 'household/easy/eval:0-2'}
"""


def saga(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "train.cli", *args], cwd=folder, env=environment(), text=True,
                          capture_output=True, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def kill_when(folder: Path, reached: Callable[[Path], bool], *flags: str) -> None:
    """Start the run in ``folder`` and kill it (SIGKILL) once ``reached(run folder)``."""
    command = [sys.executable, "-m", "train.cli", "train", "demo.yaml", *flags]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 600
        while not reached(folder / "runs/demo"):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)


def journalled(run: Path, phase: str) -> bool:
    journal = run / "journal.json"
    return journal.exists() and phase in json.loads(journal.read_text())


def some_episodes(run: Path, phase: str, count: int) -> bool:
    file = run / f"episodes/{phase}.jsonl.gz"
    return file.exists() and file.read_bytes().count(b"\x1f\x8b\x08") >= count


@pytest.fixture(scope="module")
def run(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed once its warm start was journalled, again within the second rollout, and then resumed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "demo.yaml").write_text(CONFIG)
    kill_when(folder, lambda run: journalled(run, "warm-start"))
    kill_when(folder, lambda run: some_episodes(run, "grpo-0002", 3), "--resume")
    resumed = saga(folder, "train", "demo.yaml", "--resume")
    assert "after warm start" in resumed.stdout
    return folder / "runs/demo"


def test_the_killed_run_ends_with_the_adapter_of_an_uninterrupted_one(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("straight")
    (folder / "demo.yaml").write_text(CONFIG)
    saga(folder, "train", "demo.yaml")
    final = "adapters/policy-v0002/adapter_model.safetensors"
    assert (folder / "runs/demo" / final).read_bytes() == (run / final).read_bytes()
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(update.get("optimiser_steps", 0) for update in updates) >= 1  # there was something to get wrong


def episodes(run: Path, phase: str) -> list[Episode]:
    return sorted(read_episodes(run / f"episodes/{phase}.jsonl.gz"), key=lambda episode: episode.id)


def test_a_killed_run_goes_on_and_leaves_everything(run: Path) -> None:
    assert list(json.loads((run / "journal.json").read_text())) == [
        "eval-start", "warm-start", "eval-warm", "grpo-0001", "grpo-0002", "eval-final", "round-0001",
    ]  # fmt: skip
    counts = {phase: len(episodes(run, phase)) for phase in ("eval-start", "demos", "eval-warm", "grpo-0001")}
    assert counts == {"eval-start": 3, "demos": 6, "eval-warm": 3, "grpo-0001": 8}
    phases = [json.loads(line)["phase"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [phases.count(phase) for phase in ("eval-start", "demos", "grpo-0001", "eval-final")] == [1, 1, 1, 1]
    result = json.loads((run / "result.json").read_text())
    assert result["adapter"] == "adapters/policy-v0002"
    evaluation = json.loads((run / "evals/eval-final.json").read_text())
    assert [item["id"] for item in evaluation["items"]] == ["easy/1000000", "easy/1000001", "easy/1000002"]
    assert evaluation["adapter"] == "policy-v0002"
    assert len(evaluation["adapter_hash"]) == 64
    report = (run / "report/report.html").read_text()
    assert "after RL" in report
    assert "src=" not in report  # needs no network
    assert (run / "report/held-out.png").read_bytes().startswith(b"\x89PNG")


def test_the_warm_start_teaches_the_form(run: Path) -> None:
    def malformed(phase: str) -> int:
        return sum(step.action is None for episode in episodes(run, phase) for step in episode.steps)

    assert malformed("eval-start") > 6
    assert malformed("eval-warm") == 0


def test_grpo_saw_the_log_probabilities_that_it_recomputed(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (update,) = [line for line in lines if line["phase"] == "grpo-0001"]
    assert update["sampler_max_difference"] < 1e-3
    sampled = episodes(run, "grpo-0001")
    assert {episode.adapter for episode in sampled} == {"policy-v0000"}
    assert {span.adapter for e in sampled for context in e.contexts for span in context.spans} == {"policy-v0000"}


def test_a_second_evaluation_plays_the_same(run: Path, tmp_path: Path) -> None:
    saga(run.parents[1], "eval", "runs/demo", "--set", "household/easy/eval:0-2", "--out", str(tmp_path / "again"))
    again = episodes(tmp_path / "again", "eval")
    assert [[step.text for step in e.steps] for e in again] == [
        [step.text for step in e.steps] for e in episodes(run, "eval-final")
    ]


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    done = saga(run.parents[1], "export", "runs/demo", "--adapter", "exported")
    assert "--lora-modules" in done.stdout
    folder = run.parents[1] / "exported"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    return folder


def turns(run: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of every turn of the final evaluation, which was greedy."""
    return [
        (context.ids[: span.start], context.ids[span.start : span.end])
        for episode in episodes(run, "eval-final")
        for context in episode.contexts
        for span in context.spans
    ]


def test_the_exported_adapter_acts_alike_in_plain_peft(run: Path, exported: Path, smollm2_folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, exported).eval()
    for prompt, completion in turns(run):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == completion


def test_the_exported_adapter_acts_alike_in_vllm(
    run: Path, exported: Path, smollm2_folder: Path, vllm_server: VLLMServer
) -> None:
    codec = TokenCodec(AutoTokenizer.from_pretrained(smollm2_folder))

    async def ask() -> list[list[int]]:
        model = ServerModel([vllm_server.url], vllm_server.name, codec)
        try:
            await model.load_adapter(exported, "policy-v0002")
            greedy = Sampling(max_tokens=16, temperature=0.0)
            answers = await asyncio.gather(
                *(model.complete(prompt, greedy, str(number)) for number, (prompt, _) in enumerate(turns(run)))
            )
            return [answer.token_ids for answer in answers]
        finally:
            await model.close()

    assert asyncio.run(ask()) == [completion for _, completion in turns(run)]


def test_rollouts_export_as_a_dataset(run: Path, tmp_path: Path) -> None:
    saga(run.parents[1], "export", "runs/demo", "--dataset", str(tmp_path / "rollouts"))
    dataset = load_dataset(str(tmp_path / "rollouts"))
    assert {name: split.num_rows for name, split in dataset.items()}["grpo_0001"] == 8
    assert dataset["demos"][0]["messages"][0]["role"] in ("system", "user")
