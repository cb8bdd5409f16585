"""The optimise phase of a round: iterations of rollouts in groups and one update each (GRPO, GiGPO)."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from train.advantages import has_signal, token_advantages
from train.config import GrpoConfig, free_rollouts
from train.curriculum import Signal, iteration_tasks, rate_share, step_cap, total_signal
from train.grpo import make_batch
from train.metrics import summarise
from train.run import Run, group_jobs
from train.schedule import iteration_phase, round_iterations
from train.trajectory import Episode

Group = list[Episode]
"""The rollouts of one task and start in an iteration, with memory first, then those without."""


def baselines(group: Group) -> list[Group]:
    """``group`` in parts that are compared within themselves only: rollouts with memory, and those without."""
    return [list(part) for _, part in groupby(group, key=lambda episode: episode.group)]


def is_loud(group: Group, grpo: GrpoConfig) -> bool:
    """Whether any of the group's baselines has signal."""
    return any(has_signal(token_advantages(_sound(part), grpo)) for part in baselines(group))


def signal_of(groups: Sequence[Group], grpo: GrpoConfig) -> dict[str, list[int]]:
    """Per task type: groups with signal, groups played (see :mod:`train.curriculum`)."""
    return total_signal({group[0].task_type: [int(is_loud(group, grpo)), 1]} for group in groups)


def _sound(group: Group) -> Group:
    return [episode for episode in group if episode.status == "ok"]


class Optimisation:
    """Policy optimisation over all rounds of a run."""

    def __init__(self, run: Run, grpo: GrpoConfig) -> None:
        self._run = run
        self._grpo = grpo
        self._last = run.config.rounds * grpo.iterations
        self._open = False
        self._signals: dict[int, Signal] = {}
        """Of the iterations that were played, also of one whose update is still to come."""

    async def optimise(self, round: int) -> None:
        """The iterations of ``round``, but those that the journal names; then the policy acts with the last version."""
        run, grpo = self._run, self._grpo
        numbers = round_iterations(grpo, round)
        await run.versions.first()
        following: asyncio.Task[tuple[list[Group], float]] | None = None
        ended = time.perf_counter()
        try:
            for iteration in numbers:
                phase = iteration_phase(iteration)
                if run.journal.done(phase):
                    continue
                await self._start()
                groups, rollout_seconds = await (following or self._rollout(iteration, numbers))
                following = None
                self._signals[iteration] = signal_of(groups, grpo)
                if run.config.staleness and iteration < numbers[-1]:
                    following = asyncio.create_task(self._rollout(iteration + 1, numbers))
                parts = [part for group in groups for part in baselines(group)]
                batch = make_batch(parts, grpo, run.config.env.max_steps * run.config.agent.max_new_tokens)
                rate = grpo.learning_rate * rate_share(grpo.schedule, iteration, self._last, grpo.warmup)
                metrics = await asyncio.to_thread(run.learner.lead, "update", batch, rate)
                timing = {
                    "learning_rate": rate,
                    "rollout_seconds": rollout_seconds,
                    "iteration_seconds": time.perf_counter() - ended,
                }
                ended = time.perf_counter()
                self._log(iteration, numbers, groups, metrics | timing)
                await self._keep(iteration)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        await run.versions.act_with(run.versions.after(numbers[-1]))

    async def _start(self) -> None:
        """Make the trainer, once; it goes on from the state that the journal names."""
        if not self._open:
            state = self._run.journal.last("trainer")
            folder = self._run.folder / state if state else None
            await asyncio.to_thread(self._run.learner.lead, "start_optimisation", folder)
            self._open = True

    async def _keep(self, iteration: int) -> None:
        """Save adapter and trainer, name them in the journal, and delete what they replace."""
        run, phase = self._run, iteration_phase(iteration)
        number = run.versions.after(iteration)
        await run.versions.save(number)
        await asyncio.to_thread(run.learner.lead, "save_state", run.folder / "state" / phase)
        before = run.journal.last("trainer")
        run.finish(phase, trainer=f"state/{phase}", signal=self._signals[iteration])
        run.versions.drop_outdated(number)
        if before:
            shutil.rmtree(run.folder / before, ignore_errors=True)

    def _seen(self, iteration: int, numbers: range) -> int:
        """The last iteration whose update the rollouts of ``iteration`` have seen."""
        return max(numbers[0], iteration - self._run.config.staleness) - 1

    def _signal(self, iteration: int) -> Signal:
        if iteration not in self._signals:
            self._signals[iteration] = self._run.journal.left(iteration_phase(iteration))["signal"]
        return self._signals[iteration]

    async def _rollout(self, iteration: int, numbers: range) -> tuple[list[Group], float]:
        """The groups of an iteration, all played by one adapter, and the seconds that took."""
        run, grpo = self._run, self._grpo
        seen = self._seen(iteration, numbers)
        await run.versions.act_with(run.versions.after(seen))
        started = time.perf_counter()
        before = [self._signal(number) for number in range(1, iteration)]
        tasks = iteration_tasks(
            run.sets[grpo.tasks],
            grpo.groups + grpo.refill,
            iteration,
            run.config.run.seed,
            first=sum(played for signal in before for _, played in signal.values()),
            prefer_signal=grpo.prefer_signal,
            signal=total_signal(before[:seen]),
        )
        cap = step_cap(grpo.max_steps, iteration, self._last, run.config.env.max_steps)
        free = free_rollouts(grpo) if run.policy.guided else 0
        jobs = group_jobs(iteration_phase(iteration), tasks, grpo.group_size, iteration, free)
        groups: list[Group] = []
        missing = grpo.groups
        while missing and len(groups) < len(jobs):
            wanted = jobs[len(groups) : len(groups) + missing]
            others = [job for group in jobs if group not in wanted for job in group]
            played = await run.play([job for group in wanted for job in group], grpo.temperature, cap, others)
            episodes = iter(played)
            groups += [[next(episodes) for _ in group] for group in wanted]
            missing = grpo.groups - sum(is_loud(group, grpo) for group in groups) if grpo.refill else 0
        return groups, time.perf_counter() - started

    def _log(self, iteration: int, numbers: range, groups: list[Group], metrics: dict[str, float]) -> None:
        run, phase = self._run, iteration_phase(iteration)
        episodes = [episode for group in groups for episode in group]
        summary = summarise(episodes)
        shown = ("episodes", "success", "score", "steps", "invalid_rate", "repeated_rate", "faults")
        metrics = metrics | {key: summary[key] for key in shown} | _by_condition(episodes)
        metrics["staleness"] = iteration - 1 - self._seen(iteration, numbers)
        run.tracker.log(iteration, phase, **metrics)
        run.tracker.table("rollouts", [_sampled(episode) for episode in episodes[:: max(1, len(episodes) // 8)]])
        run.say(
            f"{phase}: success {metrics['success']:.1%}, invalid actions {metrics['invalid_rate']:.1%}, "
            f"{metrics['zero_signal_groups']:.0f} of {metrics['groups']:.0f} groups without signal, "
            f"rollout {metrics['rollout_seconds']:.0f} s, update {metrics.get('update_seconds', 0):.0f} s"
        )
        if metrics.get("sampler_mean_difference", 0.0) > self._grpo.mismatch_warning:
            run.say(
                f"warning: {phase}: the sampler's log-probabilities differ from the trainer's by "
                f"{metrics['sampler_mean_difference']:.3f} nats on average (grpo.mismatch_warning "
                f"{self._grpo.mismatch_warning}); check that both have the same dtype and the same adapter"
            )


def _by_condition(episodes: Sequence[Episode]) -> dict[str, float]:
    """Success with and without memory, where both were played."""
    free = [episode for episode in episodes if episode.group.endswith("-free")]
    if not free:
        return {}
    guided = [episode for episode in episodes if not episode.group.endswith("-free")]
    return {"success_guided": summarise(guided)["success"], "success_free": summarise(free)["success"]}


def _sampled(episode: Episode) -> dict[str, Any]:
    return {
        "id": episode.id,
        "task": episode.task,
        "goal": episode.goal,
        "won": episode.won,
        "score": episode.score,
        "steps": len(episode.steps),
        "transcript": "\n".join(f"> {step.action or step.text}\n{step.result}" for step in episode.steps),
    }
