"""The agent on the table alone: a recalled thought becomes one of the actions it stands for, and is written down."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.base import StepResult, Task
from memory.embedding import HashingEmbedder
from memory.qtable import QTable
from memory.samem_settings import SamemSettings
from memory.summary import Words
from tests.unit.test_samem_summary import OFFERED, OPENING, WORDS, workshop
from train.agent import Job, Turn
from train.samem import experiences
from train.samem_player import LiftedLearner, SamemPlayer

pytestmark = pytest.mark.unit

SETTINGS = SamemSettings(
    threshold=0.999,
    thought_threshold=1.0,
    judge="none",
    lifted=True,
    positive_only=True,
    no_repeats=True,
    gamma=0.5,
    alpha=0.5,
)
JOB = Job("test/0", "test", Task("workshop", "1", "bring"), 0)


class FakeSession:
    """Accepts the workshop's actions, whatever was played."""

    async def admissible(self) -> list[str]:
        return sorted(OFFERED)


def won() -> Any:
    """The workshop's episode, whose last step earns 1."""
    steps = workshop().steps
    return workshop(steps=(*steps[:-1], steps[-1].model_copy(update={"reward": 1.0})))


def act(player: SamemPlayer, observation: str, valid: bool = True) -> Turn:
    session: Any = FakeSession()
    result = StepResult(observation, goal="bring a cup to a shelf.", valid=valid)
    return asyncio.run(player.act(session, result, 0))


def learnt() -> QTable:
    table = QTable(SETTINGS, HashingEmbedder())
    table.learn(experiences([won()], WORDS, SETTINGS))
    return table


def test_a_recalled_thought_is_played_as_one_of_its_actions() -> None:
    player = SamemPlayer(JOB, learnt().snapshot(), WORDS, SETTINGS)
    turn = act(player, OPENING)
    assert turn.thought == "grab Y off here" or turn.thought == "walk to a new place"
    assert turn.recall is not None
    assert (turn.recall.thought, turn.recall.followed, turn.recall.state) == (turn.thought, True, 0)
    assert turn.action in OFFERED
    assert turn.text == f"Thought: {turn.thought}\nAction: {turn.action}"
    assert turn.admissible == sorted(OFFERED)


def test_without_a_table_it_plays_its_thoughts_at_random() -> None:
    turns = [act(SamemPlayer(JOB, None, WORDS, SETTINGS, run_seed=seed), OPENING) for seed in range(30)]
    assert all(turn.recall is None for turn in turns)
    assert len({turn.thought for turn in turns}) > 3
    again = [act(SamemPlayer(JOB, None, WORDS, SETTINGS, run_seed=seed), OPENING) for seed in range(30)]
    assert [turn.action for turn in turns] == [turn.action for turn in again]


def test_what_brings_no_new_choice_of_actions_is_not_recalled_again() -> None:
    player = SamemPlayer(JOB, learnt().snapshot(), WORDS, SETTINGS)
    first = act(player, OPENING)
    second = act(player, "Something new.")  # but the same can be done as before
    assert second.recall is not None
    assert first.thought not in ("", second.recall.thought)


def test_actions_as_they_are_with_store_action() -> None:
    settings = SETTINGS.model_copy(update={"store": "action"})
    turn = act(SamemPlayer(JOB, None, WORDS, settings), OPENING)
    assert turn.thought == turn.action


def test_what_was_learnt_with_fewer_words_is_learnt_anew() -> None:
    learner = LiftedLearner(QTable(SETTINGS, HashingEmbedder()))
    short = workshop(
        source="made up#0", steps=tuple(s.model_copy(update={"admissible": None}) for s in workshop().steps)
    )
    learner.learn([short])
    assert learner.words != WORDS
    learner.learn([won()])
    assert learner.words.joined(WORDS) == learner.words
    anew = QTable(SETTINGS, HashingEmbedder())
    found = [list(experiences(batch, learner.words, SETTINGS)) for batch in ([short], [won()])]
    for batch in found:
        anew.learn(batch)
    assert max(anew.values) == 0.5  # half the way to the reward
    anew.replay([experience for batch in found for experience in batch])
    assert max(anew.values) == 1.0
    assert learner.table.snapshot().id == anew.snapshot().id


def test_the_table_to_test_with_has_nothing_of_the_optimism_of_exploration() -> None:
    learner = LiftedLearner(QTable(SETTINGS.model_copy(update={"initial": 0.8, "transfer": 0.9}), HashingEmbedder()))
    learner.learn([workshop()])
    assert max(learner.table.values) > 0.2
    settled = learner.settled()
    assert set(settled.values) == {0.0}  # nothing was earned
    assert settled.visits == learner.table.visits
    learner.learn([won()])
    assert max(learner.settled().values) == 0.5  # the mean of 0 and 1


def test_unknown_words_are_no_obstacle() -> None:
    turn = act(SamemPlayer(JOB, None, Words(), SETTINGS), OPENING)
    assert turn.action in OFFERED


def test_area_under_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "bench"))
    offline = importlib.import_module("samem_offline")
    solved = np.array([True, True, False, False])
    assert offline.auc(np.array([2.0, 3.0, 1.0, 0.0]), solved) == 1.0
    assert offline.auc(np.array([1.0, 3.0, 1.0, 2.0]), solved) == 0.625  # 0.5 + 0 + 1 + 1 of four pairs
    assert offline.mean_known([None, 1.0, 0.5]) == 0.75
    assert offline.mean_known([None]) == 0.0
