"""The episodes of a validation: held-out training tasks played with and without each principle on trial."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from envs.base import Task
from memory.guide import Memory
from memory.records import PrincipleItem
from memory.store import LedgerEntry, Store
from memory.validation import Arm, Plan
from train.agent import Job
from train.memory import bounded_score, episode_ledger
from train.trajectory import Episode

CONTROL = "control"

Play = Callable[[Memory, list[Job]], Awaitable[list[Episode]]]
"""Plays jobs, guided by a memory; returns their episodes in the same order, faults played again once."""


class MakeMemory(Protocol):
    """A memory for one arm: without the principles ``hidden``, and with the one that is ``tried`` ("": none)."""

    def __call__(self, *, hidden: Sequence[str], tried: str) -> Memory: ...


class Trials:
    """Plays the arms of a validation one after the other (see :class:`memory.validation.Experiment`).

    :meth:`credit` tells the ledgers when all are played, so that every arm sees the same memory: an episode with a
    principle on trial counts there as usual, one of the control is an episode without it.

    Args:
        store: takes the credits.
        plan: whose principles are on trial.
        tasks: by id, those of the plan at least.
        round: part of the episodes' names, which are ``validate-<round>/<arm>/<task>-<sample>``.
        run: name of the run, for the ledgers.
    """

    def __init__(
        self,
        store: Store,
        plan: Plan,
        tasks: Mapping[str, Task],
        memory: MakeMemory,
        play: Play,
        *,
        round: int,
        run: str,
    ) -> None:
        self._store = store
        self._trials = {trial.contender.id: set(trial.tasks) for trial in plan.trials}
        self._tasks = tasks
        self._memory = memory
        self._play = play
        self._phase = f"validate-{round}"
        self._run = run
        self._turn = asyncio.Lock()
        self._credits: list[LedgerEntry] = []

    async def run(self, principle: PrincipleItem | None, tasks: Sequence[str], samples: int) -> Arm:
        arm = principle.id if principle is not None else CONTROL
        phase = f"{self._phase}-{arm}"
        jobs = [
            Job(f"{phase}/{number:04d}-{sample}", phase, self._tasks[task], sample)
            for number, task in enumerate(sorted(tasks))
            for sample in range(samples)
        ]
        async with self._turn:
            memory = self._memory(hidden=list(self._trials), tried=principle.id if principle is not None else "")
            episodes = await self._play(memory, jobs)
        self._credits += [entry for episode in episodes for entry in self._entries(episode, arm)]
        scores: dict[str, list[float]] = {}
        for episode in episodes:
            scores.setdefault(episode.task, []).append(bounded_score(episode) or 0.0)
        shown = [arm in _shown(episode) for episode in episodes]
        return Arm(scores, sum(shown) / len(shown))

    def credit(self) -> None:
        """Add what was played to the ledgers; again changes nothing."""
        self._store.credit(self._credits)

    def _entries(self, episode: Episode, arm: str) -> list[LedgerEntry]:
        entries = episode_ledger(episode, self._run)
        if arm == CONTROL:
            name = f"run:{self._run}/{episode.id}"
            on_trial = [id for id, tasks in self._trials.items() if episode.task in tasks]
            entries += [LedgerEntry(item=id, episode=name, outcome=bounded_score(episode)) for id in on_trial]
        return entries


def _shown(episode: Episode) -> set[str]:
    """The items that the episode's prompt held."""
    made = episode.memory.instantiations if episode.memory is not None else ()
    return {one.item for one in made if not one.suppressed}
