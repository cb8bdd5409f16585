"""What the phases of a run share: its parts, its journal, and playing many episodes with the policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.base import Task
from envs.pool import EnvPool
from train.agent import Job
from train.config import Config
from train.knowledge import Knowledge
from train.learner import Learner
from train.policy import Policy
from train.preflight import Journal
from train.rollouts import collect, env_pool
from train.tracking import Tracker
from train.trajectory import Episode
from train.versions import Versions


@dataclass
class Run:
    """A run in progress. ``knowledge``: None where it keeps no memory of its own."""

    config: Config
    folder: Path
    sets: dict[str, list[Task]]
    console: Console
    journal: Journal
    tracker: Tracker
    learner: Learner
    policy: Policy
    versions: Versions
    pool: EnvPool
    knowledge: Knowledge | None

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def finish(self, phase: str, **left: Any) -> None:
        """Journal a finished phase with what it left, and the adapter, memory and table that there are at its end."""
        point: dict[str, Any] = {"adapter": self.versions.newest} if self.versions.newest else {}
        if self.knowledge is not None:
            point |= self.knowledge.names
        self.journal.finish(phase, **point, **left)

    def finish_learning(self, phase: str, **left: Any) -> None:
        """The same for a phase that changed memory or table: a copy of both is kept until the next such phase."""
        assert self.knowledge is not None
        before = self.journal.last("store")
        kept = self.knowledge.keep(phase)
        self.finish(phase, store=kept, **left)
        if before and before != kept:
            (self.folder / before).unlink(missing_ok=True)

    async def take_up_knowledge(self) -> None:
        """Let the policy be guided by memory and table as they are now, if they have changed."""
        if self.knowledge is not None and self.knowledge.fresh:
            self.policy.guide_by(*self.knowledge.guides())

    @asynccontextmanager
    async def pool_with(self, max_steps: int) -> AsyncIterator[EnvPool]:
        """The run's pool, or another one when the step cap differs."""
        if max_steps == self.config.env.max_steps:
            yield self.pool
        else:
            async with env_pool(self.config, max_steps) as pool:
                yield pool

    async def play(
        self, jobs: Sequence[Job], temperature: float, max_steps: int, others: Sequence[Job] = ()
    ) -> list[Episode]:
        """The policy's training episodes of ``jobs``, of one phase; ``others``: what else its file may hold."""
        phase = jobs[0].phase
        async with self.pool_with(max_steps) as pool:
            return await collect(
                pool,
                lambda job: self.policy.player(job, temperature, training=True),
                jobs,
                max_steps=max_steps,
                concurrency=self.config.agent.concurrency,
                file=episode_file(self.folder, phase),
                description=phase,
                others=others,
            )


def episode_file(folder: Path, phase: str) -> Path:
    """Where a phase's episodes are kept."""
    return folder / "episodes" / f"{phase}.jsonl.gz"


def group_jobs(phase: str, tasks: Sequence[Task], group_size: int, seed: int, free: int = 0) -> list[list[Job]]:
    """``group_size`` episodes of each task, all with the same start; the last ``free`` of them play without memory and
    table, and are a baseline of their own."""
    groups = []
    for number, task in enumerate(tasks):
        name = f"{phase}/{number:03d}"
        kinds = [True] * (group_size - free) + [False] * free
        groups.append(
            [
                Job(f"{name}-{rollout}", phase, task, seed, name if guided else f"{name}-free", guided)
                for rollout, guided in enumerate(kinds)
            ]
        )
    return groups
