"""The pool with real simulators."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from envs import tasksets
from envs.base import EnvFault, Task, TaskError
from envs.pool import EnvPool
from envs.tasksets import load_task_set

pytestmark = pytest.mark.integration

SCIENCEWORLD = {"name": "scienceworld", "max_steps": 10, "simplification": "easy"}


def wait_for_end(process: psutil.Process) -> bool:
    try:
        process.wait(20)
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_no_jvm_survives_a_killed_parent() -> None:
    script = f"""
import asyncio
from envs.base import Task
from envs.pool import EnvPool
async def main():
    async with EnvPool({SCIENCEWORLD!r}, 1, 2, 10, 60.0) as pool:
        for variation in (0, 1):
            await pool.open(Task("scienceworld", f"boil/{{variation}}", "boil"), 0)
        print("playing", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "playing\n"
        started = psutil.Process(parent.pid).children(recursive=True)
        assert sorted(process.name() for process in started if process.name() == "java") == ["java", "java"]
        assert len(started) == 3
        parent.kill()
    assert all(wait_for_end(process) for process in started)


def test_a_killed_jvm_is_a_fault_and_the_next_episode_plays() -> None:
    async def main() -> None:
        task = Task("scienceworld", "find-plant/0", "find-plant")
        async with EnvPool(SCIENCEWORLD, 1, 2, 10, 60.0) as pool:
            killed, other = await asyncio.gather(pool.open(task, 0), pool.open(task, 0))
            assert killed.first == other.first
            (worker,) = set(psutil.Process().children()) - before
            first_jvm, _ = sorted(worker.children(), key=lambda process: process.create_time())
            first_jvm.kill()
            with pytest.raises(EnvFault):
                await killed.step("look around")
            assert "room" in (await other.step("look around")).observation
            await killed.close()
            again = await pool.open(task, 0)
            assert again.first == other.first
            assert again.expert_steps is None
            assert (await again.step((await again.expert()).action)).valid
            assert again.expert_steps is not None
            await other.close()
            with pytest.raises(TaskError, match="no variation"):
                await pool.open(Task("scienceworld", "boil/99999", "boil"), 0)

    before = set(psutil.Process().children(recursive=True))  # a server that other tests share may run
    asyncio.run(main())
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    "name",
    [
        "scienceworld/strict-175",
        "scienceworld/dev-30",
        "scienceworld/train-90",
        "household/easy/eval-48",
        "household/medium/eval-102",
    ],
)
def test_manifests_equal_their_source(name: str) -> None:
    """When a generator is changed on purpose: python -m envs.tasksets --freeze NAME."""
    assert tasksets._freeze(name) == load_task_set(name, {"name": name.split("/")[0]})


def play_all(spec: dict[str, object], tasks: list[Task], slots: int, **pool_args: int) -> tuple[int, dict[str, float]]:
    """Episodes won by the expert, and the pool's statistics."""

    async def main() -> tuple[int, dict[str, float]]:
        async with EnvPool(spec, 2, slots, timeout_s=60.0, recycle_after=pool_args.get("recycle_after", 100)) as pool:
            pool.expect([(task, 0) for task in tasks])

            async def play(task: Task) -> bool:
                session = await pool.open(task, 0)
                result = session.first
                while not result.done:
                    result = await session.step((await session.expert()).action)
                await session.close()
                return result.won

            won = await asyncio.gather(*map(play, tasks))
        return sum(won), pool.stats

    return asyncio.run(main())


def test_households_through_the_pool() -> None:
    spec = {"name": "household", "max_steps": 10}
    tasks = load_task_set("household/easy/eval-48:0-11", spec)
    began = time.perf_counter()
    won, stats = play_all(spec, tasks, 3, recycle_after=4)
    print(f"{len(tasks) / (time.perf_counter() - began):.1f} episodes/s", stats)
    assert won == 12
    assert stats["resets"] == 12
    assert stats["recycled"] >= 2
    assert stats["replaced"] == 0


def test_a_changed_household_is_refused() -> None:
    async def main() -> None:
        task = load_task_set("household/easy/eval-48:0-0", {"name": "household"})[0]
        async with EnvPool({"name": "household", "max_steps": 10}, 1, 1, 10, 60.0) as pool:
            with pytest.raises(TaskError, match="sha256"):
                await pool.open(Task(task.env, task.id, task.type, "0" * 64), 0)

    asyncio.run(main())


@pytest.mark.skipif("ALFWORLD_DATA" not in os.environ, reason="needs the official games in ALFWORLD_DATA")
def test_alfworld_through_the_pool() -> None:
    spec = {"name": "alfworld", "max_steps": 50}
    tasks = load_task_set("alfworld/dev-30:0-7", spec)
    won, stats = play_all(spec, tasks, 4)
    assert won >= 7
    assert stats["resets"] == 8
