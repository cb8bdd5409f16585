"""``saga ablate``: one policy under several configurations on equal items, and what each changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from envs.base import Task
from envs.pool import EnvPool
from envs.tasksets import load_task_set
from memory.samem_store import read_barriers, table_provenance
from memory.schema import memory_url
from memory.statistics import Effect, holm
from memory.store import Store
from train.adapters import adapter_hash
from train.agent import Job, Player
from train.arms import BASELINE, Arm, arm_config, learns_anew, parse_arms
from train.compare import compare, difference_text
from train.config import TRAINING_SECTIONS, Config, ConfigError, load_config
from train.evaluate import check_held_out, evaluate
from train.files import write_json
from train.memory import grammar_of
from train.metrics import FAILURES
from train.preflight import check_engine, hold_folder
from train.rebuild import builder_settings, rebuild, relearn
from train.rollouts import env_pool
from train.tables import compact_table, percent, success_text
from train.target import CONFIG, REQUEST, check_folder, chosen_adapter, configure, run_folder

RESULT = "ablation.json"
ARMS_FOLDER = "arms"
"""Holds what arms made for themselves."""


class Actor(Protocol):
    """Who plays the arms, one after the other (:class:`train.policy.Policy`)."""

    adapter: str
    memory: Any
    states: Any

    @property
    def dtype(self) -> str: ...

    def adopt(self, config: Config) -> None:
        """Play under ``config`` from now on."""

    def player(self, job: Job, temperature: float) -> Player: ...


@dataclass(frozen=True)
class Row:
    """An arm in the table. ``effect``: less the baseline, paired by item; ``p``: corrected for the number of arms."""

    arm: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    effect: Effect | None
    p: float | None
    failures: dict[str, float]
    """Share of the episodes that failed so, by class."""
    tokens: float
    """Written, an episode (all its tries)."""


def ablate_target(
    target: str,
    arms: Sequence[str],
    overrides: list[str],
    samples: int,
    adapter: Path | None,
    out: Path | None,
    resume: bool,
) -> None:
    """Evaluate ``target``, a configuration or a run, under each of ``arms``, and print the table.

    Raises:
        ConfigError: bad target, arm, adapter or override; ``out`` exists without ``resume`` or holds something else.
        MemoryRecordError: no such memory. TaskError: unknown task set or missing data.
    """
    wanted = parse_arms(arms)
    base = base_config(target, overrides, samples)
    configs = {name: arm_config(base, name, arm) for name, arm in wanted.items()}
    builders = {name: builder_settings(arm.built, base) for name, arm in wanted.items() if arm.built}
    check_engine(base)
    tasks = load_task_set(base.eval.tasks, base.env.model_dump(mode="json"))
    check_held_out(provenance(configs.values()), tasks, base.eval.tasks)  # before the first arm is played
    adapter = chosen_adapter(target, adapter)
    digest = adapter_hash(adapter) if adapter else ""
    identity = {"config": base.model_dump(mode="json"), "adapter_hash": digest, "memory": _snapshots(base)}
    folder = out or Path("ablations") / Path(target).stem
    check_folder(folder, identity, resume)
    write_json(folder / REQUEST, identity)
    console = Console(highlight=False)
    with hold_folder(folder):
        for name, settings in builders.items():
            memory = base.memory
            assert memory is not None
            url = rebuild(str(memory.store), settings, memory, folder.resolve() / ARMS_FOLDER / name)
            configs[name] = with_store(configs[name], url)
        for name, config in configs.items():
            if learns_anew(base, config) and config.samem is not None:
                source = memory_url(str(config.samem.database))
                url = relearn(source, config.samem, folder.resolve() / ARMS_FOLDER / name)
                configs[name] = with_table(config, url)
        if any(not evaluation_file(folder, name).exists() for name in configs):
            asyncio.run(_play(configs, tasks, adapter, folder, digest))
        found = {name: json.loads(evaluation_file(folder, name).read_text()) for name in configs}
        show(found, wanted, configs, folder, console)


def base_config(target: str, overrides: list[str], samples: int) -> Config:
    """What all arms share: the configuration of a file or a run, without what trains, with ``samples`` seeds.

    Raises:
        ConfigError: it is neither, or its samples would be alike.
    """
    folder = run_folder(target)
    file = Path(target) if folder is None else folder / CONFIG
    config = load_config(file, overrides)
    if folder is not None:
        # Of a run, its memory and its sections that train are resolved as for `saga eval`.
        config = configure(target, config.eval.tasks, overrides, samples)
    own = f"sqlite:///{config.run.dir / config.run.name / 'memory.db'}"
    memory = config.memory
    if memory is not None and memory.store is None:
        memory = memory.model_copy(update={"store": own})
    evaluation = config.eval.model_copy(update={"seeds": samples, "at_start": True})
    if evaluation.temperature == 0:
        raise ConfigError(
            "eval.temperature: at 0 the samples of an item would be alike and tell nothing of chance; give "
            "eval.temperature=0.4"
        )
    samem = config.samem
    if samem is not None and samem.database is None:
        samem = samem.model_copy(update={"database": memory.store if memory else own})
    untrained = dict.fromkeys(TRAINING_SECTIONS) | {"rounds": 1}
    return config.model_copy(update={"memory": memory, "samem": samem, "eval": evaluation, **untrained})


def with_store(config: Config, url: str) -> Config:
    assert config.memory is not None
    return config.model_copy(update={"memory": config.memory.model_copy(update={"store": url})})


def with_table(config: Config, url: str) -> Config:
    assert config.samem is not None
    return config.model_copy(update={"samem": config.samem.model_copy(update={"database": url})})


def _snapshots(config: Config) -> list[str]:
    """Of memory and table that the arms use: an ablation goes on only with those that it began with."""
    found = []
    if config.memory is not None:
        with Store(str(config.memory.store), create=False) as store:
            found.append(store.snapshot())
    if config.samem is not None:
        with Store(memory_url(str(config.samem.database)), create=False) as store:
            found += [barrier.snapshot for barrier in read_barriers(store, config.samem.table)[-1:]]
    return found


def provenance(configs: Iterable[Config]) -> set[tuple[str, str]]:
    """(world, task) of every trajectory that the arms' memories and tables rest on, and of the memories' validations.

    Raises:
        MemoryRecordError: no such memory.
    """
    found: set[tuple[str, str]] = set()
    for config in configs:
        memory, samem = config.memory, config.samem
        if memory is not None and memory.mode != "none":
            with Store(str(memory.store), create=False) as store:
                found |= store.provenance() | store.validated_on()
                if memory.mode == "trajectory":
                    found |= {(one.world, one.task) for one in store.trajectories(grammar=grammar_of(config.env.name))}
        if samem is not None:
            with Store(memory_url(str(samem.database)), create=False) as store:
                found |= table_provenance(store, samem.table)
    return found


def evaluation_file(folder: Path, arm: str) -> Path:
    return folder / "evals" / f"{arm}.json"


async def _play(
    configs: Mapping[str, Config], tasks: Sequence[Task], adapter: Path | None, folder: Path, digest: str
) -> None:
    from train.policy import Policy

    policy = Policy(configs[BASELINE], adapter=adapter, trainable=False, folder=folder)
    try:
        await policy.ready()
        async with env_pool(configs[BASELINE]) as pool:
            await play_arms(pool, policy, configs, tasks, folder, digest)
    finally:
        await policy.close()


async def play_arms(
    pool: EnvPool,
    actor: Actor,
    configs: Mapping[str, Config],
    tasks: Sequence[Task],
    folder: Path,
    adapter_hash: str = "",
) -> None:
    """Write the evaluation of each arm; those that are there stay, and so do finished episodes of the others."""
    for name, config in configs.items():
        if evaluation_file(folder, name).exists():
            continue
        actor.adopt(config)
        await evaluate(
            pool,
            lambda job, config=config: actor.player(job, config.eval.temperature),  # type: ignore[misc]
            tasks,
            config,
            phase=name,
            folder=folder,
            agent="policy",
            adapter=actor.adapter,
            dtype=actor.dtype,
            memory=actor.memory,
            states=actor.states,
            adapter_hash=adapter_hash,
        )


def table_rows(evaluations: Mapping[str, dict[str, Any]]) -> list[Row]:
    """A row for each arm and metric, with its difference from the baseline, paired by item.

    Values and intervals are those of :func:`train.compare.compare`; p-values are corrected for the number of arms
    (Holm 1979). The score has rows where it says more than success.
    """
    baseline = evaluations[BASELINE]
    totals = {
        name: {row.metric: row for row in compare(baseline, evaluation).rows if not row.task_type}
        for name, evaluation in evaluations.items()
    }
    graded = any("score" in rows for rows in totals.values())
    found = []
    for metric in ("success", "score") if graded else ("success",):
        of_metric = {name: rows.get(metric, rows["success"]) for name, rows in totals.items()}
        p_values = {name: row.effect.p for name, row in of_metric.items() if row.effect and name != BASELINE}
        corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
        for name, row in of_metric.items():
            summary = evaluations[name]["metrics"]
            found.append(
                Row(
                    arm=name,
                    metric=metric,
                    value=row.b,
                    interval=tuple(summary["success_interval"]) if metric == "success" else None,
                    effect=None if name == BASELINE else row.effect,
                    p=corrected.get(name),
                    failures={kind: summary["failures"].get(kind, 0) / summary["episodes"] for kind in FAILURES},
                    tokens=summary["tokens_out"] / summary["episodes"],
                )
            )
    return found


def show(
    evaluations: Mapping[str, dict[str, Any]],
    arms: Mapping[str, Arm],
    configs: Mapping[str, Config],
    folder: Path,
    console: Console,
) -> None:
    """Print the table of arms with what there is to warn of, and write both to ``ablation.json``."""
    rows = table_rows(evaluations)
    baseline = evaluations[BASELINE]
    warnings: dict[str, None] = {}  # each once: what is said of the baseline is said beside every arm
    for name, evaluation in evaluations.items():
        meant = {"prompting"} if configs[name].agent != configs[BASELINE].agent else set()
        found = compare(baseline, evaluation, (BASELINE, name), meant).warnings
        warnings |= dict.fromkeys(found)
    write_json(
        folder / RESULT,
        {
            "task_set": baseline["task_set"],
            "manifest_hash": baseline["manifest_hash"],
            "samples": len(baseline["seeds"]),
            "arms": {name: {"about": arm.about, "overrides": arm.overrides} for name, arm in arms.items()},
            "rows": [asdict(row) for row in rows],
            "warnings": list(warnings),
        },
    )
    for metric in dict.fromkeys(row.metric for row in rows):
        console.print(arms_table([row for row in rows if row.metric == metric], baseline))
    for name, evaluation in evaluations.items():
        if by_try := evaluation["metrics"].get("success_by_try"):
            console.print(f"{name}: success within 1, 2, … tries: {', '.join(map(percent, by_try))} %")
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"written to {folder / RESULT}; episodes: saga show {folder}", soft_wrap=True)


def arms_table(rows: Sequence[Row], baseline: dict[str, Any]) -> Table:
    """The arms, one a row, by one metric in per cent; what was lost as shares of all episodes, by class of failure."""
    metric = rows[0].metric
    title = f"{baseline['task_set']}: {baseline['metrics']['items']} items, {len(baseline['seeds'])} samples an arm"
    lost = f"lost {'/'.join(kind[0].upper() for kind in FAILURES)}"
    won = [lost] if metric == "success" else []
    table = compact_table(title, ("arm", f"{metric} %", f"- {BASELINE} (95 %)", "p", *won), left=("arm",))
    table.columns[0].overflow = "fold"
    if won:
        table.caption = f"lost: shares of all episodes, by {', '.join(FAILURES)}"
    for row in rows:
        value = success_text(row.value, row.interval) if row.interval else percent(row.value)
        told = ("–", "–") if row.effect is None or row.p is None else (difference_text(row.effect), f"{row.p:.3f}")
        failures = ["/".join(f"{100 * share:.0f}" for share in row.failures.values())] if won else []
        table.add_row(row.arm, value, *told, *failures)
    return table
