"""The pool against a scripted world in real worker processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from envs.base import EnvFault, ExpertMove, StepResult, Task, TaskError
from envs.pool import EnvPool, Session

pytestmark = pytest.mark.unit

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("pool_worker.py")))
SPEC = {"name": "scripted", "max_steps": 5}


def task(name: str) -> Task:
    return Task("scripted", name, "test")


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def run(
    body: Callable[[EnvPool], Coroutine[Any, Any, None]],
    *,
    workers: int = 1,
    slots: int = 2,
    recycle_after: int = 1000,
    timeout_s: float = 20.0,
    spec: dict[str, Any] = SPEC,
) -> EnvPool:
    """Run ``body`` with a pool; no process of ours may be left when it is closed."""

    async def main() -> EnvPool:
        async with EnvPool(spec, workers, slots, recycle_after, timeout_s, worker_command=COMMAND) as pool:
            await body(pool)
        return pool

    before = children()
    pool = asyncio.run(asyncio.wait_for(main(), 60))
    assert children() <= before
    return pool


def pid(session: Session) -> int:
    return int(session.first.observation.split()[0])


async def gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        await asyncio.sleep(0.05)
    return False


def test_an_episode() -> None:
    async def body(pool: EnvPool) -> None:
        session = await pool.open(task("a"), 3)
        assert session.first.goal == "a 3"
        assert session.expert_steps == 7
        assert await session.expert() == ExpertMove("win", "I win.")
        assert session.expert_steps == 8
        assert await session.admissible() == ["\ud800", "x" * 300_000]
        assert await session.step("look") == StepResult("did look")
        with pytest.raises(EnvFault, match=r"^no expert here$"):
            await session.expert()
        assert await session.step("win") == StepResult("won", reward=1.0, score=1.0, done=True, won=True)
        with pytest.raises(RuntimeError, match="over"):
            await session.step("look")
        await session.close()
        await session.close()
        with pytest.raises(RuntimeError, match="closed"):
            await session.admissible()

    pool = run(body)
    assert {name: pool.stats[name] for name in ("resets", "prefetch_hits", "recycled", "replaced")} == {
        "resets": 1,
        "prefetch_hits": 0,
        "recycled": 0,
        "replaced": 0,
    }


def test_prints_do_not_reach_the_protocol() -> None:
    async def body(pool: EnvPool) -> None:
        session = await pool.open(task("print"), 0)
        assert (await session.step("print")).observation == "did print"

    run(body)


def test_unknown_task_keeps_its_type_and_the_worker() -> None:
    async def body(pool: EnvPool) -> None:
        with pytest.raises(TaskError, match=r"^task 'unknown' does not exist; choose another$"):
            await pool.open(task("unknown"), 0)
        await pool.open(task("a"), 0)
        await pool.open(task("b"), 0)  # the failed one's slot is free again

    assert run(body).stats["replaced"] == 0


def test_a_world_that_cannot_be_made_reports_its_own_error() -> None:
    async def body(pool: EnvPool) -> None:
        for _ in range(2):
            with pytest.raises(TaskError, match=r"^env.name 'missing': install it$"):
                await pool.open(task("a"), 0)

    run(body, spec={"name": "missing", "max_steps": 1})


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("die", r"^step in a: its worker died \(exit code 3\); it last printed: last words$"),
        ("hang", r"^step in a: no answer within 0.5 s; its worker was replaced$"),
    ],
    ids=["die", "hang"],
)
def test_a_lost_worker_faults_its_sessions_and_is_replaced(action: str, message: str) -> None:
    async def body(pool: EnvPool) -> None:
        session, neighbour = await pool.open(task("a"), 0), await pool.open(task("b"), 0)
        child = int((await neighbour.step("spawn")).observation)
        with pytest.raises(EnvFault, match=message):
            await session.step(action)
        with pytest.raises(EnvFault, match=message):
            await neighbour.step("look")
        again = [await pool.open(task("c"), 0), await pool.open(task("d"), 0)]  # before the lost ones are closed
        assert (await again[0].step("look")).observation == "did look"
        assert await gone(pid(session))
        assert await gone(child)
        await session.close()
        await neighbour.close()

    assert run(body, timeout_s=0.5).stats["replaced"] == 1


def test_a_worker_that_dies_idle_costs_no_later_episode() -> None:
    async def body(pool: EnvPool) -> None:
        first = await pool.open(task("a"), 0)
        await first.close()
        os.kill(pid(first), signal.SIGKILL)
        assert await gone(pid(first))
        await asyncio.sleep(0.2)
        await pool.open(task("b"), 0)

    assert run(body).stats["replaced"] == 1


@pytest.mark.parametrize(
    ("action", "message"),
    [("raise", "^step: ZeroDivisionError: no such number$"), ("fault", "^the simulator is gone$")],
    ids=["raise", "fault"],
)
def test_a_raising_world_faults_its_session_only(action: str, message: str) -> None:
    async def body(pool: EnvPool) -> None:
        session, neighbour = await pool.open(task("a"), 0), await pool.open(task("b"), 0)
        for _ in range(2):
            with pytest.raises(EnvFault, match=message):
                await session.step(action)
        assert (await neighbour.step("look")).observation == "did look"
        await session.close()
        fresh = await pool.open(task("c"), 0)
        assert pid(fresh) != pid(neighbour)
        await neighbour.close()
        assert await gone(pid(neighbour))

    assert run(body).stats["replaced"] == 1


def test_reset_faults() -> None:
    async def body(pool: EnvPool) -> None:
        for name, message in (("die", "exit code 3"), ("raise", "ZeroDivisionError"), ("hang", "no answer")):
            with pytest.raises(EnvFault, match=message):
                await pool.open(task(name), 0)
        await pool.open(task("a"), 0)

    assert run(body, slots=1, timeout_s=0.5).stats["replaced"] == 3


def test_recycling_keeps_capacity() -> None:
    async def body(pool: EnvPool) -> None:
        old, second = await pool.open(task("a"), 0), await pool.open(task("b"), 0)  # the second is the worker's last
        await second.close()
        third = await asyncio.wait_for(pool.open(task("c"), 0), 20)  # while the old worker still plays
        assert pid(old) == pid(second) != pid(third)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.open(task("d"), 0), 0.3)  # two slots in all
        assert (await old.step("look")).observation == "did look"
        await old.close()
        assert await gone(pid(old))

    pool = run(body, recycle_after=2)
    assert (pool.stats["recycled"], pool.stats["replaced"]) == (1, 0)


def test_many_episodes_through_few_slots() -> None:
    async def body(pool: EnvPool) -> None:
        pairs = [(task(f"t{i}"), i) for i in range(40)]
        pool.expect(pairs)
        pids = set()
        playing = 0
        most = 0

        async def play(pair: tuple[Task, int]) -> None:
            nonlocal playing, most
            session = await pool.open(*pair)
            playing += 1
            most = max(most, playing)
            assert session.first.goal == f"{pair[0].id} {pair[1]}"
            pids.add(pid(session))
            for _ in range(3):
                await session.step("look")
            playing -= 1
            await session.close()

        await asyncio.gather(*(play(pair) for pair in pairs))
        assert 2 <= most <= 4
        assert len(pids) >= 4  # two, and their successors

    pool = run(body, workers=2, recycle_after=10)
    assert pool.stats["resets"] >= 40
    assert pool.stats["recycled"] >= 3


def test_expected_tasks_are_reset_ahead_of_time() -> None:
    async def body(pool: EnvPool) -> None:
        pool.expect([(task("a"), 0), (task("a"), 0), (task("b"), 1)])
        while pool.stats["resets"] < 2:
            await asyncio.sleep(0.01)
        first = await pool.open(task("a"), 0)
        second = await pool.open(task("a"), 0)
        assert pool.stats["prefetch_hits"] == 2
        assert pool.stats["resets"] == 2
        assert first.first.observation != second.first.observation  # two starts, not one shared
        await first.close()
        while pool.stats["resets"] < 3:  # the freed slot is reset to the next one
            await asyncio.sleep(0.01)
        third = await pool.open(task("b"), 1)
        assert third.first.goal == "b 1"
        assert pool.stats["prefetch_hits"] == 3

    assert run(body).stats["resets"] == 3


def test_prefetching_starves_nobody() -> None:
    async def body(pool: EnvPool) -> None:
        pool.expect([(task("a"), 0), (task("b"), 0), (task("c"), 0)])
        while pool.stats["resets"] < 2:
            await asyncio.sleep(0.01)
        surprise = await asyncio.wait_for(pool.open(task("d"), 0), 20)  # takes the slot held for b
        assert surprise.first.goal == "d 0"
        await (await pool.open(task("a"), 0)).close()
        later = await asyncio.wait_for(pool.open(task("b"), 0), 20)
        assert later.first.goal == "b 0"

    assert run(body).stats["prefetch_hits"] == 2  # a, and b that came back into the freed slot


def test_a_step_goes_before_resets_ahead_of_time() -> None:
    async def body(pool: EnvPool) -> None:
        session = await pool.open(task("a"), 0)
        pool.expect([(task(f"sleep 0.3{i}"), 0) for i in range(3)])
        await asyncio.sleep(0.1)  # the first of them is in service
        began = time.monotonic()
        await session.step("look")
        assert time.monotonic() - began < 0.6

    run(body, slots=4)


def test_a_reset_ahead_of_time_that_fails_is_reported_when_opened() -> None:
    async def body(pool: EnvPool) -> None:
        pool.expect([(task("unknown"), 0), (task("fault"), 0), (task("a"), 0)])
        await pool.open(task("a"), 0)
        with pytest.raises(TaskError, match="does not exist"):
            await pool.open(task("unknown"), 0)
        with pytest.raises(EnvFault, match="is gone"):
            await pool.open(task("fault"), 0)

    run(body)


def test_sessions_take_turns() -> None:
    async def body(pool: EnvPool) -> None:
        sessions = [await pool.open(task(f"t{i}"), 0) for i in range(3)]
        order: list[int] = []

        async def play(index: int) -> None:
            for _ in range(4):
                await sessions[index].step("sleep 0.01")
                order.append(index)

        await asyncio.gather(*(play(index) for index in range(3)))
        assert order == [0, 1, 2] * 4

    run(body, slots=3)


def test_waiting_for_a_slow_neighbour_is_no_hang() -> None:
    async def body(pool: EnvPool) -> None:
        sessions = [await pool.open(task(f"t{i}"), 0) for i in range(4)]
        await asyncio.gather(*(session.step("sleep 0.5") for session in sessions))  # the last waits 1.5 s

    assert run(body, slots=4, timeout_s=1.0).stats["replaced"] == 0


def test_a_blocked_event_loop_is_no_hang() -> None:
    async def body(pool: EnvPool) -> None:
        session = await pool.open(task("a"), 0)
        step = asyncio.create_task(session.step("sleep 0.2"))
        await asyncio.sleep(0.05)
        time.sleep(1.5)  # a model that computes without yielding
        assert (await step).observation == "did sleep 0.2"

    assert run(body, timeout_s=0.5).stats["replaced"] == 0


def test_cancelled_callers_leave_a_working_pool() -> None:
    async def body(pool: EnvPool) -> None:
        session = await pool.open(task("a"), 0)
        step = asyncio.create_task(session.step("sleep 0.3"))
        opening = asyncio.create_task(pool.open(task("sleep 0.3"), 0))  # its reset waits behind the step
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(pool.open(task("c"), 0))  # no slot is free
        await asyncio.sleep(0.05)
        for item in (step, opening, waiting):
            item.cancel()
        assert [type(r) for r in await asyncio.gather(step, opening, waiting, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 3
        assert (await session.step("look")).observation == "did look"  # not the answer of the abandoned step
        await session.close()
        assert [(await pool.open(task(name), 0)).first.goal for name in "de"] == ["d 0", "e 0"]

    assert run(body).stats["replaced"] == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_no_slot_is_lost_whatever_happens(seed: int) -> None:
    """Episodes that end, fault, kill their worker or are cancelled, announced or not; then all slots are there."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()

    async def body(pool: EnvPool) -> None:
        playing = 0

        async def play(pair: tuple[Task, int], action: str) -> None:
            nonlocal playing
            session = await pool.open(*pair)
            playing += 1
            try:
                assert playing <= 4
                assert session.first.goal == f"{pair[0].id} {pair[1]}"
                for step in ("look", "sleep 0.01", action):
                    assert (await session.step(step)).observation == f"did {step}"
            finally:
                playing -= 1
                await session.close()

        async def episode(index: int) -> None:
            pair = (task(rng.choice(["a", "b", "sleep 0.02", "unknown", "fault"])), index % 5)
            action = rng.choice(["look"] * 6 + ["raise", "die"])
            await asyncio.sleep(rng.random())
            if rng.random() < 0.5:
                pool.expect([pair] * rng.randrange(3))
            attempt = asyncio.create_task(play(pair, action))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.1)
                attempt.cancel()
            (result,) = await asyncio.gather(attempt, return_exceptions=True)
            outcomes[type(result).__name__] += 1

        await asyncio.gather(*(episode(index) for index in range(60)))
        sessions = await asyncio.gather(*(pool.open(task(f"last {index}"), 0) for index in range(4)))
        assert [session.first.goal for session in sessions] == [f"last {index} 0" for index in range(4)]

    run(body, workers=2, recycle_after=8)
    assert set(outcomes) == {"NoneType", "TaskError", "EnvFault", "CancelledError"}


def test_leaving_the_pool_ends_waiting_callers() -> None:
    async def main() -> None:
        async with EnvPool(SPEC, 1, 1, 10, 20.0, worker_command=COMMAND) as pool:
            session = await pool.open(task("a"), 0)
            step = asyncio.create_task(session.step("hang"))
            waiting = asyncio.create_task(pool.open(task("b"), 0))
            await asyncio.sleep(0.1)
        with pytest.raises(EnvFault, match="closed"):
            await step
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await pool.open(task("c"), 0)

    before = children()
    asyncio.run(asyncio.wait_for(main(), 30))
    assert children() <= before


def test_a_command_that_does_not_exist_is_a_fault() -> None:
    async def main() -> None:
        async with EnvPool(SPEC, 1, 1, 10, 20.0, worker_command=("/nonexistent",)) as pool:
            with pytest.raises(EnvFault, match="/nonexistent"):
                await pool.open(task("a"), 0)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_no_worker_survives_a_killed_parent() -> None:
    """The second worker hangs in a call, so only the kernel can end it."""
    script = f"""
import asyncio, sys
from envs.base import Task
from envs.pool import EnvPool
async def main():
    async with EnvPool({SPEC!r}, 2, 1, 10, 1000.0, worker_command={COMMAND!r}) as pool:
        sessions = [await pool.open(Task("scripted", str(i), "test"), 0) for i in range(2)]
        hanging = asyncio.create_task(sessions[1].step("hang"))
        await asyncio.sleep(0.1)
        print(*(s.first.observation.split()[0] for s in sessions), flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(psutil.pid_exists(worker) for worker in workers)
        parent.kill()
    assert all(asyncio.run(gone(worker)) for worker in workers)
