"""SAMem in a language model's episode: what it is given, what of that is trained, and what is recorded."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.base import StepResult, Task
from envs.pool import EnvPool
from memory.embedding import EmbeddingFault, HashingEmbedder
from memory.qtable import QTable
from memory.recall import StateMemory
from memory.samem_settings import SamemSettings
from memory.summary import Words
from memory.usage import Recall
from tests.tiny import tiny_tokenizer
from tests.unit.test_samem_summary import OFFERED, OPENING, WORDS, workshop
from train.agent import Job, PolicyPlayer, Turn
from train.chat import Generation, ModelFault, Sampling
from train.config import AgentConfig, ConfigError, config_from
from train.evaluate import evaluate
from train.recaller import Look, Recaller
from train.rows import rows_of
from train.samem import experiences
from train.tokens import TokenCodec
from train.trajectory import Episode

pytestmark = pytest.mark.unit

BASE = {"threshold": 0.999, "thought_threshold": 1.0, "judge": "none", "gamma": 0.5, "alpha": 0.5}
GOAL = "bring a nail to a shelf."
START = StepResult(OPENING.replace("cup", "nail"), goal=GOAL)
BENCH = StepResult("On it lie a cup 2 and a nail 1.")
TASK = "Task: bring a Y to a Z"
COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("pool_worker.py")))
JOB = Job("p/0", "p", Task("household", "1", "bring"), 0)


def memory(*, learnt: bool = True, **settings: Any) -> StateMemory:
    """A table that has learnt from one episode, in which a cup was brought and the thoughts were written."""
    own = SamemSettings.model_validate({**BASE, **settings})
    table = QTable(own, HashingEmbedder())
    if learnt:
        steps = tuple(
            step.model_copy(
                update={
                    "thought": f"I {step.action}.",
                    "reward": float(step.index == 7),
                    "admissible": OFFERED if own.lifted else None,
                }
            )
            for step in workshop().steps
        )
        table.learn(experiences([workshop(steps=steps)], WORDS, own))
    return StateMemory(table.snapshot(), WORDS if learnt else Words(), own, frozenset({("workshop", "1")}))


def looks(of: StateMemory, *, training: bool = False, key: str = "k") -> tuple[Look, Look]:
    """At the start, and at the bench."""
    recaller = Recaller(of, key, training=training)
    first = recaller.look(START, None)
    recaller.replied(first.recall, "I walk to bench 1.", "walk to bench 1")
    return first, recaller.look(BENCH, None)


def recalled(look: Look) -> Recall:
    assert look.recall is not None
    return look.recall


def followed(recaller: Recaller, look: Look, thought: str | None, action: str | None) -> bool | None:
    recall = recaller.replied(look.recall, thought, action)
    assert recall is not None
    return recall.followed


def test_the_state_is_the_summary_and_the_thought_speaks_of_the_task_at_hand() -> None:
    first, second = looks(memory())
    assert first.state == f"{TASK}. Place: start"
    assert second.state == f"{TASK}. Place: bench. Here: Y"
    assert first.opening == "Thought: I walk to bench 1.\nAction:"
    # Half of 1 is learnt at the last step and 1/4 of it handed back at each step, but that of equal states once: 2^-11.
    assert (recalled(first).state, recalled(first).value, recalled(first).visits) == (0, 0.00048828125, 1)
    assert recalled(second).thought == "I grab Y off bench 1."
    assert recalled(second).shown == "I grab nail off bench 1."
    assert second.opening == "Thought: I grab nail off bench 1.\nAction:"
    assert (second.hint, second.action) == ("", "")


def test_a_hint_is_shown_and_may_be_followed_or_not() -> None:
    recaller = Recaller(memory(recall="hint"), "k", training=False)
    look = recaller.look(START, None)
    assert (look.hint, look.opening) == ("\nWhat served best in such a state: I walk to bench 1.", "")
    assert followed(recaller, look, "I look around.", "look") is False
    assert followed(recaller, look, " I walk  to bench 1.", "walk to shelf 1") is True
    assert followed(recaller, look, None, None) is False


def test_a_recalled_action_is_played_as_it_is() -> None:
    first, second = looks(memory(store="action"))
    assert (first.action, first.opening) == ("walk to bench 1", "")
    assert second.action == "grab cup 2 off bench 1"  # which is of no use here: actions hold for their own things


def test_lifted_thoughts_are_named_and_followed_by_actions() -> None:
    recaller = Recaller(memory(lifted=True, recall="hint"), "k", training=False)
    look = recaller.look(StepResult(OPENING, goal="bring a cup to a shelf."), OFFERED)
    assert look.state == "Task: bring Y Z. Holding: nothing. At hand: polish Y"
    assert recalled(look).thought == "walk to a new place"
    assert followed(recaller, look, None, "walk to bench 2") is True
    assert followed(recaller, look, None, "walk to kiln 1") is False  # a new place, but with something it alone can do
    assert followed(recaller, look, None, "walk to bench 1") is True
    look = recaller.look(BENCH, OFFERED)
    assert (recalled(look).thought, recalled(look).shown) == ("grab Y off here", "grab cup off here")
    look = recaller.look(BENCH, ["lay cup 1 on bench 1", "walk to kiln 1", "polish cup 1"])
    assert recalled(look).thought == ""  # none of what is possible now was tried


def test_epsilon_decides_in_training_only() -> None:
    explores = memory(epsilon_start=1.0, epsilon_end=1.0)
    for look in looks(explores, training=True):
        assert (recalled(look).thought, recalled(look).explored, look.opening) == ("", True, "")
        assert look.state != ""
    assert recalled(looks(explores)[0]).thought == "I walk to bench 1."
    half = memory(epsilon_start=0.5, epsilon_end=0.5)
    explored = [recalled(looks(half, training=True, key=str(key))[0]).explored for key in range(200)]
    assert 70 < sum(explored) < 130
    assert explored == [recalled(looks(half, training=True, key=str(key))[0]).explored for key in range(200)]


def test_epsilon_falls_with_the_episodes_learnt() -> None:
    falling = memory(epsilon_start=1.0, epsilon_end=0.0, epsilon_episodes=1)  # one episode is learnt
    assert not any(recalled(looks(falling, training=True, key=str(key))[0]).explored for key in range(20))


def test_an_empty_table_recalls_nothing_but_names_states() -> None:
    first, second = looks(memory(learnt=False))
    assert recalled(first) == Recall(snapshot=recalled(first).snapshot)
    assert first.opening == ""
    assert second.state == "Task: bring a nail to a Z. Place: bench"


def test_what_brought_nothing_new_is_not_recalled_again() -> None:
    recaller = Recaller(memory(no_repeats=True), "k", training=False)
    look = recaller.look(START, None)
    recaller.replied(look.recall, recalled(look).shown, "wait")
    assert recalled(recaller.look(START, None)).thought == ""


# ---- the policy


class Spelling:
    """Spells given answers, one token a byte."""

    name = "spelling"
    adapter = "policy-v0001"

    def __init__(self, codec: TokenCodec, *answers: str) -> None:
        self.codec = codec
        self.answers = list(answers)
        self.prompts: list[str] = []

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        answer = self.answers[len(self.prompts)]
        self.prompts.append(self.codec.decode(prompt_ids))
        ids = [*self.codec.text(answer), self.codec.eot_id]
        return Generation(answer, ids, [-0.5] * len(ids), adapter=self.adapter)

    def release(self, conversation: str) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(tiny_tokenizer())


def play(codec: TokenCodec, of: StateMemory, *answers: str) -> tuple[list[Turn], Spelling, list[str]]:
    """Two turns; the trained text of each row."""
    model = Spelling(codec, *answers)
    agent = AgentConfig(thoughts=True, context_tokens=4000, max_new_tokens=64)
    player = PolicyPlayer(model, codec, JOB, agent, 1.0, 7, recaller=Recaller(of, "k", training=False))
    session: Any = None  # the admissible actions are not asked for
    turns = [asyncio.run(player.act(session, result, step)) for step, result in enumerate((START, BENCH))]
    rows = rows_of(Episode(id="e", phase="p", env="w", task="1", task_type="", seed=0, contexts=player.contexts()))
    trained = [
        codec.decode([token for token, counts in zip(row.ids, row.trained, strict=True) if counts]) for row in rows
    ]
    return turns, model, trained


def test_the_policy_goes_on_from_a_recalled_thought_which_is_not_trained(codec: TokenCodec) -> None:
    turns, model, trained = play(codec, memory(), " walk to bench 1", " grab nail 1 off bench 1")
    assert trained == [" walk to bench 1 grab nail 1 off bench 1"]
    assert model.prompts[0].endswith("assistant\nThought: I walk to bench 1.\nAction:")
    assert model.prompts[1].startswith(model.prompts[0] + " walk to bench 1")  # one growing context
    assert turns[1].text == "Thought: I grab nail off bench 1.\nAction: grab nail 1 off bench 1"
    assert (turns[1].thought, turns[1].action) == ("I grab nail off bench 1.", "grab nail 1 off bench 1")
    assert [turn.recall.followed for turn in turns if turn.recall] == [True, True]
    assert [turn.state for turn in turns] == [f"{TASK}. Place: start", f"{TASK}. Place: bench. Here: Y"]


def test_the_policy_thinks_for_itself_after_a_hint(codec: TokenCodec) -> None:
    own = "Thought: I look.\nAction: walk to bench 1"
    turns, model, trained = play(codec, memory(recall="hint"), own, "Action: wait")
    assert trained == [own + "Action: wait"]
    assert "\nWhat served best in such a state: I walk to bench 1." in model.prompts[0]
    assert [turn.recall.followed for turn in turns if turn.recall] == [False, False]
    assert all("served" not in turn.state for turn in turns)  # anchors hold no hints


def test_no_model_is_asked_where_an_action_is_recalled(codec: TokenCodec) -> None:
    turns, model, trained = play(codec, memory(store="action"))
    assert (model.prompts, trained) == ([], [])
    assert [turn.text for turn in turns] == ["Action: walk to bench 1", "Action: grab cup 2 off bench 1"]
    assert [turn.tokens_out for turn in turns] == [0, 0]


def test_the_policy_thinks_for_itself_where_nothing_is_known(codec: TokenCodec) -> None:
    turns, _, trained = play(codec, memory(learnt=False), "Action: wait", "Action: wait")
    assert trained == ["Action: waitAction: wait"]
    assert [turn.recall.thought for turn in turns if turn.recall] == ["", ""]


def test_states_without_vectors_are_a_fault_of_the_model(codec: TokenCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, texts: object) -> None:
        raise EmbeddingFault("the server is gone")

    of = memory(learnt=False)
    monkeypatch.setattr(HashingEmbedder, "embed", fail)
    with pytest.raises(ModelFault, match="the server is gone"):
        play(codec, of, "Action: wait")


def test_an_evaluation_names_its_table_and_refuses_its_own_tasks(codec: TokenCodec, tmp_path: Path) -> None:
    of = memory(recall="hint")
    data = {"run": {"name": "e"}, "env": {"name": "household", "max_steps": 2}, "eval": {"tasks": "household/hard/x"}}
    config = config_from(data, [])

    def player(job: Job) -> PolicyPlayer:
        model = Spelling(codec, "Action: wait", "Action: win")
        return PolicyPlayer(model, codec, job, config.agent, 1.0, 7, recaller=Recaller(of, job.id, training=False))

    async def main(task: Task) -> dict[str, Any]:
        async with EnvPool({"name": "scripted", "max_steps": 2}, 1, 1, 1000, 20.0, worker_command=COMMAND) as pool:
            return await evaluate(
                pool, player, [task], config, phase="eval", folder=tmp_path, agent="policy", states=of
            )

    result = asyncio.run(main(Task("household", "a", "t")))
    assert result["samem"]["snapshot"] == of.snapshot.id
    assert (result["samem"]["recall"], "database" in result["samem"]) == ("hint", False)
    metrics = result["metrics"]
    assert (metrics["success"], metrics["state_found_rate"], metrics["recalled_rate"]) == (1.0, 0.0, 0.0)
    assert metrics["followed_rate"] is None
    with pytest.raises(ConfigError, match=r"rests on episodes of 1 of its 1 tasks \(for example 1\)"):
        asyncio.run(main(Task("workshop", "1", "t")))
