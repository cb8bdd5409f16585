"""A world of one step and an agent that wins with a chance known for each arm and item: effects that are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from envs.base import StepResult, Task
from train.agent import Job, Turn
from train.chat import ModelLost
from train.config import Config
from train.trajectory import Context

Chance = Callable[[Config, Task], float]


class Table:
    """Stands for a pool, and for its only kind of session: the action "win" wins, any other loses."""

    expert_steps = 1
    first = StepResult("Heads or tails?", goal="Win.")

    def expect(self, pairs: Sequence[tuple[Task, int]]) -> None: ...

    async def open(self, task: Task, seed: int) -> Table:
        return self

    async def step(self, action: str) -> StepResult:
        won = action == "win"
        return replace(self.first, observation=action, score=float(won), done=True, won=won)

    async def close(self) -> None: ...


class Gambler:
    """Plays the arms (:class:`train.ablate.Actor`). ``stop_after``: so many episodes, then its model is lost."""

    adapter, dtype, memory, states = "base", "float32", None, None
    agent, model = "policy", "gambler"

    def __init__(self, chance: Chance, *, stop_after: int | None = None) -> None:
        self._chance = chance
        self._left = stop_after
        self.config: Config | None = None
        self.jobs: list[Job] = []

    def adopt(self, config: Config) -> None:
        self.config = config

    def player(self, job: Job, temperature: float) -> _Hand:
        if self._left is not None:
            if not self._left:
                raise ModelLost("the server died")
            self._left -= 1
        self.jobs.append(job)
        assert self.config is not None
        return _Hand(self._chance(self.config, job.task), f"{self.config.run.seed}/{job.id}")


class _Hand:
    agent, model, adapter, memory = "policy", "gambler", "base", None

    def __init__(self, chance: float, key: str) -> None:
        self._wins = random.Random(key).random() < chance

    async def act(self, session: Any, result: StepResult, step: int) -> Turn:
        action = "win" if self._wins else "lose"
        return Turn(f"Action: {action}", None, action, tokens_in=10, tokens_out=3)

    def contexts(self) -> list[Context]:
        return []

    def release(self) -> None: ...
