"""``saga train``: evaluate, warm start, policy optimisation, evaluate; journalled, so that a killed run goes on."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.base import Task
from envs.pool import EnvPool
from train.adapters import CONFIG_FILE, adapter_hash
from train.advantages import has_signal, token_advantages
from train.agent import Job
from train.config import Config, ConfigError, FineTuneConfig, GrpoConfig, RejectionConfig, WarmStartConfig
from train.curriculum import iteration_tasks, rate_share, step_cap, total_signal
from train.demonstrations import DemonstrationPlayer
from train.evaluate import check_held_out, evaluate
from train.files import write_json
from train.grpo import make_batch
from train.learner import Learner
from train.memory import episode_ledger
from train.metrics import summarise
from train.policy import Policy
from train.preflight import JOURNAL, Journal
from train.processes import Processes
from train.progress import progress
from train.report import closing_table, report_text
from train.rollouts import collect, env_pool
from train.rows import Row, rows_of
from train.sft import optimiser_batches
from train.tracking import Tracker
from train.trajectory import Episode


def train(config: Config, folder: Path, sets: dict[str, list[Task]], console: Console) -> None:
    """Run ``config`` to its end in ``folder`` (see :mod:`train.preflight` for what was checked before).

    In a job of several processes rank 0 runs it, and the others :func:`follow`.
    """
    learner = Learner(config, folder, Processes())
    try:
        asyncio.run(_Run(config, folder, sets, console, learner).run())
    finally:
        learner.dismiss()


def follow(config: Config) -> None:
    """The part of every process but rank 0: learn with it."""
    Learner(config, config.run.dir / config.run.name, Processes()).follow()


class _Run:
    def __init__(
        self, config: Config, folder: Path, sets: dict[str, list[Task]], console: Console, learner: Learner
    ) -> None:
        self.config = config
        self.folder = folder
        self.sets = sets
        self.console = console
        self.learner = learner
        self.journal = Journal(folder / JOURNAL)
        self.tracker = Tracker(folder, config.tracking, config.model_dump(mode="json"))
        self.evals: dict[str, dict[str, Any]] = {}

    async def run(self) -> None:
        config = self.config
        if config.lora.start is not None and not self.journal.done("start"):
            self._copy_start(config.lora.start)
        self.adapter: str | None = self.journal.last("adapter")
        """Folder of the newest adapter, in the run's folder."""
        learns = bool(config.warm_start or config.rejection or config.grpo)
        adapter = self.folder / self.adapter if self.adapter else None
        self.policy = Policy(config, adapter=adapter, trainable=learns, folder=self.folder)
        try:
            if self.policy.memory is not None:
                check_held_out(self.policy.memory.provenance, self.sets[config.eval.tasks], config.eval.tasks)
            async with env_pool(config) as pool:
                self.pool = pool
                await self.policy.ready()
                if config.eval.at_start:
                    await self._evaluate("eval-start")
                if learns:
                    await self._open_learner(adapter)
                if config.warm_start:
                    await self._warm_start(config.warm_start)
                    await self._evaluate("eval-warm")
                if config.rejection:
                    await self._reject(config.rejection)
                    await self._evaluate("eval-rejection")
                if config.grpo:
                    await self._optimise(config.grpo)
                    await self._evaluate("eval-final")
        finally:
            await self.policy.close()
            self.tracker.close()
        self._finish()

    def _copy_start(self, start: Path) -> None:
        """The adapter to go on from becomes version 0 of this run."""
        folder = self.folder / "adapters" / _version(0)
        if not (start / CONFIG_FILE).is_file():
            raise ConfigError(f"lora.start: {start} holds no {CONFIG_FILE}; give a folder that `saga train` wrote")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        self.journal.finish("start", adapter=f"adapters/{_version(0)}")

    async def _open_learner(self, adapter: Path | None) -> None:
        if adapter is None:
            await self.policy.start_adapter()
        self.learner.model, self.learner.tokenizer = self.policy.model, self.policy.tokenizer
        await asyncio.to_thread(self.learner.lead, "open", adapter)

    @asynccontextmanager
    async def _pool_with(self, max_steps: int) -> AsyncIterator[EnvPool]:
        """The run's pool, or another one when the step cap differs."""
        if max_steps == self.config.env.max_steps:
            yield self.pool
        else:
            async with env_pool(self.config, max_steps) as pool:
                yield pool

    async def _evaluate(self, phase: str) -> None:
        file = self.folder / "evals" / f"{phase}.json"
        if self.journal.done(phase):
            self.evals[phase] = json.loads(file.read_text())
            return
        config, policy = self.config, self.policy
        trained = policy.adapter != "base"
        result = await evaluate(
            self.pool,
            lambda job: policy.player(job, config.eval.temperature),
            self.sets[config.eval.tasks],
            config,
            phase=phase,
            folder=self.folder,
            agent="policy",
            adapter=policy.adapter,
            dtype=policy.dtype,
            memory=policy.memory,
            states=policy.states,
            adapter_hash=adapter_hash(self.folder / "adapters" / policy.adapter) if trained else "",
        )
        self.evals[phase] = result
        metrics = result["metrics"]
        flat = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        self.tracker.log(len(self.evals), phase, **flat)
        low, high = metrics["success_interval"]
        self._say(f"{phase}: success {metrics['success']:.1%} ({low:.1%} – {high:.1%})")
        self.journal.finish(phase)

    async def _warm_start(self, warm: WarmStartConfig) -> None:
        if self.journal.done("warm-start"):
            return
        config, policy = self.config, self.policy
        tasks = self.sets[warm.tasks]
        count = min(warm.episodes, len(tasks))
        chosen = random.Random(f"{config.run.seed}/demonstrations").sample(tasks, count)
        jobs = [Job(f"demos/{number:04d}", "demos", task, 0) for number, task in enumerate(chosen)]
        with_mistakes = round(warm.recovery_share * count)
        recovery = {job.id for job in jobs[:with_mistakes]}
        max_steps = 2 * config.env.max_steps  # inserted mistakes cost steps too
        async with env_pool(self.config, max_steps) as pool:
            episodes = await collect(
                pool,
                lambda job: DemonstrationPlayer(
                    policy.codec, job, config.agent, recovery=job.id in recovery, run_seed=config.run.seed
                ),
                jobs,
                max_steps=max_steps,
                concurrency=config.agent.concurrency,
                file=self.folder / "episodes" / "demos.jsonl.gz",
                description="demonstrations",
            )
        won = [episode for episode in episodes if episode.won]
        if not won:
            raise ConfigError(f"warm_start.tasks {warm.tasks!r}: the expert won none of {count} episodes; check env")
        rows = [row for episode in won for row in rows_of(episode)]
        self.tracker.log(0, "demos", episodes=count, won=len(won), rows=len(rows))
        await self._fine_tune("warm start", rows, warm, f"{len(won)} demonstrations")
        await self._new_version(self._warm_number)
        self.journal.finish("warm-start", adapter=self.adapter)

    async def _reject(self, settings: RejectionConfig) -> None:
        """Rejection-sampling fine-tuning: learn from the policy's own successes."""
        if self.journal.done("rejection"):
            return
        config = self.config
        await self._first_version()
        tasks = self.sets[settings.tasks]
        chosen = random.Random(f"{config.run.seed}/rejection").sample(tasks, min(settings.episodes, len(tasks)))
        jobs = _group_jobs("rejection", chosen, settings.samples, 0)
        groups = await self._play(jobs, 0, len(jobs), settings.temperature, config.env.max_steps)
        kept = [episode for group in groups for episode in successes(group, settings.keep)]
        played = [episode for group in groups for episode in group]
        summary = summarise(played)
        self.tracker.log(0, "rejection-rollouts", success=summary["success"], episodes=len(played), kept=len(kept))
        if not kept:
            raise ConfigError(
                f"rejection.tasks {settings.tasks!r}: the policy won none of {len(played)} episodes; warm it up more "
                "or choose easier tasks"
            )
        rows = [row for episode in kept for row in rows_of(episode)]
        await self._fine_tune("rejection", rows, settings, f"{len(kept)} own successes of {len(played)} episodes")
        await self._new_version(1)
        self.journal.finish("rejection", adapter=self.adapter)

    async def _fine_tune(self, name: str, rows: list[Row], settings: FineTuneConfig, source: str) -> None:
        lengths = [len(row) for row in rows]
        steps = len(optimiser_batches(lengths, settings.epochs, settings.tokens_per_batch, self.config.run.seed))
        with progress(steps, name) as bar:

            def log(step: int, metrics: dict[str, float]) -> None:
                self.tracker.log(step, name.replace(" ", "-"), **metrics)
                bar.advance(loss=metrics["loss"], tokens_per_second=metrics["tokens_per_second"])

            self.learner.on_step = log
            figures = await asyncio.to_thread(self.learner.lead, "fine_tune", rows, settings)
        self._say(
            f"{name}: {source}, {figures['steps']} steps, {figures['tokens']} tokens, "
            f"loss {figures['first_loss']:.2f} -> {figures['loss']:.2f}, {figures['seconds']:.0f} s"
        )

    async def _optimise(self, grpo: GrpoConfig) -> None:
        await self._first_version()
        state = self.journal.last("trainer")
        await asyncio.to_thread(self.learner.lead, "start_optimisation", self.folder / state if state else None)
        following: asyncio.Task[tuple[list[list[Episode]], float]] | None = None
        ended = time.perf_counter()
        try:
            for iteration in range(1, grpo.iterations + 1):
                phase = _phase(iteration)
                if self.journal.done(phase):
                    continue
                groups, rollout_seconds = await (following or self._rollout(grpo, iteration))
                following = None
                if self.config.staleness and iteration < grpo.iterations:
                    following = asyncio.create_task(self._rollout(grpo, iteration + 1))
                batch = make_batch(groups, grpo, self.config.env.max_steps * self.config.agent.max_new_tokens)
                rate = grpo.learning_rate * rate_share(grpo.schedule, iteration, grpo.iterations)
                metrics = await asyncio.to_thread(self.learner.lead, "update", batch, rate)
                timing = {
                    "learning_rate": rate,
                    "rollout_seconds": rollout_seconds,
                    "iteration_seconds": time.perf_counter() - ended,
                }
                ended = time.perf_counter()
                self._log_iteration(grpo, iteration, groups, metrics | timing)
                await self._save_version(self._number(iteration))
                kept = self.folder / "state" / phase
                await asyncio.to_thread(self.learner.lead, "save_state", kept)
                signal = _signal(groups, grpo)
                self.journal.finish(phase, adapter=self.adapter, trainer=f"state/{phase}", signal=signal)
                self._drop_outdated(self._number(iteration))
                if state:
                    shutil.rmtree(self.folder / state, ignore_errors=True)
                state = f"state/{phase}"
        finally:
            if following is not None:
                following.cancel()
        await self._act_with(self._number(grpo.iterations))

    async def _rollout(self, grpo: GrpoConfig, iteration: int) -> tuple[list[list[Episode]], float]:
        """The groups of an iteration, all played by one adapter (the newest but ``staleness``), and the seconds."""
        seen = iteration - 1 - self.config.staleness
        await self._act_with(self._number(max(0, seen)))
        started = time.perf_counter()
        signal = total_signal(self.journal.left(_phase(i))["signal"] for i in range(1, seen + 1))
        tasks = iteration_tasks(
            self.sets[grpo.tasks],
            grpo.groups + grpo.refill,
            iteration,
            self.config.run.seed,
            prefer_signal=grpo.prefer_signal,
            signal=signal,
        )
        cap = step_cap(grpo.max_steps, iteration, grpo.iterations, self.config.env.max_steps)
        jobs = _group_jobs(_phase(iteration), tasks, grpo.group_size, iteration)
        groups: list[list[Episode]] = []
        missing = grpo.groups
        while missing and len(groups) < len(jobs):
            groups += await self._play(jobs, len(groups), missing, grpo.temperature, cap)
            loud = sum(has_signal(token_advantages(_sound(group), grpo)) for group in groups)
            missing = grpo.groups - loud if grpo.refill else 0
        return groups, time.perf_counter() - started

    async def _play(
        self, groups: list[list[Job]], first: int, count: int, temperature: float, max_steps: int
    ) -> list[list[Episode]]:
        """The episodes of ``count`` of the phase's ``groups``, from number ``first`` on."""
        wanted = groups[first : first + count]
        phase = groups[0][0].phase
        async with self._pool_with(max_steps) as pool:
            episodes = await collect(
                pool,
                lambda job: self.policy.player(job, temperature, training=True),
                [job for group in wanted for job in group],
                max_steps=max_steps,
                concurrency=self.config.agent.concurrency,
                file=self.folder / "episodes" / f"{phase}.jsonl.gz",
                description=phase,
                others=[job for group in (*groups[:first], *groups[first + count :]) for job in group],
            )
        if self.policy.memory is not None:
            self.policy.memory.store.credit(
                [entry for one in episodes for entry in episode_ledger(one, self.config.run.name)]
            )
        played = iter(episodes)
        return [[next(played) for _ in group] for group in wanted]

    def _number(self, iteration: int) -> int:
        """The adapter version that an iteration ends with; iteration 0: the one that GRPO starts from."""
        return iteration + self._warm_number + (1 if self.config.rejection else 0)

    @property
    def _warm_number(self) -> int:
        """The version that a warm start ends with, or that stands in its place: 0 is the adapter of ``lora.start``."""
        return int(self.config.lora.start is not None and self.config.warm_start is not None)

    async def _first_version(self) -> None:
        """Without a warm start the fresh adapter is version 0."""
        if self.adapter is None:
            await self._new_version(0)

    async def _new_version(self, number: int) -> None:
        """Save the adapter under the next version and generate with it."""
        await self._save_version(number)
        await self._act_with(number)

    async def _save_version(self, number: int) -> None:
        self.adapter = f"adapters/{_version(number)}"
        folder = self.folder / self.adapter
        shutil.rmtree(folder, ignore_errors=True)  # left by a kill between saving and journalling
        await asyncio.to_thread(self.learner.lead, "save_adapter", folder)

    def _drop_outdated(self, number: int) -> None:
        """Delete the version that is too old to be kept, once the journal names ``number``."""
        outdated = number - max(self.config.run.keep_adapters, self.config.staleness + 1)
        if outdated > 0:
            shutil.rmtree(self.folder / "adapters" / _version(outdated), ignore_errors=True)

    async def _act_with(self, number: int) -> None:
        if self.policy.adapter != _version(number):
            await self.policy.activate(self.folder / "adapters" / _version(number))

    def _log_iteration(
        self, grpo: GrpoConfig, iteration: int, groups: list[list[Episode]], metrics: dict[str, float]
    ) -> None:
        episodes = [episode for group in groups for episode in group]
        summary = summarise(episodes)
        metrics = metrics | {
            "staleness": min(iteration - 1, self.config.staleness),
            **{
                key: summary[key]
                for key in ("episodes", "success", "score", "steps", "invalid_rate", "repeated_rate", "faults")
            },
        }
        self.tracker.log(iteration, _phase(iteration), **metrics)
        self.tracker.table("rollouts", [_sampled(episode) for episode in episodes[:: max(1, len(episodes) // 8)]])
        self._say(
            f"{_phase(iteration)}: success {metrics['success']:.1%}, invalid actions {metrics['invalid_rate']:.1%}, "
            f"{metrics['zero_signal_groups']:.0f} of {metrics['groups']:.0f} groups without signal, "
            f"rollout {metrics['rollout_seconds']:.0f} s, update {metrics.get('update_seconds', 0):.0f} s"
        )
        if metrics.get("sampler_mean_difference", 0.0) > grpo.mismatch_warning:
            self._say(
                f"warning: {_phase(iteration)}: the sampler's log-probabilities differ from the trainer's by "
                f"{metrics['sampler_mean_difference']:.3f} nats on average (grpo.mismatch_warning "
                f"{grpo.mismatch_warning}); check that both have the same dtype and the same adapter"
            )

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _finish(self) -> None:
        evals = [f"evals/{phase}.json" for phase in self.evals]
        write_json(self.folder / "result.json", {"adapter": self.adapter, "evals": evals})
        (self.folder / "report.md").write_text(report_text(self.config, self.folder, self.evals, self.adapter))
        self.console.print(closing_table(self.evals))
        for label, path in (
            ("adapter", self.adapter),
            ("report", "report.md"),
            ("metrics", "metrics.jsonl"),
            ("episodes", "episodes/"),
            ("evaluations", "evals/"),
        ):
            if path:
                self._say(f"{label:12} {self.folder / path}")


def _group_jobs(phase: str, tasks: list[Task], group_size: int, seed: int) -> list[list[Job]]:
    """``group_size`` episodes of each task, all with the same start."""
    return [
        [
            Job(f"{phase}/{group:03d}-{rollout}", phase, task, seed, f"{phase}/{group:03d}")
            for rollout in range(group_size)
        ]
        for group, task in enumerate(tasks)
    ]


def successes(group: list[Episode], keep: int) -> list[Episode]:
    """The ``keep`` shortest won episodes of a group (ties: the earlier one)."""
    return sorted((episode for episode in group if episode.won), key=lambda episode: len(episode.steps))[:keep]


def _phase(iteration: int) -> str:
    return f"grpo-{iteration:04d}"


def _version(number: int) -> str:
    return f"policy-v{number:04d}"


def _sound(group: list[Episode]) -> list[Episode]:
    return [episode for episode in group if episode.status == "ok"]


def _signal(groups: list[list[Episode]], grpo: GrpoConfig) -> dict[str, list[int]]:
    """Per task type: groups with signal, groups played (see :mod:`train.curriculum`)."""
    return total_signal(
        {group[0].task_type: [int(has_signal(token_advantages(_sound(group), grpo))), 1]} for group in groups
    )


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
