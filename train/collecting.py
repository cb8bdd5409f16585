"""The collect phase of a round, and reading what was played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from train.config import CollectConfig
from train.curriculum import iteration_tasks
from train.metrics import summarise
from train.run import Run, episode_file, group_jobs
from train.schedule import collect_phase
from train.trajectory import Episode, read_episodes


def read_phases(folder: Path, phases: Sequence[str]) -> Iterator[Episode]:
    """The finished episodes of ``phases``, in the order of their names, without their tokens."""
    for phase in phases:
        episodes = sorted(read_episodes(episode_file(folder, phase)), key=lambda episode: episode.id)
        for episode in episodes:
            yield episode.model_copy(update={"contexts": []})


async def collect_round(run: Run, settings: CollectConfig, round: int) -> None:
    """Play the round's episodes for memory and table."""
    phase = collect_phase(round)
    if run.journal.done(phase):
        return
    tasks = iteration_tasks(
        run.sets[settings.tasks],
        settings.episodes,
        round,
        run.config.run.seed,
        first=(round - 1) * settings.episodes,
    )
    groups = group_jobs(phase, tasks, settings.samples, round)
    jobs = [job for group in groups for job in group]
    summary = summarise(await run.play(jobs, settings.temperature, run.config.env.max_steps))
    shown = ("episodes", "success", "score", "steps", "invalid_rate", "repeated_rate", "faults")
    run.tracker.log(round, phase, **{key: summary[key] for key in shown})
    run.say(f"{phase}: {summary['episodes']} episodes, success {summary['success']:.1%}")
    run.finish(phase)
