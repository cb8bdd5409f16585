"""What the table learns in small text worlds, against value iteration: 20 seeds, on-policy and off-policy."""

from __future__ import annotations

import random

import pytest

from envs.base import Task
from memory.embedding import HashingEmbedder
from memory.experience import read_experience
from memory.qlearning import epsilon_at
from memory.qtable import QTable
from memory.recall import StateGuide
from memory.records import TraceStep, Trajectory
from memory.samem_settings import SamemSettings
from tests.text_mdps import Dynamics, TextMdp, chain, grid, two_doors, value_iteration

pytestmark = pytest.mark.unit

GAMMA = 0.9
SEEDS = range(20)


def play(env: TextMdp, table: QTable, number: int, *, epsilon: float, random_policy: bool, seed: int) -> Trajectory:
    """One episode: a random policy (off-policy), or the table's own choice in training with epsilon (on-policy).

    Odd episodes start anywhere, so that every state is seen.
    """
    chance = random.Random(f"{seed}/{number}")
    states = sorted(env._dynamics)
    start = chance.choice(states) if number % 2 else ""
    result = env.reset(Task("mdp", start, "mdp"), seed=chance.randrange(10**9))
    guide = StateGuide(table.snapshot(), table.settings, f"{seed}/{number}/guide", epsilon=epsilon, training=True)
    steps = []
    while not result.done:
        options = env.admissible()
        recalled = None if random_policy else guide.recall(result.observation, options)
        action = recalled.thought if recalled and recalled.thought else chance.choice(options)
        after = env.step(action)
        steps.append(
            TraceStep(
                index=len(steps), observation=result.observation, action=action, result=after.observation,
                reward=after.reward / TextMdp.SCALE, admissible=tuple(options),
            )
        )  # fmt: skip
        result = after
    # What the step cap ended breaks off: its last step has no known successor.
    status = "truncated" if result.truncated else "complete"
    return Trajectory(
        source=f"mdp#{number:05d}", world="mdp", grammar="mdp", task="mdp", status=status, steps=tuple(steps)
    )


def learn(dynamics: Dynamics, start: str, settings: SamemSettings, episodes: int, seed: int, *, off: bool) -> QTable:
    table = QTable(settings, HashingEmbedder())
    env = TextMdp(dynamics, start, max_steps=30)
    batch = 20
    for first in range(0, episodes, batch):
        epsilon = epsilon_at(first, settings.epsilon_start, settings.epsilon_end, settings.epsilon_episodes)
        played = [
            play(env, table, number, epsilon=epsilon, random_policy=off, seed=seed)
            for number in range(first, first + batch)
        ]
        table.learn(
            read_experience(of, [step.observation for step in of.steps], "action", options=None) for of in played
        )
    return table


def learnt(table: QTable) -> dict[tuple[str, str], float]:
    return {
        (table.states[table.state_of[n]].text.removeprefix("You are in ").rstrip("."), founder.text): table.values[n]
        for n, founder in enumerate(table.thoughts)
    }


SETTINGS = SamemSettings(
    store="action", threshold=0.999, thought_threshold=1.0, gamma=GAMMA, alpha=0.7, judge="none",
    epsilon_start=1.0, epsilon_end=0.5, epsilon_episodes=200,
)  # fmt: skip


@pytest.mark.parametrize("off", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("world", ["chain", "grid"])
def test_values_in_deterministic_worlds_are_those_of_value_iteration(world: str, off: bool) -> None:
    """Tolerance 0.01: the error of a constant step size dies out geometrically where outcomes are certain."""
    dynamics, start = {"chain": (chain(), "room 1"), "grid": (grid(), "square a0")}[world]
    wanted = value_iteration(dynamics, GAMMA)
    for seed in SEEDS:
        found = learnt(learn(dynamics, start, SETTINGS, 600, seed, off=off))
        assert found.keys() == wanted.keys()
        worst = max(abs(found[pair] - wanted[pair]) for pair in wanted)
        assert worst < 0.01, (seed, worst)


@pytest.mark.parametrize("off", [False, True], ids=["on-policy", "off-policy"])
def test_values_behind_a_stochastic_door_are_those_of_value_iteration(off: bool) -> None:
    """Tolerance 0.1: four standard errors of a mean of 0/1 outcomes of chance 0.3 over 350 visits.

    gamma is 0.5, because with 1/N early errors die out as N^-(1 - gamma) only (Even-Dar and Mansour 2003).
    """
    dynamics = two_doors()
    wanted = value_iteration(dynamics, 0.5)
    settings = SETTINGS.model_copy(update={"step_size": "1/N", "gamma": 0.5})
    for seed in SEEDS:
        table = learn(dynamics, "hall", settings, 1500, seed, off=off)
        found = learnt(table)
        assert found.keys() == wanted.keys()
        worst = max(abs(found[pair] - wanted[pair]) for pair in wanted)
        assert worst < 0.1, (seed, worst)
        doors = next(n for n, founder in enumerate(table.states) if "doors" in founder.text)
        guide = StateGuide(table.snapshot(), settings, "test")
        assert guide.recall(table.states[doors].text).thought == "open the blue door"


def test_value_iteration_on_the_chain_is_what_a_hand_computes() -> None:
    q = value_iteration(chain(), 0.5)
    assert q["room 5", "go right"] == 1.0
    assert q["room 4", "go right"] == 0.5
    assert q["room 1", "go right"] == 0.0625
    assert q["room 5", "go left"] == 0.25
    doors = value_iteration(two_doors(), 0.5)
    assert doors["doors", "open the red door"] == pytest.approx(0.3)
    # hall: 0.8 * 0.5 * 0.4 + 0.2 * 0.5 * v with v = max(0.1, that) = 0.16 / 0.9
    assert doors["hall", "walk"] == pytest.approx(0.16 / 0.9)
