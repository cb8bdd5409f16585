"""Many episodes at once: each at its own pace, each on disk when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from envs.base import EnvFault
from envs.pool import EnvPool
from train.agent import Job, Player, play_episode
from train.chat import ModelFault
from train.config import Config
from train.progress import progress
from train.trajectory import Episode, TrajectoryError, append_episode, read_episodes

ATTEMPTS = 2
"""How often an episode that a fault ended is played before the fault stands."""

FAULTS_IN_A_ROW = 8
"""So many faults before the first sound episode mean that nothing works: the collection stops."""


def env_pool(config: Config, max_steps: int | None = None) -> EnvPool:
    """The processes that play ``config``'s world; ``max_steps``: None: as it says."""
    return EnvPool(
        config.env.model_dump(mode="json") | {"max_steps": max_steps or config.env.max_steps},
        **config.pool.model_dump(),
    )


async def collect(
    pool: EnvPool,
    make_player: Callable[[Job], Player],
    jobs: Sequence[Job],
    *,
    max_steps: int,
    concurrency: int,
    file: Path,
    description: str,
    others: Sequence[Job] = (),
) -> list[Episode]:
    """Play ``jobs``, at most ``concurrency`` at a time, and return their episodes in the order of ``jobs``.

    Episodes that ``file`` already holds are not played again, so an interrupted collection goes on where it was.
    An episode that a fault of world or model ended is played once more; then the fault is its status.
    ``others``: jobs that are not played now but whose episodes ``file`` may hold.

    Raises:
        TrajectoryError: ``file`` holds an episode of another task under the id of a job.
        TaskError: a task that the world lacks, or whose content differs from its manifest.
        EnvFault, ModelFault: the first episodes (eight, or all) ended by faults; they are not recorded.
        ModelLost: the model is gone; what was played is recorded.
    """
    finished = finished_episodes(file, [*jobs, *others])
    done = {job.id: finished[job.id] for job in jobs if job.id in finished}
    todo = [job for job in jobs if job.id not in done]
    pool.expect([(job.task, job.seed) for job in todo])
    gate = asyncio.Semaphore(concurrency)
    faulty: list[Episode] = []

    def record(episode: Episode) -> None:
        if episode.status != "ok" and not done:
            faulty.append(episode)
            if len(faulty) >= min(FAULTS_IN_A_ROW, len(todo)):
                fault = EnvFault if episode.status == "env_error" else ModelFault
                raise fault(f"the first {len(faulty)} episodes of {file.name} all failed; last: {episode.error}")
            return
        for item in (*faulty, episode):
            append_episode(file, item)
            done[item.id] = item
        faulty.clear()

    async def play(job: Job) -> None:
        async with gate:
            for attempt in range(ATTEMPTS):
                episode = await play_episode(pool, make_player(job), job, max_steps)
                if episode.status == "ok" or attempt == ATTEMPTS - 1:
                    break
            record(episode)
            count = max(1, len(done))
            bar.advance(
                success=sum(item.won for item in done.values()) / count,
                steps=sum(len(item.steps) for item in done.values()) / count,
            )

    with progress(len(todo), description) as bar:
        try:
            async with asyncio.TaskGroup() as group:
                for job in todo:
                    group.create_task(play(job))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [done[job.id] for job in jobs]


def finished_episodes(file: Path, jobs: Sequence[Job]) -> dict[str, Episode]:
    """The episodes of ``jobs`` that ``file`` holds, by id; a torn last record is cut off."""
    if not file.exists():
        return {}
    wanted = {job.id: job for job in jobs}
    done: dict[str, Episode] = {}
    for episode in read_episodes(file, repair=True):
        job = wanted.get(episode.id)
        if job is None or (episode.task, episode.seed) != (job.task.id, job.seed):
            expected = f"{job.task.id} with seed {job.seed}" if job else "nothing of that name"
            raise TrajectoryError(
                f"{file}: episode {episode.id} plays {episode.task} with seed {episode.seed}, this run expects "
                f"{expected}; the configuration changed: use another run name"
            )
        done[episode.id] = episode
    return done
