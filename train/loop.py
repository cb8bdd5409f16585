"""``saga train``: evaluate, warm start, then rounds of play, knowledge and policy optimisation; journalled, so that a
killed run goes on where it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.base import Task
from train.collecting import collect_round
from train.config import Config
from train.evaluate import check_held_out
from train.evaluation_phase import evaluate_phase
from train.files import write_json
from train.knowledge import Knowledge
from train.learner import Learner
from train.learning import gain_knowledge
from train.optimise import Optimisation
from train.policy import Policy
from train.preflight import JOURNAL, Journal
from train.processes import Processes
from train.report import closing_table, write_report
from train.rollouts import env_pool
from train.round_report import close_round
from train.run import Run
from train.schedule import collects, has_knowledge, has_rounds, round_evaluation, round_phase, trains
from train.tracking import Tracker
from train.versions import Versions, copy_start
from train.warm import reject, warm_start


def train(config: Config, folder: Path, sets: dict[str, list[Task]], console: Console) -> None:
    """Run ``config`` to its end in ``folder`` (see :mod:`train.preflight` for what was checked before).

    In a job of several processes rank 0 runs it, and the others :func:`follow`.
    """
    learner = Learner(config, folder, Processes())
    try:
        asyncio.run(_train(config, folder, sets, console, learner))
    finally:
        learner.dismiss()


def follow(config: Config) -> None:
    """The part of every process but rank 0: learn with it."""
    Learner(config, config.run.dir / config.run.name, Processes()).follow()


async def _train(config: Config, folder: Path, sets: dict[str, list[Task]], console: Console, learner: Learner) -> None:
    journal = Journal(folder / JOURNAL)
    tracker = Tracker(folder, config.tracking, config.model_dump(mode="json"))
    try:
        if config.lora.start is not None and not journal.done("start"):
            journal.finish("start", adapter=copy_start(config.lora.start, folder))
        newest: str | None = journal.last("adapter")
        adapter = folder / newest if newest else None
        knowledge = None
        if has_knowledge(config):
            knowledge = Knowledge(config, folder, journal, finished=journal.done(round_phase(config.rounds)))
        try:
            # What a run learns by itself guides the policy round by round; a memory that stays as it is, always.
            own = config if knowledge is None else config.model_copy(update={"memory": None, "samem": None})
            policy = Policy(own, adapter=adapter, trainable=trains(config), folder=folder)
            try:
                versions = Versions(config, folder, learner, policy, newest)
                async with env_pool(config) as pool:
                    await policy.ready()
                    run = Run(
                        config, folder, sets, console, journal, tracker, learner, policy, versions, pool, knowledge
                    )
                    evaluations = await _phases(run, adapter)
            finally:
                await policy.close()
        finally:
            if knowledge is not None:
                knowledge.close()
    finally:
        tracker.close()
    _finish(run, evaluations)


async def _phases(run: Run, adapter: Path | None) -> dict[str, dict[str, Any]]:
    """All phases in order; the evaluations' results by phase."""
    config, policy = run.config, run.policy
    await run.take_up_knowledge()
    if policy.memory is not None:
        check_held_out(policy.memory.provenance, run.sets[config.eval.tasks], config.eval.tasks)
    evaluations: dict[str, dict[str, Any]] = {}
    if config.eval.at_start:
        evaluations |= await evaluate_phase(run, "eval-start")
    if trains(config):
        await _open_learner(run, adapter)
    if config.warm_start:
        await warm_start(run, config.warm_start)
        evaluations |= await evaluate_phase(run, "eval-warm")
    if config.rejection:
        await reject(run, config.rejection)
        evaluations |= await evaluate_phase(run, "eval-rejection")
    if has_rounds(config):
        optimisation = Optimisation(run, config.grpo) if config.grpo else None
        for round in range(1, config.rounds + 1):
            evaluations |= await _round(run, optimisation, round)
    return evaluations


async def _open_learner(run: Run, adapter: Path | None) -> None:
    if adapter is None:
        await run.policy.start_adapter()
    run.learner.model, run.learner.tokenizer = run.policy.model, run.policy.tokenizer
    await asyncio.to_thread(run.learner.lead, "open", adapter)


async def _round(run: Run, optimisation: Optimisation | None, round: int) -> dict[str, dict[str, Any]]:
    """Collect, learn, distil, audit and validate, optimise, evaluate, and close the round with a checkpoint."""
    evaluation = round_evaluation(run.config, round)
    if run.journal.done(round_phase(round)):
        return await evaluate_phase(run, evaluation)  # reads what it found
    if run.config.collect and collects(run.config, round):
        await run.take_up_knowledge()
        await collect_round(run, run.config.collect, round)
    if run.knowledge is not None:
        await gain_knowledge(run, run.knowledge, round)
        await run.take_up_knowledge()
    if optimisation is not None:
        await optimisation.optimise(round)
    found = await evaluate_phase(run, evaluation)
    close_round(run, round)
    return found


def _finish(run: Run, evaluations: dict[str, dict[str, Any]]) -> None:
    config, folder, adapter = run.config, run.folder, run.versions.newest
    files = [f"evals/{phase}.json" for phase in evaluations]
    write_json(folder / "result.json", {"adapter": adapter, "evals": files})
    run.console.print(closing_table(config, evaluations))
    report = write_report([folder])
    for label, path in (
        ("adapter", adapter),
        ("memory", "memory.db" if run.knowledge is not None else None),
        ("report", report.relative_to(folder)),
        ("metrics", "metrics.jsonl"),
        ("episodes", "episodes/"),
        ("evaluations", "evals/"),
    ):
        if path:
            run.say(f"{label:12} {folder / path}")
