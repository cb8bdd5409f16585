"""The outer loop: rounds of play, knowledge and policy optimisation, killed in every phase and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import memory.distil
import train.agent
import train.evaluation_phase
import train.learning
import train.loop
import train.optimise
import train.rollouts
import train.round_report
from memory.guide import Memory
from memory.recall import StateMemory
from memory.samem_store import read_barriers
from memory.store import Store
from tests.scripted_agents import MistakenExpert, Rates
from tests.tiny import tiny_tokenizer
from train.agent import Job
from train.config import Config, config_from
from train.preflight import prepare_run, task_sets
from train.trajectory import Episode, read_episodes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Ends a run as abruptly as can be had within a process."""


def run(config: Config, *, resume: bool = False) -> Path:
    folder = prepare_run(config, resume=resume)
    train.loop.train(config, folder, task_sets(config), Console(quiet=True))
    return folder


def journal(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / "journal.json").read_text())
    return found


def episodes(folder: Path, phase: str) -> list[Episode]:
    return sorted(read_episodes(folder / f"episodes/{phase}.jsonl.gz"), key=lambda episode: episode.id)


def metrics(folder: Path, phase: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == phase]


# ---- memory and table alone, with a scripted agent who reads constraints


class ScriptedPolicy:
    """Takes the place of :class:`train.policy.Policy`: plays :class:`MistakenExpert`."""

    adapter = "base"
    dtype = ""

    def __init__(self, config: Config, *, adapter: Path | None, trainable: bool, folder: Path) -> None:
        assert not trainable
        self.memory: Memory | None = None
        self.states: StateMemory | None = None

    @property
    def guided(self) -> bool:
        return self.memory is not None or self.states is not None

    def guide_by(self, memory: Memory | None, states: StateMemory | None) -> None:
        if self.memory is not None:
            self.memory.close()
        self.memory, self.states = memory, states

    async def ready(self) -> None:
        return None

    async def close(self) -> None:
        self.guide_by(None, None)

    def player(
        self, job: Job, temperature: float, memory: Memory | None = None, *, training: bool = False
    ) -> MistakenExpert:
        memory = (memory or self.memory) if job.guided else None
        return MistakenExpert(job, Rates(), memory.guide(job.id, len) if memory else None)


def knowledge_config(tmp_path: Path, *overrides: str) -> Config:
    data = {
        "run": {"name": "demo", "dir": str(tmp_path), "deterministic": True},
        "rounds": 2,
        "env": {"name": "household", "max_steps": 12},
        "pool": {"workers": 1, "envs_per_worker": 2},
        "agent": {"concurrency": 1},
        "memory": {
            "embedder": {"kind": "hashing"},
            "plan_tokens": 0,
            "budget_tokens": 800,
            "audit": {"samples": 50},
            "validation": {"episodes": 64, "resamples": 200},
        },
        "samem": {"embedder": {"kind": "hashing"}, "lifted": True, "recall": "hint"},
        "collect": {"tasks": "household/easy/train:0-119", "episodes": 40},
        "eval": {"tasks": "household/easy/eval:0-3", "at_start": False},
    }
    return config_from(data, list(overrides))


PHASES = ["collect", "learn", "distil", "audit", "validate"]
KNOWLEDGE = [
    "memory",
    *(f"{phase}-0001" for phase in PHASES),
    "eval-round-0001-without",
    "eval-round-0001",
    "round-0001",
    *(f"{phase}-0002" for phase in PHASES),
    "eval-final-without",
    "eval-final",
    "round-0002",
]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(train.loop, "Policy", ScriptedPolicy)
    return monkeypatch


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of memory and table alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "Policy", ScriptedPolicy)
        return run(knowledge_config(tmp_path_factory.mktemp("straight")))


def test_memory_and_table_learn_over_rounds_without_gradients(straight: Path) -> None:
    done = journal(straight)
    assert list(done) == KNOWLEDGE
    check_rounds(straight, done)


KILLS: list[tuple[Any, str, int]] = [
    (train.rollouts, "append_episode", 5),  # within collect
    (train.learning, "learn_new", 1),  # the trajectories are in, the table has not learnt
    (memory.distil, "consolidate", 1),  # built, but not consolidated
    (train.learning, "audit_store", 1),
    (train.rollouts, "append_episode", 9),  # within validate
    (train.learning, "conclude", 1),  # played and credited, but not judged
    (train.evaluation_phase, "evaluate", 2),
    (train.round_report, "load_table", 1),  # credited, but not closed
    (train.learning, "learn_new", 1),
    (memory.distil, "consolidate", 1),
]
"""Where the run is killed, one start after the other: at the n-th call of a function."""


def test_memory_killed_in_every_phase_is_that_of_an_uninterrupted_run(
    scripted: pytest.MonkeyPatch, straight: Path, tmp_path: Path
) -> None:
    done = journal(straight)
    config = knowledge_config(tmp_path / "killed")
    for number, (module, name, when) in enumerate(KILLS):
        with scripted.context() as patch:
            kill_in(patch, module, name, when)
            with pytest.raises((Killed, BaseExceptionGroup)):  # a group where many episodes are played at once
                run(config, resume=number > 0)
    killed = run(config, resume=True)
    again = journal(killed)
    assert list(again) == KNOWLEDGE
    for phase in KNOWLEDGE:  # names of memory and table at the end of each phase
        assert {key: again[phase].get(key) for key in ("memory", "table", "figures")} == {
            key: done[phase].get(key) for key in ("memory", "table", "figures")
        }, phase
    for phase in (f"collect-{round:04d}" for round in (1, 2)):
        assert [one.id for one in episodes(killed, phase)] == [one.id for one in episodes(straight, phase)]
    with Store(f"sqlite:///{straight}/memory.db") as one, Store(f"sqlite:///{killed}/memory.db") as other:
        assert contents(one) == contents(other)


def check_rounds(folder: Path, done: dict[str, dict[str, Any]]) -> None:
    """What the uninterrupted run must have done, or the comparison would compare little."""
    assert done["distil-0001"]["changes"]["principle"]["added"] > 0
    assert done["audit-0001"]["predicates"]["passed"] > 0
    assert sum(done["validate-0001"]["decisions"].values()) > 0
    names = [done[phase]["memory"] for phase in ("memory", "learn-0001", "distil-0001", "learn-0002")]
    assert len(set(names)) == 4
    assert done["learn-0001"]["table"] != done["learn-0002"]["table"]
    first, second = episodes(folder, "collect-0001"), episodes(folder, "collect-0002")
    assert all(episode.memory is None for episode in first)
    # The second round plays with what the first one ended with, whose ledgers have been credited.
    assert {one.memory.snapshot for one in second if one.memory} == {done["round-0001"]["memory"]}
    assert sum(len(one.memory.retrieved) for one in second if one.memory) > 0
    evaluation = json.loads((folder / "evals/eval-final.json").read_text())
    assert evaluation["memory"]["snapshot"] == done["eval-final"]["memory"]
    assert evaluation["samem"]["snapshot"] == done["eval-final"]["table"]
    without = json.loads((folder / "evals/eval-final-without.json").read_text())
    assert without["memory"] is without["samem"] is None
    assert [item["id"] for item in without["items"]] == [item["id"] for item in evaluation["items"]]
    (line,) = [line for line in metrics(folder, "round") if line["step"] == 2]
    assert line["episodes_played"] == 40
    assert line["trigger_rate"] > 0
    assert line["states"] > 0
    with Store(f"sqlite:///{folder}/memory.db") as store:
        assert sum(count.trajectories for count in store.stats().trajectories) == 80
        assert any(stored.ledger.episodes_with for stored in store.items(3))
    assert len(list((folder / "state").glob("*.db"))) == 1  # older copies are gone


def contents(store: Store) -> Any:
    """Everything that counts in a store: items and links, statuses, ledgers, judgements and the table's history."""
    items = [stored for level in (1, 2, 3) for stored in store.items(level)]
    return (
        sorted((stored.id, stored.status, stored.ledger) for stored in items),
        sorted(link.id for link in store.links()),
        [(one.kind, one.verdict, one.round) for stored in items for one in store.judgements(stored.id)],
        [(one.number, one.round, one.episodes, one.snapshot) for one in read_barriers(store)],
    )


def kill_in(patch: pytest.MonkeyPatch, module: Any, name: str, when: int) -> None:
    original: Callable[..., Any] = getattr(module, name)
    calls = iter(range(1, when))

    def dies(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Killed(name)
        return original(*args, **kwargs)

    patch.setattr(module, name, dies)


# ---- memory, table and GRPO, with a language model that is too small to say anything


ACTIONS = ("look", "inventory", "go to cabinet 1", "go to shelf 1", "open cabinet 1", "take mug 1 from shelf 1")


def act_by_sampled_tokens(text: str) -> tuple[str | None, str | None]:
    """What the model's noise stands for: so that what it samples decides what is rewarded."""
    return None, ACTIONS[sum(map(ord, text)) % len(ACTIONS)]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a language model of a few thousand random weights over bytes."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.5,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def whole_config(tmp_path: Path, *overrides: str) -> Config:
    data = {
        "run": {"name": "demo", "dir": str(tmp_path), "seed": 3, "deterministic": True},
        "rounds": 2,
        "model": {"dtype": "float32"},
        "env": {"name": "household", "max_steps": 4},
        "pool": {"workers": 1, "envs_per_worker": 2},
        "agent": {"context_tokens": 8000, "max_new_tokens": 6, "concurrency": 1},
        "memory": {
            "embedder": {"kind": "hashing"},
            "plan_tokens": 4,
            "budget_tokens": 1500,
            "attempts": 1,
            "audit": {"samples": 50},
            "validation": {"episodes": 0},
        },
        "samem": {"embedder": {"kind": "hashing"}, "lifted": True, "recall": "hint"},
        "lora": {"rank": 8, "alpha": 16},
        "grpo": {
            "tasks": "household/easy/train:210-219",
            "iterations": 2,
            "groups": 2,
            "group_size": 4,
            "learning_rate": 1.0e-3,
            "invalid_penalty": 0.05,  # a signal even where nothing is won
            "tokens_per_micro_batch": 8192,
        },
        "eval": {"tasks": "household/easy/eval:0-1"},
    }
    return config_from(data, list(overrides))


WHOLE_KILLS: list[tuple[Any, str, int]] = [
    (train.rollouts, "append_episode", 3),  # within the rollouts of the first round
    (train.optimise, "make_batch", 1),  # played, but not updated
    (train.optimise, "rate_share", 2),  # within the second iteration
    (train.evaluation_phase, "evaluate", 2),
    (train.round_report, "load_table", 1),
    (memory.distil, "consolidate", 1),
    (train.rollouts, "append_episode", 5),  # within the rollouts of the second round
]


def test_everything_killed_and_resumed_is_an_uninterrupted_run(
    straight: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.agent, "parse_reply", act_by_sampled_tokens)
    begin = [f"model.name={tiny_model}", f"memory.store=sqlite:///{straight}/memory.db"]
    before = (straight / "memory.db").read_bytes()
    whole = run(whole_config(tmp_path / "whole", *begin))
    done = journal(whole)
    check_whole(whole, done)

    config = whole_config(tmp_path / "killed", *begin)
    for number, (module, name, when) in enumerate(WHOLE_KILLS):
        with pytest.MonkeyPatch.context() as patch:
            kill_in(patch, module, name, when)
            with pytest.raises((Killed, BaseExceptionGroup)):
                run(config, resume=number > 0)
    killed = run(config, resume=True)
    again = journal(killed)
    for phase, left in done.items():
        assert {key: again[phase].get(key) for key in ("adapter", "memory", "table", "adapter_hash")} == {
            key: left.get(key) for key in ("adapter", "memory", "table", "adapter_hash")
        }, phase
    final = "adapters/policy-v0004/adapter_model.safetensors"
    assert (killed / final).read_bytes() == (whole / final).read_bytes()
    with Store(f"sqlite:///{whole}/memory.db") as one, Store(f"sqlite:///{killed}/memory.db") as other:
        assert contents(one) == contents(other)
    assert (straight / "memory.db").read_bytes() == before  # where a run begins is never written


def check_whole(folder: Path, done: dict[str, dict[str, Any]]) -> None:
    """What the run must have done, or the comparison would compare little."""
    assert list(done) == [
        *("memory", "eval-start-without", "eval-start"),
        *("grpo-0001", "grpo-0002", "eval-round-0001-without", "eval-round-0001", "round-0001"),
        *("learn-0002", "distil-0002", "audit-0002"),
        *("grpo-0003", "grpo-0004", "eval-final-without", "eval-final", "round-0002"),
    ]
    phases = [f"grpo-{iteration:04d}" for iteration in range(1, 5)]
    updates = [line for phase in phases for line in metrics(folder, phase)]
    assert sum(line["optimiser_steps"] for line in updates) > 2
    assert all({"success_guided", "success_free"} <= line.keys() for line in updates)
    for number, phase in enumerate(phases):
        played = episodes(folder, phase)
        assert {one.adapter for one in played} == {f"policy-v000{number}"}
        guided = [one for one in played if one.memory is not None]
        assert {one.memory.snapshot for one in guided if one.memory} == {done[phase]["memory"]}
        recalls = {step.recall.snapshot for one in guided for step in one.steps if step.recall}
        assert recalls == {done[phase]["table"]}
        groups: dict[str, list[bool]] = {}
        for one in played:
            groups.setdefault(one.group, []).append(one.memory is not None)
        assert groups == {
            **{f"{phase}/{group:03d}": [True, True] for group in range(2)},
            **{f"{phase}/{group:03d}-free": [False, False] for group in range(2)},
        }
    assert done["grpo-0001"]["table"] != done["grpo-0003"]["table"]
    assert done["learn-0002"]["trajectories"] == 16  # the first round's rollouts, not paid for twice
    (first, second) = metrics(folder, "round")
    assert first["resamples"] + second["resamples"] > 0  # predicates had a part in it
    with Store(f"sqlite:///{folder}/memory.db") as store:
        assert any(ledger.episodes_without for ledger in (stored.ledger for stored in store.items(3)))
