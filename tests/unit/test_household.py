"""Households before any game is generated: tasks, seeds, difficulties."""

from __future__ import annotations

from collections import Counter

import pytest

from envs.base import Task, TaskError
from envs.household import EVAL_SEEDS, TRAIN_SEEDS, household_task

pytestmark = pytest.mark.unit


def test_train_and_evaluation_seeds_are_disjoint() -> None:
    assert (TRAIN_SEEDS[0], TRAIN_SEEDS[-1]) == (0, 999_999)
    assert (EVAL_SEEDS[0], EVAL_SEEDS[-1]) == (1_000_000, 1_999_999)


def test_task_type_rotates_with_the_seed() -> None:
    assert household_task("easy", 3) == Task("household", "easy/3", "pick_heat_then_place_in_recep")
    assert Counter(household_task("easy", seed).type for seed in EVAL_SEEDS[:48]) == {
        "pick_and_place_simple": 8,
        "look_at_obj_in_light": 8,
        "pick_clean_then_place_in_recep": 8,
        "pick_heat_then_place_in_recep": 8,
        "pick_cool_then_place_in_recep": 8,
        "pick_two_obj_and_place": 8,
    }


@pytest.mark.parametrize(
    ("difficulty", "seed", "message"),
    [
        ("brutal", 1, "difficulty: 'brutal' is unknown; choose easy, medium, hard"),
        ("easy", 2_000_000, "household seed: 2000000 is out of range; give 0 to 1999999"),
        ("easy", -1, "household seed: -1 is out of range"),
    ],
)
def test_unknown_tasks(difficulty: str, seed: int, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        household_task(difficulty, seed)
