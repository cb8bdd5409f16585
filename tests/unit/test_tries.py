"""Lost items tried again: what the policy is shown of its lost tries (Reflexion), and how tries are counted."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from envs.base import Task
from envs.pool import EnvPool
from tests.gambling import Gambler, Table
from tests.tiny import tiny_tokenizer
from tests.unit.test_memory_player import Spelling
from train.agent import NOTE_TURN, Job, PolicyPlayer, call_seed, play_episode
from train.chat import ModelLost
from train.compare import compare
from train.config import AgentConfig, Config
from train.evaluate import evaluate
from train.metrics import success_by_try
from train.prompts import NOTE_FORMAT, NOTES_HEADER
from train.tokens import TokenCodec
from train.trajectory import Episode, read_episodes

pytestmark = pytest.mark.unit

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("pool_worker.py")))
AGENT = AgentConfig(context_tokens=4000, max_new_tokens=64, note_tokens=80)
JOB = Job("p/0", "p", Task("household", "a", "t"), seed=0)


def play(answers: list[str], earlier: tuple[Episode, ...], agent: AgentConfig = AGENT) -> tuple[Episode, Spelling]:
    codec = TokenCodec(tiny_tokenizer())
    model = Spelling(codec, answers)
    job = replace(JOB, id=f"p/0-try{len(earlier) + 1}", earlier=earlier)
    player = PolicyPlayer(model, codec, job, agent, 1.0, 7)

    async def main() -> Episode:
        async with EnvPool({"name": "scripted", "max_steps": 2}, 1, 1, 1000, 20.0, worker_command=COMMAND) as pool:
            return await play_episode(pool, player, job, 2)

    return asyncio.run(main()), model


def test_each_try_begins_with_a_note_and_sees_all_notes() -> None:
    first, model = play(["Action: look", "Action: wait"], ())
    assert NOTE_FORMAT not in model.prompts[0]
    assert first.steps[0].note == ""
    second, model = play(["I waited.\nI must win.", "Action: sleep 0", "Action: look"], (first,))
    asked, begun, _ = model.prompts
    assert NOTE_FORMAT in asked
    assert "> look\ndid look\n> wait\ndid wait" in asked
    assert begun.count(f"{NOTES_HEADER}\n- I waited. I must win.") == 1
    assert [step.note for step in second.steps] == ["I waited. I must win.", ""]
    assert [span.role for context in second.contexts for span in context.spans] == ["note", "action", "action"]
    assert model.samplings[0].seed == call_seed(7, "p/0-try2", NOTE_TURN)
    third, model = play(["Win now.", "Action: win"], (first, second))
    asked, begun = model.prompts
    assert "> sleep 0" in asked
    assert "> wait" not in asked, "the note on it stands for the first try"
    assert f"{NOTES_HEADER}\n- I waited. I must win." in asked
    assert f"{NOTES_HEADER}\n- I waited. I must win.\n- Win now." in begun
    assert third.won


def test_without_notes_a_try_is_like_the_first() -> None:
    first, before = play(["Action: look", "Action: wait"], ())
    _, model = play(["Action: win"], (first,), AGENT.model_copy(update={"note_tokens": 0}))
    process = re.compile(r"\b\d+ 1\n")  # the world's first words name its process
    assert process.sub("", model.prompts[0]) == process.sub("", before.prompts[0])
    assert NOTES_HEADER not in model.prompts[0]


def test_of_a_fault_no_note_is_written() -> None:
    fault = Episode(id="p/0", phase="p", env="household", task="a", task_type="t", seed=0, status="env_error")
    episode, model = play(["Action: win"], (fault,))
    assert episode.won
    assert len(model.prompts) == 1


def test_success_by_try_by_hand() -> None:
    def tries(task: str, *won: bool) -> list[Episode]:
        return [
            Episode(id=f"{task}{i}", phase="p", env="e", task=task, task_type="t", seed=0, won=one)
            for i, one in enumerate(won)
        ]

    # Item a: one seed wins at once, one in the second try; item b: never. Means of 1/2 and 0, then of 1 and 0.
    starts = [tries("a", True), tries("a", False, True), tries("b", False, False, False)]
    assert success_by_try(starts, 3) == [0.25, 0.5, 0.5]


def config(tries: int) -> Config:
    given = {"run": {"name": "x"}, "eval": {"tasks": "household/easy/eval-48", "seeds": 2, "tries": tries}}
    return Config.model_validate(given)


TASKS = [Task("household", f"easy/{number}", "put") for number in range(3)]


async def evaluated(agent: Gambler, folder: Path, tries: int = 3) -> dict:
    agent.adopt(config(tries))
    return await evaluate(
        Table(),  # type: ignore[arg-type]
        lambda job: agent.player(job, 0.4),
        TASKS,
        config(tries),
        phase="eval",
        folder=folder,
        agent="policy",
    )


def lost_but_for_the_first(config: Config, task: Task) -> float:
    return float(task.id == "easy/0")


def test_lost_items_are_tried_again_and_nothing_twice(tmp_path: Path) -> None:
    agent = Gambler(lost_but_for_the_first)
    result = asyncio.run(evaluated(agent, tmp_path))
    # Two seeds: item 0 takes one try, items 1 and 2 three.
    assert Counter(job.task.id for job in agent.jobs) == {"easy/0": 2, "easy/1": 6, "easy/2": 6}
    assert [(item["id"], item["seed"], item["tries"]) for item in result["items"]] == [
        (f"easy/{number}", seed, 1 if number == 0 else 3) for seed in (0, 1) for number in range(3)
    ]
    assert result["metrics"]["success_by_try"] == pytest.approx([1 / 3] * 3)
    assert result["metrics"]["tokens_out"] == 3 * 14
    assert result["metrics"]["episodes"] == 6
    last = next(job for job in agent.jobs if job.id == "eval/1-0002-try3")
    assert [episode.id for episode in last.earlier] == ["eval/1-0002", "eval/1-0002-try2"]
    assert {episode.group for episode in last.earlier} == {"", "eval/1-0002"}


def test_an_evaluation_goes_on_in_the_midst_of_its_tries(tmp_path: Path) -> None:
    with pytest.raises(ModelLost):
        asyncio.run(evaluated(Gambler(lost_but_for_the_first, stop_after=12), tmp_path))
    before = {episode.id for episode in read_episodes(tmp_path / "episodes/eval.jsonl.gz")}
    assert any(name.endswith("-try2") for name in before)
    rest = Gambler(lost_but_for_the_first)
    resumed = asyncio.run(evaluated(rest, tmp_path))
    assert not before & {job.id for job in rest.jobs}
    whole = asyncio.run(evaluated(Gambler(lost_but_for_the_first), tmp_path / "whole"))
    for result in (resumed, whole):
        for name in ("finished", "versions"):
            del result[name]
    assert resumed == whole
    once = asyncio.run(evaluated(Gambler(lost_but_for_the_first), tmp_path / "once", tries=1))
    assert "the numbers of tries differ: 1 and 3" in compare(once, whole).warnings
