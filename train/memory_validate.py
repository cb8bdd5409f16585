"""``saga memory validate``: principles tried by experiment on held-out training tasks, and what follows from it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.base import Task
from envs.cache import cache_folder
from envs.pool import EnvPool
from envs.tasksets import load_task_set
from memory.embedding import make_embedder
from memory.guide import Memory
from memory.records import PrincipleItem
from memory.schema import memory_url
from memory.store import Store
from memory.validation import (
    Contender,
    Plan,
    Result,
    Trial,
    contenders,
    judge_validation,
    plan_validation,
    record_validation,
    retire_by_ledger,
    run_validation,
)
from train.adapters import adapter_hash
from train.agent import Job
from train.config import Config, ConfigError, MemoryConfig, read_yaml
from train.files import write_json
from train.memory import grammar_of, instantiating_model, predicate_host
from train.memory_show import cut
from train.policy import Policy
from train.preflight import check_engine, hold_folder
from train.rollouts import collect, env_pool
from train.tables import compact_table, percent
from train.target import CONFIG, REQUEST, check_folder, chosen_adapter, configure, run_folder
from train.trajectory import Episode
from train.trials import Trials

PLAN = "plan.json"
RESULT = "validation.json"
DEFAULT_STORE = "memory.db"


@dataclass(frozen=True)
class Validated:
    """What a validation wrote to its file: one record per principle tried, those not tried and those retired."""

    round: int
    task_set: str
    episodes: int
    verdicts: list[dict[str, Any]]
    skipped: list[list[str]]
    retired: list[list[str]]


def validate_target(
    target: str,
    task_set: str,
    overrides: list[str],
    *,
    store: str | None,
    adapter: Path | None,
    round: int | None,
    out: Path | None,
    resume: bool,
) -> None:
    """Try the principles of a memory with ``target`` as the policy, record the verdicts and print them.

    Raises:
        ConfigError: bad target, adapter, override or mode; ``out`` exists without ``resume`` or holds something else.
        MemoryRecordError: no such memory. TaskError: unknown task set or missing data.
    """
    if store is not None or run_folder(target) is None:
        overrides = [f"memory.store={memory_url(store or DEFAULT_STORE)}", *overrides]
    config = configure(target, task_set, overrides, 1)
    settings = _settings(config, target)
    check_engine(config)
    if not re.search(r"/(train|dev)", task_set):
        raise ConfigError(f"--set {task_set}: is for evaluation; a principle is tried on training tasks")
    tasks = load_task_set(task_set, config.env.model_dump(mode="json"))
    _check_held_out(target, config, task_set, tasks)
    adapter = chosen_adapter(target, adapter)
    digest = adapter_hash(adapter) if adapter else ""
    console = Console(highlight=False)
    with Store(str(settings.store), create=False) as opened:
        round = opened.last_round("validation") + 1 if round is None else round
        identity = {"config": config.model_dump(mode="json"), "adapter_hash": digest, "round": round}
        name = f"{Path(target).name}-{task_set}-{round}".replace("/", "-").replace(":", "-")
        folder = out or Path("validations") / name
        check_folder(folder, identity, resume)
        if not (folder / RESULT).exists():
            plan = _plan(opened, config, settings, tasks, round, folder)
            console.print(_told(plan))
            write_json(folder / REQUEST, identity)
            with hold_folder(folder):
                asyncio.run(_validate(config, settings, opened, plan, tasks, task_set, adapter, round, folder))
        show(Validated(**json.loads((folder / RESULT).read_text())), opened, console)
    console.print(f"written to {folder / RESULT}", soft_wrap=True)


def _settings(config: Config, target: str) -> MemoryConfig:
    if config.memory is None:
        raise ConfigError(f"{target}: the run has no memory; name one with --store")
    if config.memory.mode not in ("full", "direct"):
        raise ConfigError(
            f"memory.mode {config.memory.mode!r}: no principle is tried in it; set memory.mode=full or direct"
        )
    return config.memory


def _check_held_out(target: str, config: Config, task_set: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks on which the run evaluates."""
    run = run_folder(target)
    if run is None:
        return
    evaluates = read_yaml(run / CONFIG)["eval"]["tasks"]
    shared = {task.id for task in load_task_set(evaluates, config.env.model_dump(mode="json"))} & {t.id for t in tasks}
    if shared:
        raise ConfigError(
            f"--set {task_set}: shares {len(shared)} tasks with the run's eval.tasks {evaluates!r} (for example "
            f"{min(shared)}); a principle is tried on training tasks"
        )


def make_plan(store: Store, config: Config, settings: MemoryConfig, tasks: Sequence[Task], round: int) -> Plan:
    """Which principles of ``store`` are tried, and on which of ``tasks``."""
    world = config.env.name
    rests_on = {task for where, task in store.provenance() if where == world}
    found = contenders(store, world, grammar_of(world))
    return plan_validation(found, {task.id: task.type for task in tasks}, settings.validation, round, rests_on)


def _plan(
    store: Store, config: Config, settings: MemoryConfig, tasks: Sequence[Task], round: int, folder: Path
) -> Plan:
    """The plan of this validation, kept in ``folder``: statuses and ledgers, on which it rests, change with it."""
    file = folder / PLAN
    if file.exists():
        return _read_plan(json.loads(file.read_text()), store)
    plan = make_plan(store, config, settings, tasks, round)
    write_json(file, asdict(replace(plan, trials=())) | {"trials": [_record(trial) for trial in plan.trials]})
    return plan


def _record(trial: Trial) -> dict[str, Any]:
    """A trial as JSON; the principle itself is in the store."""
    kept = vars(trial.contender) | {"tasks": trial.tasks}
    del kept["principle"]
    return kept


def _read_plan(kept: dict[str, Any], store: Store) -> Plan:
    trials = []
    for trial in kept["trials"]:
        tasks = tuple(trial.pop("tasks"))
        item = store.item(trial["id"]).item
        assert isinstance(item, PrincipleItem)
        trials.append(Trial(Contender(principle=item, **trial), tasks))
    skipped = tuple((id, reason) for id, reason in kept["skipped"])
    return Plan(tuple(trials), tuple(kept["control"]), kept["samples"], skipped)


def _told(plan: Plan) -> str:
    if not plan.trials:
        return "no principle is tried"
    return (
        f"{len(plan.trials)} principles on {len(plan.control)} tasks, {plan.samples} episodes each with and without: "
        f"{plan.episodes} episodes"
    )


async def _validate(
    config: Config,
    settings: MemoryConfig,
    store: Store,
    plan: Plan,
    tasks: Sequence[Task],
    task_set: str,
    adapter: Path | None,
    round: int,
    folder: Path,
) -> None:
    """Play the plan, judge, record, and write the file."""
    results: list[Result] = []
    if plan.trials:
        # Each arm has a memory of its own.
        policy = Policy(config.model_copy(update={"memory": None}), adapter=adapter, trainable=False, folder=folder)
        try:
            await policy.ready()
            run = f"{folder.name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
            async with env_pool(config) as pool:
                results = await play_plan(
                    policy, pool, config, settings, store, plan, tasks, round=round, folder=folder, run=run
                )
        finally:
            await policy.close()
    write_json(folder / RESULT, asdict(conclude(config, settings, store, plan, results, task_set, round)))


def conclude(
    config: Config,
    settings: MemoryConfig,
    store: Store,
    plan: Plan,
    results: Sequence[Result],
    task_set: str,
    round: int,
) -> Validated:
    """Judge the results of ``plan`` and write what follows into ``store``."""
    verdicts = judge_validation(results, settings.validation)
    record_validation(store, verdicts, round)
    world = config.env.name
    retired = retire_by_ledger(store, world, grammar_of(world), settings.validation, round)
    return Validated(
        round=round,
        task_set=task_set,
        episodes=plan.episodes,
        verdicts=[{"id": verdict.id, **verdict.record()} for verdict in verdicts],
        skipped=[list(pair) for pair in plan.skipped],
        retired=[list(pair) for pair in retired],
    )


async def play_plan(
    policy: Policy,
    pool: EnvPool,
    config: Config,
    settings: MemoryConfig,
    store: Store,
    plan: Plan,
    tasks: Sequence[Task],
    *,
    round: int,
    folder: Path,
    run: str,
) -> list[Result]:
    """Play the episodes of ``plan`` into ``folder`` and credit the ledgers. ``run``: the name under which they are."""
    embedder = make_embedder(settings.embedder, cache_folder() / "vectors.db")
    host = predicate_host(settings, deterministic=config.run.deterministic)
    builder = instantiating_model(settings, folder)

    def memory(*, hidden: Sequence[str], tried: str) -> Memory:
        return Memory(
            store,
            settings,
            grammar=grammar_of(config.env.name),
            embedder=embedder,
            host=host,
            builder=builder,
            hidden=hidden,
            tried=tried,
        )

    async def play(guided_by: Memory, jobs: list[Job]) -> list[Episode]:
        return await collect(
            pool,
            lambda job: policy.player(job, settings.validation.temperature, guided_by),
            jobs,
            max_steps=config.env.max_steps,
            concurrency=config.agent.concurrency,
            file=folder / "episodes" / f"{jobs[0].phase}.jsonl.gz",
            description=jobs[0].phase,
        )

    try:
        trials = Trials(store, plan, {task.id: task for task in tasks}, memory, play, round=round, run=run)
        results = await run_validation(plan, trials)
        trials.credit()
        return results
    finally:
        if host is not None:
            host.close()
        if builder is not None:
            builder.close()


def show(found: Validated, store: Store, console: Console) -> None:
    """The verdicts as a table, and why others were not tried or were retired."""
    if found.verdicts:
        table = compact_table(
            f"Validation, round {found.round}: {found.task_set}",
            ("id", "tasks", "without %", "with %", "difference % (95 %)", "p", "decision"),
            left=("id", "decision"),
        )
        for row in found.verdicts:
            difference = f"{100 * row['difference']:+.1f} ({100 * row['low']:+.1f} to {100 * row['high']:+.1f})"
            shares = percent(row["without"]), percent(row["with_principle"])
            table.add_row(row["id"][:8], str(row["n"]), *shares, difference, f"{row['p_holm']:.3f}", row["decision"])
        console.print(table)
        for row in found.verdicts:
            console.print(f"{row['id']}: {cut(store.item(row['id']).item.text())}", soft_wrap=True)
    if not any(row["decision"] == "validated" for row in found.verdicts):
        console.print("none of them was validated")
    for what, rows in (("not tried", found.skipped), ("retired", found.retired)):
        for id, reason in rows:
            console.print(f"{what}: {id}: {reason}", soft_wrap=True, markup=False)
