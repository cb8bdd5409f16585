"""The same greedy episodes on every engine: in process, on vLLM, on two servers, on one that is killed meanwhile; and
training on vLLM, whose batches are a version behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
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


def launch(folder: Path, *args: str) -> subprocess.Popen[bytes]:
    """``saga ARGS…`` in ``folder``, whose complaints go to its file stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "train.cli", *args]
    with (folder / "stderr").open("ab") as stderr:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=stderr)


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
    args = ["eval", "smollm2-135m-instruct", "--set", TASKS, "--out", "out", "--adapter", str(taught.folder)]
    run = launch(tmp_path, *args, *(f"{key}={json.dumps(value)}" for key, value in settings.items()))
    log = tmp_path / "out/vllm.log"
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


TRAIN = """\
run: {name: demo, seed: 3}
model: {engine: vllm, dtype: float32}
vllm: {start_s: 900, flags: [--enforce-eager]}
env: {name: household, max_steps: 4}
pool: {workers: 1, envs_per_worker: 4}
agent: {context_tokens: 1024, max_new_tokens: 16, concurrency: 4}
lora: {rank: 8, alpha: 16, last_layers: 6, start: START}
grpo:
  {tasks: 'household/easy/train:0-3', iterations: 3, groups: 2, group_size: 4, temperature: 0.4,
   invalid_penalty: 0.05, staleness: 1}
eval: {tasks: 'household/easy/eval:0-0', at_start: false}
"""


def number_of(run: Path, phase: str) -> int:
    """Episodes of ``phase`` on disk so far."""
    file = run / f"episodes/{phase}.jsonl.gz"
    return file.read_bytes().count(b"\x1f\x8b\x08") if file.exists() else 0


def journal_of(run: Path) -> dict[str, Any]:
    file = run / "journal.json"
    journal: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return journal


def named(log: str, what: str) -> list[str]:
    """The adapter versions that vLLM's log says were ``what``, in this order."""
    return re.findall(rf"{what} LoRA adapter: name '(policy-v\d+)-[0-9a-f]{{12}}'", log)


def test_training_on_vllm_goes_on_after_a_kill(taught: Taught, tmp_path: Path) -> None:
    """Each batch comes from one version, the newest but one; versions come to the server and leave it."""
    (tmp_path / "demo.yaml").write_text(TRAIN.replace("START", str(taught.folder)))
    run, deadline = tmp_path / "runs/demo", time.monotonic() + 1500
    started = launch(tmp_path, "train", "demo.yaml")
    try:  # killed while the third batch is rolled out, beside or after the second update
        while number_of(run, "grpo-0003") < 2:
            assert started.poll() is None, (tmp_path / "stderr").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        servers = psutil.Process(started.pid).children(recursive=True)
    finally:
        started.kill()
        started.wait()
    assert psutil.wait_procs(servers, timeout=60)[1] == []  # its server and workers ended with it
    log = (run / "vllm.log").read_text()
    assert named(log, "Loaded new") == ["policy-v0000", "policy-v0001"]
    assert named(log, "Removed") == ["policy-v0000"]
    assert "grpo-0001" in journal_of(run)
    kept = {episode.id: episode for episode in read_episodes(run / "episodes/grpo-0003.jsonl.gz", repair=True)}
    assert len(kept) >= 2

    resumed = launch(tmp_path, "train", "demo.yaml", "--resume")
    assert resumed.wait(timeout=1500) == 0, (tmp_path / "stderr").read_text()[-2000:]
    assert list(journal_of(run)) == ["start", "grpo-0001", "grpo-0002", "grpo-0003", "eval-final", "round-0001"]
    played = {
        phase: list(read_episodes(run / f"episodes/{phase}.jsonl.gz"))
        for phase in ("grpo-0001", "grpo-0002", "grpo-0003", "eval-final")
    }
    assert {phase: len(episodes) for phase, episodes in played.items()} == {
        "grpo-0001": 8, "grpo-0002": 8, "grpo-0003": 8, "eval-final": 1,
    }  # fmt: skip
    assert {phase: {span.adapter for e in episodes for context in e.contexts for span in context.spans}
            for phase, episodes in played.items()} == {
        "grpo-0001": {"policy-v0000"},
        "grpo-0002": {"policy-v0000"},  # rolled out beside the first update
        "grpo-0003": {"policy-v0001"},
        "eval-final": {"policy-v0003"},
    }  # fmt: skip
    assert [kept[e.id] for e in played["grpo-0003"] if e.id in kept] == [e for e in played["grpo-0003"] if e.id in kept]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = {line["phase"]: line for line in lines if line["phase"].startswith("grpo-")}
    assert [update["staleness"] for update in updates.values()] == [0, 1, 1]
    assert sum(update["optimiser_steps"] for update in updates.values()) > 0  # there was something to learn
    differences = [update["sampler_mean_difference"] for update in updates.values() if update["optimiser_steps"]]
    assert max(differences) < 0.05  # float arithmetic, and one small step of the weights
    after = (run / "vllm.log").read_text()[len(log) :]
    assert named(after, "Loaded new")[-1] == "policy-v0003"
    assert sorted(named(after, "Removed")) == sorted(named(after, "Loaded new"))  # nothing is left behind
    assert json.loads((run / "result.json").read_text())["adapter"] == "adapters/policy-v0003"
