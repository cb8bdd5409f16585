"""``saga eval``: what to evaluate is a run, a model, or a player that needs no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from envs.base import Task
from envs.tasksets import load_task_set
from train.adapters import adapter_hash
from train.agent import ExpertPlayer, Job, Player, RandomPlayer, call_seed
from train.config import Config, ConfigError
from train.evaluate import evaluate, failure_line, metrics_table, spend_line
from train.files import write_json
from train.preflight import check_engine, hold_folder
from train.rollouts import env_pool
from train.target import REQUEST, check_folder, chosen_adapter, configure

if TYPE_CHECKING:
    from train.policy import Policy

MODELLESS: dict[str, Callable[[Job], Player]] = {
    "expert": lambda job: ExpertPlayer(),
    "random": lambda job: RandomPlayer(call_seed(0, job.id, 0)),
}


def evaluate_target(
    target: str,
    task_set: str,
    overrides: list[str],
    adapter: Path | None,
    seeds: int,
    out: Path | None,
    resume: bool,
) -> None:
    """Evaluate ``target`` on ``task_set`` into ``out`` and print the table.

    Raises:
        ConfigError: bad target, adapter or override; ``out`` exists without ``resume`` or holds another evaluation.
        TaskError: unknown task set or missing data.
    """
    console = Console()
    config = configure(target, task_set, overrides, seeds, model=target not in MODELLESS)
    if target not in MODELLESS:
        check_engine(config)
    tasks = load_task_set(task_set, config.env.model_dump(mode="json"))
    adapter = chosen_adapter(target, adapter)
    if adapter is not None and target in MODELLESS:
        raise ConfigError(f"--adapter {adapter}: the {target} agent has no weights; drop --adapter")
    digest = adapter_hash(adapter) if adapter else ""
    identity = {"config": config.model_dump(mode="json"), "adapter_hash": digest}
    folder = out or Path("evals") / f"{Path(target).name}-{task_set}".replace("/", "-").replace(":", "-")
    check_folder(folder, identity, resume)
    policy = None
    if target not in MODELLESS:
        from train.policy import Policy

        policy = Policy(config, adapter=adapter, trainable=False, folder=folder)
    write_json(folder / REQUEST, identity)
    with hold_folder(folder):
        result = asyncio.run(_evaluate(config, tasks, target, policy, folder, digest))
    console.print(metrics_table(result))
    failures = failure_line(result["metrics"])
    if failures:
        console.print(f"failed episodes: {failures}", highlight=False)
    spent = spend_line(result["metrics"])
    if spent:
        console.print(f"instantiation by the builder: {spent}", highlight=False, soft_wrap=True)
    console.print(f"written to {folder / 'evals' / 'eval.json'}", highlight=False, soft_wrap=True)


async def _evaluate(
    config: Config, tasks: list[Task], target: str, policy: Policy | None, folder: Path, digest: str
) -> dict[str, Any]:
    def make_player(job: Job) -> Player:
        return MODELLESS[target](job) if policy is None else policy.player(job, config.eval.temperature)

    try:
        if policy is not None:
            await policy.ready()
        async with env_pool(config) as pool:
            return await evaluate(
                pool,
                make_player,
                tasks,
                config,
                phase="eval",
                folder=folder,
                agent="policy" if policy is not None else target,
                adapter=policy.adapter if policy is not None else "",
                dtype=policy.dtype if policy is not None else "",
                memory=policy.memory if policy is not None else None,
                states=policy.states if policy is not None else None,
                adapter_hash=digest,
            )
    finally:
        if policy is not None:
            await policy.close()
