"""``saga play``: one episode by a random, expert or human player, printed as it goes. No model, no pool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.base import StepResult, Task, TextEnv
from envs.make import make_env
from envs.tasksets import load_task_set

_DEFAULT_SETS = {
    "household": "household/easy/train:0-0",
    "alfworld": "alfworld/valid_seen",
    "scienceworld": "scienceworld/dev-30",
    "jericho": "jericho/all",
}


def play(world: str, agent: str, task_id: str | None, steps: int, seed: int, folder: Path | None) -> None:
    """Play ``task_id`` (default: the first task of a small set) and print every step.

    Raises:
        TaskError: no such task, missing data. EnvFault: the simulator failed or knows no expert.
    """
    spec: dict[str, Any] = {"name": world, "max_steps": steps}
    if world == "jericho":
        spec["folder"] = str(folder or "games")
    task = Task(world, task_id, "") if task_id else load_task_set(_DEFAULT_SETS[world], spec)[0]
    console = Console(highlight=False, soft_wrap=True)
    env = make_env(spec)
    try:
        result = env.reset(task, seed)
        console.print(f"[dim]task {task.id}[/dim]")
        generator = random.Random(seed)
        while True:
            console.print(result.observation, markup=False)
            if result.done:
                break
            action, thought = _choose(env, agent, generator, console)
            if thought:
                console.print(f"[dim]{thought}[/dim]")
            if agent != "human":
                console.print(f"[bold cyan]> {action}[/bold cyan]")
            result = env.step(action)
        console.print(_outcome(env, result))
    finally:
        env.close()


def _choose(env: TextEnv, agent: str, generator: random.Random, console: Console) -> tuple[str, str]:
    if agent == "expert":
        move = env.expert()
        return move.action, move.thought
    if agent == "random":
        return generator.choice(list(env.admissible())), ""
    while True:
        action = console.input(f"[bold cyan]{env.steps + 1} (? lists actions) > [/bold cyan]").strip()
        if action == "?":
            console.print("\n".join(env.admissible()), markup=False)
        elif action:
            return action, ""


def _outcome(env: TextEnv, result: StepResult) -> str:
    end = "won" if result.won else "step cap reached" if result.truncated else "lost"
    return f"[bold]{end}[/bold] after {env.steps} steps, score {result.score:.2f}"
