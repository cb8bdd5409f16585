"""Supervised fine-tuning in a run: the warm start on expert episodes, and rejection sampling on own ones."""

from __future__ import annotations

import asyncio
import random

from train.agent import Job
from train.config import ConfigError, FineTuneConfig, RejectionConfig, WarmStartConfig
from train.demonstrations import DemonstrationPlayer
from train.metrics import summarise
from train.progress import progress
from train.rollouts import collect, env_pool
from train.rows import Row, rows_of
from train.run import Run, episode_file, group_jobs
from train.schedule import REJECTION, WARM_START
from train.sft import optimiser_batches
from train.trajectory import Episode


async def warm_start(run: Run, warm: WarmStartConfig) -> None:
    """Learn from an expert's episodes. Raises ConfigError: it wins none of them."""
    if run.journal.done(WARM_START):
        return
    config, codec = run.config, run.policy.codec
    tasks = run.sets[warm.tasks]
    count = min(warm.episodes, len(tasks))
    chosen = random.Random(f"{config.run.seed}/demonstrations").sample(tasks, count)
    jobs = [Job(f"demos/{number:04d}", "demos", task, 0) for number, task in enumerate(chosen)]
    recovery = {job.id for job in jobs[: round(warm.recovery_share * count)]}
    max_steps = 2 * config.env.max_steps  # inserted mistakes cost steps too
    async with env_pool(config, max_steps) as pool:
        episodes = await collect(
            pool,
            lambda job: DemonstrationPlayer(
                codec, job, config.agent, recovery=job.id in recovery, run_seed=config.run.seed
            ),
            jobs,
            max_steps=max_steps,
            concurrency=config.agent.concurrency,
            file=episode_file(run.folder, "demos"),
            description="demonstrations",
        )
    won = [episode for episode in episodes if episode.won]
    if not won:
        raise ConfigError(f"warm_start.tasks {warm.tasks!r}: the expert won none of {count} episodes; check env")
    rows = [row for episode in won for row in rows_of(episode)]
    run.tracker.log(0, "demos", episodes=count, won=len(won), rows=len(rows))
    await _fine_tune(run, "warm start", rows, warm, f"{len(won)} demonstrations")
    await run.versions.add(run.versions.warm)
    run.finish(WARM_START)


async def reject(run: Run, settings: RejectionConfig) -> None:
    """Rejection-sampling fine-tuning: learn from the policy's own successes. Raises ConfigError: it has none."""
    if run.journal.done(REJECTION):
        return
    config = run.config
    await run.versions.first()
    tasks = run.sets[settings.tasks]
    chosen = random.Random(f"{config.run.seed}/rejection").sample(tasks, min(settings.episodes, len(tasks)))
    groups = group_jobs(REJECTION, chosen, settings.samples, 0)
    jobs = [job for group in groups for job in group]
    played = await run.play(jobs, settings.temperature, config.env.max_steps)
    episodes = iter(played)
    kept = [won for group in groups for won in successes([next(episodes) for _ in group], settings.keep)]
    success = summarise(played)["success"]
    run.tracker.log(0, "rejection-rollouts", success=success, episodes=len(played), kept=len(kept))
    if not kept:
        raise ConfigError(
            f"rejection.tasks {settings.tasks!r}: the policy won none of {len(played)} episodes; warm it up more "
            "or choose easier tasks"
        )
    rows = [row for episode in kept for row in rows_of(episode)]
    await _fine_tune(run, REJECTION, rows, settings, f"{len(kept)} own successes of {len(played)} episodes")
    await run.versions.add(run.versions.after(0))
    run.finish(REJECTION)


def successes(group: list[Episode], keep: int) -> list[Episode]:
    """The ``keep`` shortest won episodes of a group (ties: the earlier one)."""
    return sorted((episode for episode in group if episode.won), key=lambda episode: len(episode.steps))[:keep]


async def _fine_tune(run: Run, name: str, rows: list[Row], settings: FineTuneConfig, source: str) -> None:
    lengths = [len(row) for row in rows]
    steps = len(optimiser_batches(lengths, settings.epochs, settings.tokens_per_batch, run.config.run.seed))
    with progress(steps, name) as bar:

        def log(step: int, metrics: dict[str, float]) -> None:
            run.tracker.log(step, name.replace(" ", "-"), **metrics)
            bar.advance(loss=metrics["loss"], tokens_per_second=metrics["tokens_per_second"])

        run.learner.on_step = log
        figures = await asyncio.to_thread(run.learner.lead, "fine_tune", rows, settings)
    run.say(
        f"{name}: {source}, {figures['steps']} steps, {figures['tokens']} tokens, "
        f"loss {figures['first_loss']:.2f} -> {figures['loss']:.2f}, {figures['seconds']:.0f} s"
    )
