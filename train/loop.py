"""``saga train``: evaluate, warm start, policy optimisation, evaluate; journalled, so that a killed run goes on."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from envs.base import Task
from envs.pool import EnvPool
from train.adapters import adapter_hash
from train.agent import Job
from train.config import Config, ConfigError, GrpoConfig, WarmStartConfig
from train.curriculum import iteration_tasks
from train.demonstrations import DemonstrationPlayer
from train.evaluate import evaluate
from train.files import write_json
from train.grpo import EpisodeGRPOTrainer
from train.metrics import summarise
from train.policy import Policy
from train.preflight import Journal
from train.progress import progress
from train.rollouts import collect
from train.rows import rows_of
from train.sft import optimiser_batches, train_sft
from train.tables import compact_table, percent, success_text
from train.tracking import Tracker
from train.trajectory import Episode

EVALUATIONS = {"eval-start": "untrained", "eval-warm": "after warm start", "eval-final": "after RL"}
"""Phases that evaluate, and their names in the closing table."""


def train(config: Config, folder: Path, sets: dict[str, list[Task]], console: Console) -> None:
    """Run ``config`` to its end in ``folder`` (see :mod:`train.preflight` for what was checked before)."""
    asyncio.run(_Run(config, folder, sets, console).run())


class _Run:
    def __init__(self, config: Config, folder: Path, sets: dict[str, list[Task]], console: Console) -> None:
        self.config = config
        self.folder = folder
        self.sets = sets
        self.console = console
        self.journal = Journal(folder / "journal.json")
        self.tracker = Tracker(folder, config.tracking, config.model_dump(mode="json"))
        self.evals: dict[str, dict[str, Any]] = {}

    async def run(self) -> None:
        config = self.config
        saved = self.journal.last("adapter")
        adapter = self.folder / saved if saved else None
        self.policy = Policy(config, adapter=adapter, trainable=bool(config.warm_start or config.grpo))
        try:
            async with self._env_pool(config.env.max_steps) as pool:
                self.pool = pool
                await self.policy.ready()
                await self._evaluate("eval-start")
                if adapter is None and (config.warm_start or config.grpo):
                    await self.policy.start_adapter()
                if config.warm_start:
                    await self._warm_start(config.warm_start)
                    await self._evaluate("eval-warm")
                if config.grpo:
                    await self._optimise(config.grpo)
                    await self._evaluate("eval-final")
        finally:
            await self.policy.close()
            self.tracker.close()
        self._finish()

    def _env_pool(self, max_steps: int) -> EnvPool:
        pool = self.config.pool
        return EnvPool(
            self.config.env.model_dump(mode="json") | {"max_steps": max_steps},
            workers=pool.workers,
            envs_per_worker=pool.envs_per_worker,
            recycle_after=pool.recycle_after,
            timeout_s=pool.timeout_s,
        )

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
        async with self._env_pool(max_steps) as pool:
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
        steps = len(optimiser_batches([len(row) for row in rows], warm.epochs, warm.tokens_per_batch, config.run.seed))
        with progress(steps, "warm start") as bar:

            def log(step: int, metrics: dict[str, float]) -> None:
                self.tracker.log(step, "warm-start", **metrics)
                bar.advance(loss=metrics["loss"], tokens_per_second=metrics["tokens_per_second"])

            figures = await asyncio.to_thread(
                train_sft,
                policy.model,
                policy.tokenizer,
                rows,
                warm,
                seed=config.run.seed,
                out_dir=self.folder / "sft",
                log=log,
            )
        self._say(
            f"warm start: {len(won)} demonstrations, {figures['steps']} steps, {figures['tokens']} tokens, "
            f"loss {figures['first_loss']:.2f} -> {figures['loss']:.2f}, {figures['seconds']:.0f} s"
        )
        await self._new_version(0)
        self.journal.finish("warm-start", adapter=f"adapters/{policy.adapter}")

    async def _optimise(self, grpo: GrpoConfig) -> None:
        config, policy = self.config, self.policy
        trainer = EpisodeGRPOTrainer(
            policy.model, policy.tokenizer, grpo, out_dir=self.folder / "grpo", seed=config.run.seed
        )
        state = self.journal.last("trainer")
        if state:
            trainer.restore(self.folder / state)
        for iteration in range(1, grpo.iterations + 1):
            phase = f"grpo-{iteration:04d}"
            if self.journal.done(phase):
                continue
            started = time.perf_counter()
            tasks = iteration_tasks(self.sets[grpo.tasks], grpo.groups, iteration, config.run.seed)
            jobs = [
                Job(f"{phase}/{group:03d}-{rollout}", phase, task, seed=iteration, group=f"{phase}/{group:03d}")
                for group, task in enumerate(tasks)
                for rollout in range(grpo.group_size)
            ]
            episodes = await collect(
                self.pool,
                lambda job: policy.player(job, grpo.temperature),
                jobs,
                max_steps=config.env.max_steps,
                concurrency=config.agent.concurrency,
                file=self.folder / "episodes" / f"{phase}.jsonl.gz",
                description=phase,
            )
            rolled = time.perf_counter() - started
            groups = [episodes[start : start + grpo.group_size] for start in range(0, len(episodes), grpo.group_size)]
            metrics = await asyncio.to_thread(trainer.update, groups)
            self._log_iteration(iteration, phase, episodes, {**metrics, "rollout_seconds": rolled})
            await self._new_version(iteration)
            kept = self.folder / "state" / phase
            trainer.save(kept)
            self.journal.finish(phase, adapter=f"adapters/{policy.adapter}", trainer=f"state/{phase}")
            if state:
                shutil.rmtree(self.folder / state, ignore_errors=True)
            state = f"state/{phase}"

    async def _new_version(self, number: int) -> None:
        """Save the adapter under the next version and generate with it."""
        folder = self.folder / "adapters" / f"policy-v{number:04d}"
        shutil.rmtree(folder, ignore_errors=True)  # left by a kill between saving and journalling
        self.policy.save(folder)
        await self.policy.activate(folder)
        outdated = number - self.config.run.keep_adapters
        if outdated > 0:
            shutil.rmtree(folder.with_name(f"policy-v{outdated:04d}"), ignore_errors=True)

    def _log_iteration(self, iteration: int, phase: str, episodes: list[Episode], metrics: dict[str, float]) -> None:
        summary = summarise(episodes)
        metrics = {
            **metrics,
            **{key: summary[key] for key in ("success", "score", "steps", "invalid_rate", "repeated_rate", "faults")},
        }
        self.tracker.log(iteration, phase, **metrics)
        self.tracker.table("rollouts", [_sampled(episode) for episode in episodes[:: max(1, len(episodes) // 8)]])
        self._say(
            f"{phase}: success {metrics['success']:.1%}, invalid actions {metrics['invalid_rate']:.1%}, "
            f"{metrics['zero_signal_groups']:.0f} of {metrics['groups']:.0f} groups without signal, "
            f"rollout {metrics['rollout_seconds']:.0f} s, update {metrics.get('update_seconds', 0):.0f} s"
        )

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _finish(self) -> None:
        final = self.policy.adapter
        adapter = f"adapters/{final}" if final != "base" else None
        evals = [f"evals/{phase}.json" for phase in self.evals]
        write_json(self.folder / "result.json", {"adapter": adapter, "evals": evals})
        (self.folder / "report.md").write_text(report_text(self.config, self.folder, self.evals, adapter))
        self.console.print(closing_table(self.evals))
        for label, path in (
            ("adapter", adapter),
            ("report", "report.md"),
            ("metrics", "metrics.jsonl"),
            ("episodes", "episodes/"),
            ("evaluations", "evals/"),
        ):
            if path:
                self._say(f"{label:12} {self.folder / path}")


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


_CLOSING_COLUMNS = ("policy", "games", "success % (95 %)", "score", "steps", "invalid actions %")


def closing_table(evals: dict[str, dict[str, Any]]) -> Table:
    """The success rates of a run's evaluations, with intervals."""
    table = compact_table("held-out games", _CLOSING_COLUMNS, left=("policy",))
    for row in _closing_rows(evals):
        table.add_row(*row)
    return table


def _closing_rows(evals: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            EVALUATIONS[phase],
            str(result["metrics"]["items"]),
            success_text(result["metrics"]["success"], result["metrics"]["success_interval"]),
            f"{result['metrics']['score']:.3f}",
            f"{result['metrics']['steps']:.1f}",
            percent(result["metrics"]["invalid_rate"]),
        ]
        for phase, result in evals.items()
    ]


def report_text(config: Config, folder: Path, evals: dict[str, dict[str, Any]], adapter: str | None) -> str:
    """``report.md``: what was run, the table of success rates, and success per task type."""
    lines = [f"# {config.run.name}", "", f"Model {config.model.name}, task set {config.eval.tasks}.", ""]
    lines += [f"| {' | '.join(_CLOSING_COLUMNS)} |", f"|{'---|' * len(_CLOSING_COLUMNS)}"]
    lines += [f"| {' | '.join(row)} |" for row in _closing_rows(evals)]
    types = sorted({name for result in evals.values() for name in result["metrics"]["by_type"]})
    lines += ["", "Success by task type:", "", f"| task type | {' | '.join(EVALUATIONS[phase] for phase in evals)} |"]
    lines += [f"|---|{'---|' * len(evals)}"]
    for name in types:
        cells = [f"{result['metrics']['by_type'][name]['success']:.1%}" for result in evals.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if adapter:
        lines += ["", f"Adapter: `{folder / adapter}`"]
    return "\n".join(lines) + "\n"
