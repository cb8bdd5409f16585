"""The policy with a guide: what it is shown, what is sampled again, and which tokens are trained."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.base import Task
from envs.pool import EnvPool
from memory.embedding import EmbeddingFault, HashingEmbedder
from memory.guide import FEEDBACK, HEADER, Memory
from memory.instantiate import INSTRUCTIONS
from memory.predicates import PredicateHost
from memory.records import EpisodeItem, Evidence, Link, Predicate, PrincipleItem, ProcedureItem, TraceStep, Trajectory
from memory.settings import MemorySettings
from memory.store import Store
from tests.tiny import tiny_tokenizer
from train.agent import Job, PolicyPlayer, play_episode
from train.chat import Generation, Sampling
from train.config import AgentConfig, ConfigError
from train.evaluate import check_held_out
from train.memory import episode_ledger
from train.prompts import PLAN_FORMAT, PLAN_REQUEST
from train.rows import rows_of
from train.tokens import TokenCodec
from train.trajectory import Episode, append_episode, read_episodes

pytestmark = pytest.mark.unit

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("pool_worker.py")))
AGENT = AgentConfig(context_tokens=4000, observation_tokens=400, max_new_tokens=64)
JOB = Job("p/0", "p", Task("household", "a", "t"), seed=0)
ALL_ROLES = ("action", "plan", "instantiation")
NO_LOOKING = PrincipleItem(
    world="w",
    grammar="g",
    condition="nothing is known",
    guidance="do not look",
    predicate=Predicate(trigger='action.text == "look"', requirement="size(history) > 0"),
)


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(tiny_tokenizer())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path_factory.mktemp('memory')}/memory.db") as store:
        base = {"world": "w", "grammar": "g"}
        step = TraceStep(index=0, observation="A room.", action="win", result="won")
        won = Trajectory(
            source="s", **base, task="elsewhere", task_type="t", goal="win it", success=True, steps=(step,)
        )
        episode = EpisodeItem(**base, trajectory=won.id, goal="win it", outcome="success")
        procedure = ProcedureItem(**base, when="it can be won", steps=("win",))
        evidence = (Evidence(trajectory=won.id, step=0),)
        ends = [won.id, episode.id, procedure.id, NO_LOOKING.id]
        store.add_trajectories([won])
        links = [Link(lower=ends[i], upper=ends[i + 1], evidence=evidence) for i in range(3)]
        harm = {"harmful": True, "evidence": [evidence[0].model_dump()]}
        assert store.write([episode, procedure, NO_LOOKING], links, {NO_LOOKING.id: harm}).rejected == []
        store.set_status(NO_LOOKING.id, "audited", "test")
        store.judge(NO_LOOKING.id, "audit", {"decision": "passed"})
        yield store


@pytest.fixture(scope="module")
def host() -> Iterator[PredicateHost]:
    with PredicateHost(workers=1, deadline=10.0) as host:
        yield host


class Spelling:
    """Spells given answers, one token a byte; remembers prompts as text, and every sampling."""

    name = "spelling"
    adapter = "policy-v0001"

    def __init__(self, codec: TokenCodec, answers: list[str]) -> None:
        self.codec = codec
        self.answers = answers
        self.prompts: list[str] = []
        self.samplings: list[Sampling] = []

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        answer = self.answers[len(self.prompts)]
        self.prompts.append(self.codec.decode(prompt_ids))
        self.samplings.append(sampling)
        ids = [*self.codec.text(answer), self.codec.eot_id]
        return Generation(answer, ids, [-0.5] * len(ids), adapter=self.adapter)

    def release(self, conversation: str) -> None: ...

    async def close(self) -> None: ...


def play(
    codec: TokenCodec,
    answers: list[str],
    store: Store,
    host: PredicateHost | None,
    agent: AgentConfig = AGENT,
    **settings: Any,
) -> tuple[Episode, Spelling]:
    model = Spelling(codec, answers)
    memory = Memory(
        store, MemorySettings(**settings), grammar="g", embedder=HashingEmbedder(), host=host
    )  # fmt: skip
    guide = memory.guide(JOB.id, lambda text: len(codec.text(text)))
    player = PolicyPlayer(model, codec, JOB, agent, 1.0, 7, guide)

    async def main() -> Episode:
        spec = {"name": "scripted", "max_steps": 5}
        async with EnvPool(spec, 1, 1, 1000, 20.0, worker_command=COMMAND) as pool:
            return await play_episode(pool, player, JOB, 5)

    return asyncio.run(main()), model


def trained_text(episode: Episode, codec: TokenCodec, roles: tuple[str, ...] = ALL_ROLES) -> list[str]:
    """The trained tokens of each row, decoded."""
    rows = rows_of(episode, roles)  # type: ignore[arg-type]
    return [
        codec.decode([token for token, trained in zip(row.ids, row.trained, strict=True) if trained]) for row in rows
    ]


FULL = {"instantiation": "policy", "budget_tokens": 1000}


def test_plan_and_instantiation_come_first_each_in_a_context_of_its_own(
    codec: TokenCodec, store: Store, host: PredicateHost
) -> None:
    answers = ["I win\nat once.", "Constraint: win at once", "Action: sleep 0", "Action: win"]
    episode, model = play(codec, answers, store, host, **FULL)
    assert episode.won
    assert episode.memory is not None
    assert episode.memory.plan == "I win at once."
    plan, instantiation, first, second = model.prompts
    assert PLAN_FORMAT in plan
    assert PLAN_REQUEST.strip() in plan
    assert INSTRUCTIONS in instantiation
    assert "Plan: I win at once." in instantiation
    # the memory stands after the first observation, and only there
    observation = episode.steps[0].observation
    assert (
        f"{observation}\n\n{HEADER}\n- Rule (hypothesis): win at once\n- Procedure: When it can be won: win." in first
    )
    assert first.count(HEADER) == second.count(HEADER) == 1
    assert episode.steps[0].observation == observation  # not part of what is recorded as seen
    roles = [[span.role for span in context.spans] for context in episode.contexts]
    assert roles == [["plan"], ["instantiation"], ["action", "action"]]
    assert trained_text(episode, codec) == [answers[0], answers[1], answers[2] + answers[3]]
    assert trained_text(episode, codec, ("action",)) == [answers[2] + answers[3]]
    # every call has a seed of its own, and all tokens are counted
    assert len({sampling.seed for sampling in model.samplings}) == 4
    assert [sampling.max_tokens for sampling in model.samplings] == [48, 48, 64, 64]
    assert episode.tokens_out == sum(len(answer) + 1 for answer in answers)


def test_an_accepted_resample_keeps_the_rejected_turn_out_of_the_loss(
    codec: TokenCodec, store: Store, host: PredicateHost
) -> None:
    answers = ["I look.", "Constraint: do not look", "Action: look", "no action", "Action: win"]
    episode, model = play(codec, answers, store, host, **FULL)
    (step,) = episode.steps
    assert (step.action, step.text) == ("win", "Action: win")
    assert step.regulation is not None
    assert (step.regulation.choice, step.regulation.proposals) == ("resampled", ("look", None, "win"))
    assert model.prompts[3].count(FEEDBACK) == 1
    assert model.prompts[4].count(f"{FEEDBACK}\n- do not look") == 2
    assert "Action: look" in model.prompts[4]
    assert trained_text(episode, codec) == ["I look.", "Constraint: do not look", "Action: win"]
    (entry,) = [entry for entry in episode_ledger(episode, "run") if entry.item == NO_LOOKING.id]
    assert (entry.episode, entry.outcome, entry.instantiated, entry.violated) == ("run:run/p/0", 1.0, 1, 1)


def test_when_nothing_passes_the_original_is_played_and_the_attempts_are_dropped(
    codec: TokenCodec, store: Store, host: PredicateHost
) -> None:
    before = ["", "Constraint: do not look"]
    attempts = ["Thought: 1\nAction: look", "Action: look", "Action: look", "Action: look"]
    episode, model = play(codec, [*before, *attempts, "Action: win"], store, host, **FULL)
    first, last = episode.steps
    assert (first.action, first.thought, first.text) == ("look", "1", attempts[0])
    assert first.regulation is not None
    assert (first.regulation.choice, len(first.regulation.proposals)) == ("fallback", 4)
    assert last.regulation is not None
    assert [check.outcome for check in last.regulation.checks] == ["idle"]
    assert FEEDBACK not in model.prompts[-1]
    assert model.prompts[-1].count("Action: look") == 1
    assert trained_text(episode, codec)[-1] == attempts[0] + "Action: win"


def test_without_plan_and_policy_nothing_is_asked(codec: TokenCodec, store: Store) -> None:
    episode, model = play(codec, ["Action: win"], store, None, plan_tokens=0, attempts=0)
    assert len(model.prompts) == 1
    assert "When nothing is known: do not look." in model.prompts[0]
    assert episode.steps[0].regulation is None


def test_a_window_keeps_the_memory(codec: TokenCodec, store: Store) -> None:
    agent = AGENT.model_copy(update={"last_turns": 1})
    answers = ["Action: print", "Action: print", "Action: print", "Action: win"]
    _, model = play(codec, answers, store, None, agent, plan_tokens=0, attempts=0)
    assert [prompt.count(HEADER) for prompt in model.prompts] == [1, 1, 1, 1]


def test_a_question_that_does_not_fit_is_suppressed_and_a_prompt_that_does_not_is_a_fault(
    codec: TokenCodec, store: Store, host: PredicateHost
) -> None:
    agent = AGENT.model_copy(update={"context_tokens": 1000})
    episode, _ = play(codec, ["p" * 900, "Action: win"], store, host, agent, instantiation="policy", budget_tokens=100)
    assert episode.memory is not None
    reasons = [made.reason for made in episode.memory.instantiations if made.item == NO_LOOKING.id]
    assert episode.won
    assert reasons[0].startswith("the question does not fit: agent.context_tokens 1000")
    episode, _ = play(codec, ["x"] * 3, store, host, AGENT.model_copy(update={"context_tokens": 200}))
    assert (episode.status, episode.steps) == ("model_error", [])


def test_a_lost_embedding_server_is_a_model_fault(codec: TokenCodec, store: Store, host: PredicateHost) -> None:
    class Lost(HashingEmbedder):
        calls = 0

        def embed(self, texts: Any) -> Any:
            Lost.calls += 1
            if Lost.calls > 3:  # the three levels were indexed
                raise EmbeddingFault("the server is gone")
            return super().embed(texts)

    memory = Memory(store, MemorySettings(plan_tokens=0), grammar="g", embedder=Lost(), host=host)
    player = PolicyPlayer(Spelling(codec, []), codec, JOB, AGENT, 1.0, 7, memory.guide(JOB.id, len))

    async def main() -> Episode:
        async with EnvPool({"name": "scripted", "max_steps": 5}, 1, 1, 1000, 20.0, worker_command=COMMAND) as pool:
            return await play_episode(pool, player, JOB, 5)

    episode = asyncio.run(main())
    assert (episode.status, episode.error) == ("model_error", "the server is gone")
    assert episode.memory is not None


def test_what_was_used_is_read_back(codec: TokenCodec, store: Store, host: PredicateHost, tmp_path: Path) -> None:
    answers = ["I look.", "Suppress: no", "Action: win"]
    episode, _ = play(codec, answers, store, host, **FULL)
    append_episode(tmp_path / "p.jsonl.gz", episode)
    assert list(read_episodes(tmp_path / "p.jsonl.gz")) == [episode]
    assert episode.memory is not None
    assert {made.item: made.reason for made in episode.memory.instantiations}[NO_LOOKING.id] == "no"


def test_an_evaluation_refuses_a_memory_of_its_own_tasks(store: Store) -> None:
    tasks = [Task("w", "here", "t"), Task("w", "elsewhere", "t")]
    with pytest.raises(ConfigError, match=r"rests on episodes of 1 of its 2 tasks \(for example elsewhere\)"):
        check_held_out(store.provenance(), tasks, "w/set")
    check_held_out(store.provenance(), tasks[:1], "w/set")
    check_held_out(store.provenance(), [Task("v", "elsewhere", "t")], "v/set")
