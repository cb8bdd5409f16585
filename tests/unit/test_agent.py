"""The loop of an episode and of many, by scripted models in a scripted world (real worker processes)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import pytest

from envs.base import EnvFault, Task
from envs.pool import EnvPool
from tests.tiny import tiny_tokenizer
from train.agent import Job, PolicyPlayer, call_seed, play_episode
from train.chat import Generation, ModelFault, ModelLost, Sampling
from train.config import AgentConfig
from train.demonstrations import DemonstrationPlayer
from train.prompts import MALFORMED
from train.rollouts import collect
from train.rows import rows_of
from train.tokens import TokenCodec
from train.trajectory import Episode, TrajectoryError, append_episode, read_episodes

pytestmark = pytest.mark.unit

T = TypeVar("T")

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("pool_worker.py")))
AGENT = AgentConfig(context_tokens=4000, observation_tokens=400, max_new_tokens=64)


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(tiny_tokenizer())


class Spelling:
    """A model that spells given answers, one token a byte, and remembers its prompts and sampling."""

    name = "spelling"
    adapter = "policy-v0001"

    def __init__(self, codec: TokenCodec, answers: list[str]) -> None:
        self.codec = codec
        self.answers = answers
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.released: list[str] = []

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        self.prompts.append(prompt_ids)
        self.seeds.append(sampling.seed)
        answer = self.answers[len(self.prompts) - 1]
        if answer == "FAULT":
            raise ModelFault("the server is gone")
        if answer == "LOST":
            raise ModelLost("the server died three times")
        ids = [*self.codec.text(answer), self.codec.eot_id]
        logprobs = [-0.001 * (len(self.prompts) * 100 + place) for place in range(len(ids))]
        return Generation(answer, ids, logprobs, adapter=self.adapter)

    def release(self, conversation: str) -> None:
        self.released.append(conversation)

    async def close(self) -> None: ...


def job(task: str, number: int = 0) -> Job:
    return Job(f"p/{number}", "p", Task("household", task, "t"), seed=number)


def in_pool(body: Callable[[EnvPool], Awaitable[T]], max_steps: int = 5) -> T:
    async def main() -> T:
        spec = {"name": "scripted", "max_steps": max_steps}
        async with EnvPool(spec, 1, 2, 1000, 20.0, worker_command=COMMAND) as pool:
            return await body(pool)

    return asyncio.run(main())


def play(codec: TokenCodec, answers: list[str], max_steps: int = 5) -> tuple[Episode, Spelling]:
    model = Spelling(codec, answers)
    player = PolicyPlayer(model, codec, job("a"), AGENT, 1.0, run_seed=7)
    episode: Episode = in_pool(lambda pool: play_episode(pool, player, job("a"), max_steps), max_steps)
    return episode, model


def test_an_episode_records_all_that_training_and_audit_need(codec: TokenCodec) -> None:
    episode, model = play(codec, ["Action: look", "I do not know", "Thought: now\nAction: win"])
    assert (episode.status, episode.won, episode.score, episode.episode_return) == ("ok", True, 1.0, 1.0)
    assert [(step.action, step.thought, step.valid, step.result) for step in episode.steps] == [
        ("look", None, True, "did look"),
        (None, None, False, MALFORMED),
        ("win", "now", True, "won"),
    ]
    assert episode.steps[2].observation == MALFORMED
    assert episode.invalid_actions == 1
    assert episode.expert_steps == 7
    assert model.released == [model.released[0]]
    assert model.seeds == [call_seed(7, "p/0", step) for step in range(3)]
    assert len(set(model.seeds)) == 3


def test_rows_hold_the_sampled_ids_and_logprobs_and_nothing_was_tokenised_again(codec: TokenCodec) -> None:
    answers = ["Action: look", "Action: <|im_end|>", "Action: win"]
    episode, model = play(codec, answers)
    (row,) = rows_of(episode)
    sampled = [[*codec.text(answer), codec.eot_id] for answer in answers]
    assert [token for token, trained in zip(row.ids, row.trained, strict=True) if trained] == [*chain(*sampled)]
    # what stands before each completion is exactly the prompt that the model was given
    for prompt, ids in zip(model.prompts, sampled, strict=True):
        assert row.ids[: len(prompt) + len(ids)] == prompt + ids
    expected = [-0.001 * (call * 100 + place) for call, ids in enumerate(sampled, 1) for place in range(len(ids))]
    assert [p for p, trained in zip(row.logprobs, row.trained, strict=True) if trained] == expected


def test_malformed_turns_count_towards_the_cap(codec: TokenCodec) -> None:
    episode, _ = play(codec, ["?"] * 3, max_steps=3)
    assert (len(episode.steps), episode.won, episode.truncated, episode.invalid_actions) == (3, False, True, 3)


@pytest.mark.parametrize(
    ("answers", "status", "error"),
    [
        (["Action: look", "Action: die"], "env_error", "exit"),
        (["Action: look", "Action: fault"], "env_error", "the simulator is gone"),
        (["Action: look", "FAULT"], "model_error", "the server is gone"),
    ],
)
def test_a_fault_ends_the_episode_with_its_status_and_keeps_what_was_played(
    codec: TokenCodec, answers: list[str], status: str, error: str
) -> None:
    episode, model = play(codec, answers)
    assert episode.status == status
    assert error in (episode.error or "")
    assert [step.action for step in episode.steps] == ["look"]
    assert not episode.won
    assert len(model.released) == 1


def test_a_prompt_that_cannot_fit_is_a_model_error(codec: TokenCodec) -> None:
    small = AgentConfig(context_tokens=256, observation_tokens=400, max_new_tokens=64)
    player = PolicyPlayer(Spelling(codec, []), codec, job("a"), small, 1.0, run_seed=0)
    episode: Episode = in_pool(lambda pool: play_episode(pool, player, job("a"), 5))
    assert episode.status == "model_error"
    assert "raise context_tokens" in (episode.error or "")


def gather(
    codec: TokenCodec, file: Path, jobs: list[Job], answers: Callable[[Job], list[str]], others: Sequence[Job] = ()
) -> list[Episode]:
    def player(job: Job) -> PolicyPlayer:
        return PolicyPlayer(Spelling(codec, answers(job)), codec, job, AGENT, 1.0, run_seed=0)

    def body(pool: EnvPool) -> Awaitable[list[Episode]]:
        return collect(pool, player, jobs, max_steps=5, concurrency=3, file=file, description="test", others=others)

    return in_pool(body)


def test_a_collection_goes_on_where_it_was(codec: TokenCodec, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    jobs = [job("a", number) for number in range(6)]
    first = gather(codec, file, jobs[:3], lambda job: ["Action: win"])
    asked: list[str] = []

    def answers(job: Job) -> list[str]:
        asked.append(job.id)
        return ["Action: look"] * job.seed + ["Action: win"]

    episodes = gather(codec, file, jobs, answers)
    assert sorted(asked) == ["p/3", "p/4", "p/5"]
    assert [episode.id for episode in episodes] == [f"p/{number}" for number in range(6)]
    assert episodes[:3] == first
    assert [len(episode.steps) for episode in episodes] == [1, 1, 1, 4, 5, 5]
    assert sorted(episode.id for episode in read_episodes(file)) == [f"p/{number}" for number in range(6)]


def test_a_file_may_hold_other_jobs_of_the_same_phase(codec: TokenCodec, tmp_path: Path) -> None:
    """Refilled groups: played one after the other into one file, and again in that order after a kill."""
    file = tmp_path / "p.jsonl.gz"
    jobs = [job("a", number) for number in range(4)]
    gather(codec, file, jobs[:2], lambda job: ["Action: win"], others=jobs[2:])
    more = gather(codec, file, jobs[2:], lambda job: ["Action: win"], others=jobs[:2])
    assert [episode.id for episode in more] == ["p/2", "p/3"]
    again = gather(codec, file, jobs[:2], lambda job: pytest.fail("played again"), others=jobs[2:])
    assert [episode.id for episode in again] == ["p/0", "p/1"]


def test_a_file_of_another_configuration_is_refused(codec: TokenCodec, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    (episode,) = gather(codec, file, [job("a")], lambda job: ["Action: win"])
    with pytest.raises(TrajectoryError, match="plays a with seed 0, this run expects b with seed 0"):
        gather(codec, file, [job("b")], lambda job: [])
    append_episode(file, episode.model_copy(update={"id": "p/9"}))
    with pytest.raises(TrajectoryError, match="this run expects nothing of that name"):
        gather(codec, file, [job("a")], lambda job: [])


def test_a_fault_is_tried_twice_then_stands_and_stays_in_the_denominator(codec: TokenCodec, tmp_path: Path) -> None:
    tries: list[str] = []

    def answers(job: Job) -> list[str]:
        tries.append(job.id)
        bad = job.id == "p/1" or (job.id == "p/2" and tries.count("p/2") == 1)
        return ["Action: look", "Action: fault"] if bad else ["Action: win"]

    episodes = gather(codec, tmp_path / "p.jsonl.gz", [job("a", number) for number in range(4)], answers)
    assert [episode.status for episode in episodes] == ["ok", "env_error", "ok", "ok"]
    assert [tries.count(f"p/{number}") for number in range(4)] == [1, 2, 2, 1]
    assert len(list(read_episodes(tmp_path / "p.jsonl.gz"))) == 4


def test_when_nothing_works_the_collection_stops_and_records_nothing(codec: TokenCodec, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    with pytest.raises(EnvFault, match=r"the first 3 episodes of p\.jsonl\.gz all failed; last: the simulator is gone"):
        gather(codec, file, [job("a", number) for number in range(3)], lambda job: ["Action: fault"] * 2)
    with pytest.raises(ModelFault, match="the server is gone"):
        gather(codec, file, [job("a", number) for number in range(20)], lambda job: ["FAULT"])
    assert not file.exists()


def test_a_lost_model_ends_the_collection_which_keeps_what_was_played(codec: TokenCodec, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    jobs = [job("a", number) for number in range(6)]
    with pytest.raises(ModelLost, match="died three times"):
        gather(codec, file, jobs, lambda job: ["Action: win"] if job.seed < 5 else ["Action: look", "LOST"])
    played = list(read_episodes(file))
    assert len(played) >= 3  # three play at a time: the sixth begins when three others have ended
    assert {episode.status for episode in played} == {"ok"}
    assert "p/5" not in {episode.id for episode in played}


def test_demonstrations_are_rows_in_the_policys_form(codec: TokenCodec) -> None:
    agent = AGENT.model_copy(update={"thoughts": True})
    player = DemonstrationPlayer(codec, job("a"), agent, recovery=False, run_seed=0)
    episode: Episode = in_pool(lambda pool: play_episode(pool, player, job("a"), 5))
    assert episode.won
    (row,) = rows_of(episode)
    said = [token for token, trained in zip(row.ids, row.trained, strict=True) if trained]
    assert said == [*codec.text("Thought: I win.\nAction: win"), codec.eot_id]
