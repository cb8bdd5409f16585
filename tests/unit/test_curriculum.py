from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import Task
from train.curriculum import iteration_tasks, rate_share, step_cap, total_signal, type_weights
from train.trajectory import Episode, Step
from train.warm import successes

pytestmark = pytest.mark.unit

TASKS = [Task("household", f"easy/{i}", ("pick", "clean", "heat")[i % 3]) for i in range(12)]


def test_step_caps_take_equal_parts() -> None:
    assert [step_cap([10, 20, 30], i, 6, 50) for i in range(1, 7)] == [10, 10, 20, 20, 30, 30]
    assert [step_cap([5, 9], i, 3, 50) for i in range(1, 4)] == [5, 5, 9]
    assert step_cap([], 3, 6, 50) == 50


def test_the_learning_rate_rises_and_falls() -> None:
    assert [rate_share("linear", i, 4) for i in range(1, 5)] == [1.0, 0.75, 0.5, 0.25]
    assert [rate_share("constant", i, 4, warmup=2) for i in range(1, 5)] == [0.5, 1.0, 1.0, 1.0]
    assert [rate_share("linear", i, 4, warmup=2) for i in range(1, 5)] == [0.5, 0.75, 0.5, 0.25]


def test_types_are_weighted_by_their_share_of_groups_with_signal() -> None:
    # pick: (3 + 1) / (4 + 2) = 2/3; clean: (0 + 1) / (4 + 2) = 1/6; heat, unseen: 1/2. Their sum is 4/3.
    weights = type_weights(["pick", "clean", "heat", "pick"], {"pick": [3, 4], "clean": [0, 4]})
    assert weights == pytest.approx({"pick": 0.5, "clean": 0.125, "heat": 0.375})


def test_signals_add_up() -> None:
    assert total_signal([{"pick": [1, 2]}, {"pick": [0, 1], "heat": [1, 1]}]) == {"pick": [1, 3], "heat": [1, 1]}


@given(st.integers(1, 20), st.integers(0, 1000))
def test_uniform_draws_repeat_no_task_before_all_came(count: int, seed: int) -> None:
    drawn = [task.id for i in range(1, 8) for task in iteration_tasks(TASKS, count, i, seed, first=(i - 1) * count)]
    for start in range(0, len(drawn) - 11, 12):
        assert len(set(drawn[start : start + 12])) == 12


def test_preferred_types_come_more_often_and_the_draw_is_reproducible() -> None:
    signal = {"pick": [98, 98], "clean": [0, 98], "heat": [0, 98]}  # weights 0.99, 0.01, 0.01 before normalising

    def draw() -> list[Task]:
        return [
            task
            for i in range(1, 101)
            for task in iteration_tasks(TASKS, 5, i, 0, first=5 * (i - 1), prefer_signal=0.8, signal=signal)
        ]

    drawn = draw()
    counts = Counter(task.type for task in drawn)
    # 0.8 * 0.98 + 0.2 / 3 = 0.85 of 500.
    assert 390 < counts["pick"] < 460
    assert min(counts["clean"], counts["heat"]) > 10
    assert drawn == draw()


def test_the_shortest_successes_are_kept() -> None:
    def played(name: str, steps: int, won: bool) -> Episode:
        made = [Step(index=i, observation="", text="", action="x") for i in range(steps)]
        return Episode(id=name, phase="p", env="household", task="t", task_type="pick", seed=0, won=won, steps=made)

    group = [played("long", 5, True), played("lost", 1, False), played("short", 2, True), played("tie", 2, True)]
    assert [episode.id for episode in successes(group, 2)] == ["short", "tie"]
    assert [episode.id for episode in successes(group, 9)] == ["short", "tie", "long"]
    assert successes(group[1:2], 1) == []
