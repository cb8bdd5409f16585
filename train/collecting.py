"""The collect phase of a round, and which rollouts memory and table learn from in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from train.config import CollectConfig, Config
from train.curriculum import iteration_tasks
from train.metrics import summarise
from train.optimise import iteration_phase, round_iterations
from train.run import Run, episode_file, group_jobs
from train.trajectory import Episode, read_episodes
from train.warm import REJECTION


def collect_phase(round: int) -> str:
    return f"collect-{round:04d}"


def collects(config: Config, round: int) -> bool:
    """Whether ``round`` has rollouts of its own for memory and table: where no optimisation left any."""
    return config.collect is not None and (config.grpo is None or round == 1)


def sources(config: Config, round: int) -> list[str]:
    """The phases whose rollouts memory and table learn from in ``round``: each rollout is learnt from once.

    The last round's optimisation is learnt from by no further round.
    """
    found = [REJECTION] if config.rejection is not None and round == 1 else []
    if collects(config, round):
        found.append(collect_phase(round))
    if config.grpo is not None and round > 1:
        found += [iteration_phase(number) for number in round_iterations(config.grpo, round - 1)]
    return found


def played_in(config: Config, round: int) -> list[str]:
    """The phases of ``round`` in which the policy plays training episodes."""
    found = [REJECTION] if config.rejection is not None and round == 1 else []
    if collects(config, round):
        found.append(collect_phase(round))
    if config.grpo is not None:
        found += [iteration_phase(number) for number in round_iterations(config.grpo, round)]
    return found


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
