"""Generated households in ALFWorld's engine: frozen, within the package's tables, solvable as promised."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from envs.alfworld_expert import SearchExpert, compatible_prior
from envs.base import EnvFault, Task, TaskError
from envs.household import (
    CLEANABLE,
    COOLABLE,
    DIFFICULTIES,
    HEATABLE,
    OPENABLE,
    PLACES,
    SLICEABLE,
    TASK_TYPES,
    HouseholdEnv,
    generate,
    household_task,
)

pytestmark = pytest.mark.integration

FROZEN = [
    ("easy", 0, "88c6dbef6ef9fb9780a8cf4a11eb947efa9a870b78dddca021cb460821d0b625"),
    ("easy", 1_000_003, "1a69a2c88efafe8f0be47df6981f52c9a17f6c836f1e1ffb5f4dc4bcb2eae89a"),
    ("medium", 0, "9ddc864a10d23c79ee2c39fa3c85019987c19e740dc20df0fcf06b21a3c70066"),
    ("medium", 1_000_003, "f1deb76c10c4f20d93666dfb47b48a1b26e565003dea96a0ca6a83a33c475136"),
    ("hard", 0, "45032ad15bc1a72cd9cb5640035a7968838d07b67f50b313c98f2bdae3a9ca6c"),
    ("hard", 1_000_003, "85a2e010cbbfe0dbade8930c3bb841f577f3ec480549b8342ac8c3a0da2a9823"),
]
"""A change of the generator (or of alfworld's domain and grammar) makes other games: frozen task sets break with it."""


@pytest.fixture(scope="module")
def env() -> Iterator[HouseholdEnv]:
    env = HouseholdEnv(max_steps=50)
    yield env
    env.close()


def test_the_world_tells_what_is_held(env: HouseholdEnv) -> None:
    """In some twenty episodes of the expert: what it took and has not put down, nothing else."""
    told = set()
    for seed in range(20):
        result = env.reset(household_task("easy", seed))
        held: list[str] = []
        while not result.done:
            assert result.inventory == held
            verb, *words = env.expert().action.split()
            result = env.step(" ".join([verb, *words]))
            if verb == "take":
                held = [" ".join(words[:2])]
            elif verb == "move":
                held = []
            told.update(result.inventory or [])
    assert len(told) > 5


@pytest.mark.parametrize(("difficulty", "seed", "sha256"), FROZEN)
def test_games_are_frozen(difficulty: str, seed: int, sha256: str) -> None:
    assert hashlib.sha256(generate(difficulty, seed).encode()).hexdigest() == sha256


def test_games_do_not_depend_on_the_process() -> None:
    code = (
        "import hashlib, envs.household as h; "
        f"print([hashlib.sha256(h.generate(d, s).encode()).hexdigest() for d, s, _ in {FROZEN!r}])"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == str([sha256 for _, _, sha256 in FROZEN])


def test_seeds_give_different_games() -> None:
    problems = {json.loads(generate("easy", seed))["pddl_problem"].split("\n", 1)[1] for seed in range(300)}
    assert len(problems) == 300


def test_tables_are_within_those_of_the_alfworld_package() -> None:
    import envs.alfworld_engine  # noqa: F401  (imports alfworld without leaving the ALFWORLD_DATA that it sets)

    # isort: split
    from alfworld.gen import constants

    kinds = set(PLACES) - {"DeskLamp"}
    for kind in kinds:
        for place in PLACES[kind]:
            assert kind in constants.VAL_RECEPTACLE_OBJECTS[place], (kind, place)
    assert set(CLEANABLE) == constants.VAL_ACTION_OBJECTS["Cleanable"] & kinds
    assert set(HEATABLE) == constants.VAL_ACTION_OBJECTS["Heatable"] & kinds
    assert set(COOLABLE) == constants.VAL_ACTION_OBJECTS["Coolable"] & kinds
    assert set(SLICEABLE) == constants.VAL_ACTION_OBJECTS["Sliceable"] & kinds
    assert set(OPENABLE) <= set(constants.OPENABLE_CLASS_LIST)


def test_a_game_reads_like_alfworld(env: HouseholdEnv) -> None:
    """Golden text of one game, checked by eye against official ones."""
    result = env.reset(household_task("easy", 1))
    assert result.observation == (
        "You are in the middle of a room. Looking quickly around you, you see a coffeetable 1, a garbagecan 1, "
        "a sidetable 1, and a sofa 1.\n\n"
        "Your task is to: examine the cellphone with the desklamp."
    )
    assert result.goal == "examine the cellphone with the desklamp."
    assert not result.done
    assert env.expert_steps == 4
    for action, answer in [
        (
            "go to coffeetable 1",
            "You arrive at coffeetable 1. On the coffeetable 1, you see a cellphone 1, and a remotecontrol 1.",
        ),
        ("take cellphone 1 from coffeetable 1", "You pick up the cellphone 1 from the coffeetable 1."),
        (
            "go to sidetable 1",
            "You arrive at sidetable 1. On the sidetable 1, you see a desklamp 1, and a wateringcan 1.",
        ),
        ("use desklamp 1", "You turn on the desklamp 1."),
    ]:
        assert not result.won
        result = env.step(action)
        assert result.observation == answer
    assert result.won
    assert result.score == result.reward == 1.0


def test_refused_action_is_invalid_and_costs_a_step(env: HouseholdEnv) -> None:
    env.reset(household_task("easy", 0))
    result = env.step("go to shelf 9")
    assert (result.observation, result.valid, result.done, env.steps) == ("Nothing happens.", False, False, 1)
    assert "go to shelf 9" not in env.admissible()
    assert env.admissible() == sorted(env.admissible())


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("kind", range(6), ids=TASK_TYPES)
def test_walkthrough_and_expert_win(env: HouseholdEnv, difficulty: str, kind: int) -> None:
    """The stored solution wins with its last step and not before; the expert wins within the promised steps."""
    task = household_task(difficulty, 1_000_002 + 6 * 7 + kind)
    result = env.reset(task)
    walkthrough = json.loads(generate(difficulty, int(task.id.split("/")[1])))["walkthrough"]
    assert env.expert_steps == len(walkthrough)
    for action in walkthrough:
        assert not result.won
        assert action in env.admissible()
        result = env.step(action)
    assert result.won

    result = env.reset(task)
    while not result.done:
        move = env.expert()
        assert move.thought
        result = env.step(move.action)
        assert result.valid, move
    assert result.won
    assert len(walkthrough) <= env.steps <= DIFFICULTIES[difficulty].expert_steps


def test_easy_games_are_short(env: HouseholdEnv) -> None:
    steps = []
    for seed in range(24):
        result = env.reset(household_task("easy", seed))
        receptacles = result.observation.split("you see ")[1].split("\n")[0].split(", ")
        assert 4 <= len(receptacles) <= 6
        while not result.done:
            result = env.step(env.expert().action)
        steps.append(env.steps)
        assert result.won
        assert env.steps <= 8
    assert sum(steps) / len(steps) > 5  # and yet they have to be played


@pytest.mark.parametrize("kind", range(6), ids=TASK_TYPES)
def test_expert_recovers_from_foreign_actions(env: HouseholdEnv, kind: int) -> None:
    """Random admissible actions and invalid ones come first; then the expert takes over and wins."""
    rng = random.Random(kind)
    result = env.reset(household_task("easy", 6_000 + kind))
    for _ in range(15):
        result = env.step(rng.choice([*env.admissible(), "go to shelf 9", "take mug 7 from shelf 9", "sing"]))
        assert not result.done
    while not result.done:
        result = env.step(env.expert().action)
    assert result.won


def test_expert_with_the_packages_table_as_prior() -> None:
    """Without counted walkthroughs the table of compatible receptacles is enough to win."""
    prior = compatible_prior()
    assert prior["mug"]["coffeemachine"] == 1.0
    assert "bed" not in prior["mug"]
    env = HouseholdEnv(max_steps=50)
    result = env.reset(household_task("medium", 7))
    agent = SearchExpert(result.observation, prior)
    while not result.done:
        action = agent.move().action
        result = env.step(action)
        agent.observe(action, result.observation)
    env.close()
    assert result.won


def test_bad_tasks(env: HouseholdEnv) -> None:
    with pytest.raises(TaskError, match=r"task 'boil/x': not a household; its id is <difficulty>/<seed>"):
        env.reset(Task("household", "boil/x", "boil"))
    with pytest.raises(TaskError, match="difficulty: 'boil' is unknown; choose easy, medium, hard"):
        env.reset(Task("household", "boil/21", "boil"))
    with pytest.raises(TaskError, match=r"task 'easy/1': the generated game has sha256 \w{64}, not 0000"):
        env.reset(replace(household_task("easy", 1), sha256="0" * 64))


def test_expert_before_reset() -> None:
    env = HouseholdEnv(max_steps=5)
    with pytest.raises(EnvFault, match="expert: no game is running; call reset first"):
        env.expert()
    env.close()
