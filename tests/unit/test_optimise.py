"""Which tasks the iterations of policy optimisation play, with a run whose episodes are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.base import Task
from train.agent import Job
from train.config import config_from
from train.optimise import Optimisation
from train.preflight import Journal
from train.schedule import round_iterations
from train.trajectory import Episode, Step

pytestmark = pytest.mark.unit

TASKS = [Task("household", f"easy/{number}", "pick") for number in range(6)]
SET = "household/easy/train:0-5"


class MadeUpRun:
    """Plays a task's rollouts with equal rewards, or with different ones if it is among ``loud``."""

    def __init__(self, folder: Path, loud: set[str], **grpo: Any) -> None:
        self.config = config_from(
            {
                "run": {"name": "demo"},
                "env": {"name": "household"},
                "grpo": {"tasks": SET, "group_size": 2, **grpo},
                "eval": {"tasks": "household/easy/eval:0-3"},
            },
            [],
        )
        self.sets = {SET: TASKS}
        self.journal = Journal(folder / "journal.json")
        self.policy = SimpleNamespace(guided=False)
        self.versions = SimpleNamespace(act_with=self._act_with, after=lambda iteration: iteration)
        self.acted: list[int] = []
        self._loud = loud

    async def _act_with(self, number: int) -> None:
        self.acted.append(number)

    async def play(
        self, jobs: Sequence[Job], temperature: float, max_steps: int, others: Sequence[Job] = ()
    ) -> list[Episode]:
        return [self._episode(job, number) for number, job in enumerate(jobs)]

    def _episode(self, job: Job, number: int) -> Episode:
        reward = float(number % 2 and job.task.id in self._loud)
        step = Step(index=0, observation="", text="", action="look", reward=reward)
        return Episode(
            id=job.id, phase=job.phase, env="household", task=job.task.id, task_type="pick", seed=job.seed,
            group=job.group, steps=[step],
        )  # fmt: skip


def rollouts(run: Any, iterations: Sequence[int]) -> list[list[str]]:
    """The tasks that each iteration played."""
    optimisation = Optimisation(run, run.config.grpo)
    played = []
    for iteration in iterations:
        groups, _ = asyncio.run(optimisation._rollout(iteration, round_iterations(run.config.grpo, 1)))
        optimisation._signals[iteration] = {"pick": [0, len(groups)]}
        played.append([group[0].task for group in groups])
    return played


def test_tasks_kept_in_reserve_and_not_played_come_next(tmp_path: Path) -> None:
    loud = {task.id for task in TASKS}
    run = MadeUpRun(tmp_path, loud, groups=1, refill=2, iterations=6)
    played = rollouts(run, range(1, 7))
    assert [len(tasks) for tasks in played] == [1] * 6  # every group has signal, so that none is replaced
    assert sorted(task for tasks in played for task in tasks) == sorted(loud)


def test_groups_without_signal_are_replaced_up_to_the_reserve(tmp_path: Path) -> None:
    first = rollouts(MadeUpRun(tmp_path, set(), groups=1, refill=2, iterations=2), [1, 2])
    assert [len(tasks) for tasks in first] == [3, 3]
    assert len({task for tasks in first for task in tasks}) == 6
    # With signal in the second one the third is not played, and comes first in the next iteration.
    second, third = first[0][1], first[0][2]
    again = rollouts(MadeUpRun(tmp_path, {second}, groups=1, refill=2, iterations=2), [1, 2])
    assert again[0] == first[0][:2]
    assert again[1][0] == third


def test_rollouts_lag_behind_within_a_round_only(tmp_path: Path) -> None:
    run: Any = MadeUpRun(tmp_path, set(), groups=1, iterations=2)
    run.config = run.config.model_copy(
        update={"grpo": run.config.grpo.model_copy(update={"staleness": 1}), "rounds": 2}
    )
    optimisation = Optimisation(run, run.config.grpo)
    for iteration in range(1, 5):
        numbers = round_iterations(run.config.grpo, 1 if iteration < 3 else 2)
        asyncio.run(optimisation._rollout(iteration, numbers))
        optimisation._signals[iteration] = {"pick": [0, 1]}
    assert run.acted == [0, 0, 2, 2]
