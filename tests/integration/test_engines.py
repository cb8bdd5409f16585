"""The same greedy episodes on every engine: in process, on vLLM, on two servers, on one that is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from peft import PeftModel

from envs.pool import EnvPool
from envs.tasksets import load_task_set
from train.adapters import new_adapter, save_adapter
from train.agent import Job, Player, PolicyPlayer
from train.chat import ChatModel
from train.config import AgentConfig, LoraConfig, ModelConfig, WarmStartConfig
from train.demonstrations import DemonstrationPlayer
from train.hf_model import HFChatModel
from train.load import load_policy
from train.rollouts import collect
from train.rows import rows_of
from train.server_model import ServerModel
from train.sft import train_sft
from train.tokens import TokenCodec
from train.trajectory import Episode, read_episodes
from train.vllm_server import VLLMServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
TASKS = "household/easy/eval:0-5"
SPEC = {"name": "household", "max_steps": 5}
AGENT = AgentConfig(context_tokens=1024, max_new_tokens=16, concurrency=6)


async def play(make_player: Callable[[Job], Player], tasks: str, file: Path) -> list[Episode]:
    jobs = [Job(f"eval/0-{i:04d}", "eval", task, 0) for i, task in enumerate(load_task_set(tasks, SPEC))]
    async with EnvPool(SPEC, workers=1, envs_per_worker=6, recycle_after=100, timeout_s=120) as pool:
        return await collect(pool, make_player, jobs, max_steps=5, concurrency=6, file=file, description="episodes")


async def play_greedily(chat: ChatModel, codec: TokenCodec, file: Path) -> list[Episode]:
    try:
        return await play(lambda job: PolicyPlayer(chat, codec, job, AGENT, temperature=0.0, run_seed=0), TASKS, file)
    finally:
        await chat.close()


@dataclass(frozen=True)
class Taught:
    """SmolLM2 in fp32 with an adapter, saved in ``folder``, with which it acts, if not well."""

    model: PeftModel
    codec: TokenCodec
    folder: Path


@pytest.fixture(scope="module")
def taught(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("taught")
    base, tokenizer = load_policy(ModelConfig(name=str(smollm2_folder), dtype="float32"))
    model, codec = new_adapter(base, LoraConfig(rank=8, alpha=16, last_layers=6), seed=0), TokenCodec(tokenizer)
    expert = play(
        lambda job: DemonstrationPlayer(codec, job, AGENT, recovery=False, run_seed=0),
        "household/easy/train:0-3",
        folder / "demos.jsonl.gz",
    )
    rows = [row for episode in asyncio.run(expert) for row in rows_of(episode)]
    warm = WarmStartConfig(tasks="household/easy/train:0-3", epochs=3, learning_rate=4e-3, tokens_per_batch=768)
    train_sft(model, tokenizer, rows, warm, seed=0, out_dir=folder / "sft", log=lambda step, metrics: None)
    save_adapter(model, folder / "policy-v0001", "SmolLM2-135M-Instruct")
    return Taught(model, codec, folder / "policy-v0001")


@pytest.fixture(scope="module")
def in_process(taught: Taught, tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    """The episodes of the engine ``hf``."""
    chat = HFChatModel(taught.model, taught.codec, name="smollm2", max_batch=6, max_context=1024)
    return asyncio.run(play_greedily(chat, taught.codec, tmp_path_factory.mktemp("hf") / "eval.jsonl.gz"))


def check_equal(served: list[Episode], expected: list[Episode]) -> None:
    """Equal tokens and actions, and log-probabilities that differ by float arithmetic only."""
    assert [episode.status for episode in served] == ["ok"] * len(expected)
    assert [[step.action for step in e.steps] for e in served] == [[step.action for step in e.steps] for e in expected]
    assert [[context.ids for context in e.contexts] for e in served] == [
        [context.ids for context in e.contexts] for e in expected
    ]
    for ours, theirs in zip(logprobs_of(served), logprobs_of(expected), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)


def logprobs_of(episodes: list[Episode]) -> list[list[float]]:
    spans = [span for episode in episodes for context in episode.contexts for span in context.spans]
    return [span.logprobs or [] for span in spans]


def test_the_engines_play_the_same(
    vllm_server: VLLMServer, taught: Taught, in_process: list[Episode], tmp_path: Path
) -> None:
    """Also with two addresses of servers: then an episode stays with the one that it began on."""
    addresses = [vllm_server.url, vllm_server.url.replace("127.0.0.1", "localhost")]
    went: dict[tuple[int, ...], str] = {}

    class Recorded(ServerModel):
        async def _post(self, server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
            went[tuple(body["prompt"])] = server.url
            return await super()._post(server, path, body)

    async def run() -> list[Episode]:
        chat = Recorded(addresses, vllm_server.name, taught.codec)
        await chat.load_adapter(taught.folder, "policy-v0001")
        return await play_greedily(chat, taught.codec, tmp_path / "eval.jsonl.gz")

    actions = [step.action for episode in in_process for step in episode.steps]
    assert sum(action is not None for action in actions) > 20  # the world hears what the model says
    served = asyncio.run(run())
    check_equal(served, in_process)
    assert {span.adapter for e in served for context in e.contexts for span in context.spans} == {"policy-v0001"}
    homes = [
        {went[tuple(context.ids[: span.start])] for context in episode.contexts for span in context.spans}
        for episode in served
    ]
    assert sorted(homes, key=str) == [{url} for url in sorted(addresses) for _ in range(3)]


def child_of(process: subprocess.Popen[bytes], log: Path, answers: int) -> psutil.Process:
    """The vLLM server that ``process`` started, once it has answered so many completions."""
    deadline = time.monotonic() + 900
    while not log.exists() or log.read_text().count("POST /v1/completions") < answers:
        assert process.poll() is None, "the evaluation ended before its server could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (server,) = (
        child for child in psutil.Process(process.pid).children() if "vllm.entrypoints" in " ".join(child.cmdline())
    )
    return server


def test_an_evaluation_outlives_its_server(taught: Taught, in_process: list[Episode], tmp_path: Path) -> None:
    """``engine: vllm`` as a user has it, whose server is killed in the middle."""
    settings = {
        "model.engine": "vllm",
        "model.dtype": "float32",
        "vllm.start_s": 900,
        "vllm.flags": ["--enforce-eager"],
        "env.max_steps": 5,
        "agent.context_tokens": 1024,
        "agent.max_new_tokens": 16,
        "agent.concurrency": 6,
        "pool.workers": 1,
    }
    command = [sys.executable, "-m", "train.cli", "eval", "smollm2-135m-instruct", "--set", TASKS, "--out", "out"]
    command += ["--adapter", str(taught.folder), *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "out/vllm.log"
    with (tmp_path / "stderr").open("wb") as stderr:
        run = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        server = child_of(run, log, answers=10)
        first = [server, *server.children(recursive=True)]
        os.kill(server.pid, signal.SIGKILL)
        assert run.wait(timeout=900) == 0, (tmp_path / "stderr").read_text()[-2000:]
    finally:
        run.kill()
    assert "vLLM ended with code -9; it is started again" in (tmp_path / "stderr").read_text()
    assert log.read_text().count("Application startup complete") == 2
    assert not any(process.is_running() for process in first)
    episodes = sorted(read_episodes(tmp_path / "out/episodes/eval.jsonl.gz"), key=lambda episode: episode.id)
    check_equal(episodes, in_process)
    result = json.loads((tmp_path / "out/evals/eval.json").read_text())
    assert (result["dtype"], result["adapter"]) == ("float32", "policy-v0001")
    assert result["metrics"]["faults"] == 0
