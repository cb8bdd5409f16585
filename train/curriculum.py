"""Which tasks an iteration plays."""

from __future__ import annotations

import random

from envs.base import Task


def iteration_tasks(tasks: list[Task], count: int, iteration: int, seed: int) -> list[Task]:
    """``count`` tasks for iteration 1, 2, …: passes over seeded shuffles of ``tasks``, so none recurs before all came.

    The result depends on its arguments alone, so a resumed run draws the same tasks.
    """
    first = (iteration - 1) * count
    chosen = []
    for place in range(first, first + count):
        epoch, index = divmod(place, len(tasks))
        order = random.Random(f"{seed}/tasks/{epoch}").sample(range(len(tasks)), len(tasks))
        chosen.append(tasks[order[index]])
    return chosen
