"""Many text worlds at once: worker processes with several games each, behind an asyncio interface.

A worker serves one call at a time, so sessions that share it take turns in the order they asked; resets made ahead of
time wait until nobody else does. Time limits count the time in service, never the wait for one's turn.

What goes wrong stays with the sessions it concerns: a worker that hangs or dies takes its sessions with it (EnvFault)
and is replaced; a simulator that raises costs its own session, and its worker gets no new episodes. Workers that have
played ``recycle_after`` episodes get no new ones either. Their successors take over the slots as these become free, so
the number of games in play neither drops nor exceeds ``workers * envs_per_worker``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from envs.base import EnvFault, ExpertMove, StepResult, Task, TaskError
from envs.process import WorkerProcess

WORKER_COMMAND = (sys.executable, "-P", "-m", "envs.worker")

_START_S = 120.0  # Python and the simulator's imports on a busy machine; not the game's own time
_CLOSED = "the environment pool is closed; open episodes inside 'async with EnvPool(...)'"


class EnvPool:
    """Worker processes that play one kind of world. Use as ``async with EnvPool(...) as pool``.

    Args:
        spec: the world (``config.env.model_dump(mode="json")``), handed to the workers' ``make_env``.
        workers: processes.
        envs_per_worker: games that one process holds at the same time.
        recycle_after: episodes after which a process is replaced.
        timeout_s: seconds after which a call in service counts as hung.
        worker_command: command of a worker process (see :func:`envs.worker.serve`).

    ``stats`` counts ``resets``, ``prefetch_hits`` (episodes whose reset was made, or begun, ahead of time), and workers
    ``recycled`` and ``replaced`` (after a fault), and sums ``env_seconds``, the time the worlds took.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        workers: int,
        envs_per_worker: int,
        recycle_after: int,
        timeout_s: float,
        *,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._spec = spec
        self._count = workers
        self._envs_per_worker = envs_per_worker
        self._recycle_after = recycle_after
        self._timeout_s = timeout_s
        self._command = worker_command
        self.stats: dict[str, float] = {
            "resets": 0,
            "prefetch_hits": 0,
            "recycled": 0,
            "replaced": 0,
            "env_seconds": 0.0,
        }
        self._active: list[_Worker] = []  # take new episodes; always `workers` of them
        self._draining: set[_Worker] = set()  # finish theirs
        self._stopping: set[asyncio.Task[None]] = set()
        self._in_use = 0
        self._waiting: deque[asyncio.Future[_Lease]] = deque()
        self._expected: deque[tuple[Task, int]] = deque()
        self._ahead: list[_Ahead] = []  # in the order announced

    async def __aenter__(self) -> Self:
        self._active = [self._new_worker(eager=True) for _ in range(self._count)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._expected.clear()
        self._ahead.clear()
        workers = [*self._active, *self._draining]
        self._active = []
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(RuntimeError(_CLOSED))
        self._waiting.clear()
        await asyncio.gather(*(worker.stop() for worker in workers), *self._stopping)

    def expect(self, pairs: Sequence[tuple[Task, int]]) -> None:
        """Announce (task, seed) pairs that will be opened, in this order; idle slots reset them ahead of time."""
        self._expected.extend(pairs)
        self._assign()

    async def open(self, task: Task, seed: int) -> Session:
        """Start ``task`` as soon as a slot is free. The reset's result is the session's ``first``.

        Raises:
            TaskError: the world has no such task, or its content differs from the manifest's.
            EnvFault: the simulator failed.
        """
        ahead = next((item for item in self._ahead if (item.task, item.seed) == (task, seed)), None)
        if ahead:
            self._ahead.remove(ahead)
            self.stats["prefetch_hits"] += 1
            lease, reset = ahead.lease, ahead.reset
            lease.worker.promote(reset)
        else:
            with contextlib.suppress(ValueError):
                self._expected.remove((task, seed))
            lease = await self._acquire()
            reset = self._reset(lease, task, seed, ahead=False)
        try:
            answer = await reset.answer
        except BaseException:
            self._release(lease)
            raise
        return Session(task, seed, answer, lease, self._release)

    async def _acquire(self) -> _Lease:
        if not self._waiting and (lease := self._claim()):
            return lease
        waiter: asyncio.Future[_Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not (waiter.cancelled() or waiter.exception()):
                self._release(waiter.result())  # granted in the moment of the cancellation
            raise

    def _claim(self) -> _Lease | None:
        """A free slot, or that of the reset made ahead for the farthest future; None when all are being played.

        Draining workers hold their slots within the same total, so as long as the total is not reached an active
        worker has a free one.
        """
        if not self._active:
            raise RuntimeError(_CLOSED)
        if self._in_use == self._count * self._envs_per_worker:
            if not self._ahead:
                return None
            victim = self._ahead.pop()
            self._expected.appendleft((victim.task, victim.seed))
            victim.reset.answer.cancel()
            self._give_back(victim.lease)
        worker = max(self._active, key=lambda worker: len(worker.free))
        lease = _Lease(worker, min(worker.free))
        worker.free.remove(lease.slot)
        worker.leases.add(lease)
        self._in_use += 1
        worker.episodes += 1
        if worker.episodes >= self._recycle_after:
            self.stats["recycled"] += 1
            self._retire(worker, eager=True)
        return lease

    def _reset(self, lease: _Lease, task: Task, seed: int, *, ahead: bool) -> _Call:
        request = {"op": "reset", "slot": lease.slot, "task": asdict(task), "seed": seed}
        return lease.worker.call(request, f"reset of {task.id}", ahead=ahead)

    def _release(self, lease: _Lease) -> None:
        if self._give_back(lease):
            self._assign()

    def _give_back(self, lease: _Lease) -> bool:
        """Free the slot; False when it was free already (the worker was lost)."""
        worker = lease.worker
        if lease not in worker.leases:
            return False
        worker.leases.remove(lease)
        worker.free.add(lease.slot)
        self._in_use -= 1
        self._stop_if_drained(worker)
        return True

    def _stop_if_drained(self, worker: _Worker) -> None:
        if worker in self._draining and not worker.leases:
            self._draining.remove(worker)
            self._stop_later(worker)

    def _assign(self) -> None:
        """Give free slots to those who wait for one, the rest to resets ahead of time."""
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
            elif lease := self._claim():
                self._waiting.popleft().set_result(lease)
            else:
                return
        while self._active and self._expected and self._in_use < self._count * self._envs_per_worker:
            task, seed = self._expected.popleft()
            lease = self._claim()
            assert lease is not None
            ahead = _Ahead(task, seed, lease, self._reset(lease, task, seed, ahead=True))
            self._ahead.append(ahead)
            ahead.reset.answer.add_done_callback(partial(self._ahead_done, ahead))

    def _ahead_done(self, ahead: _Ahead, answer: asyncio.Future[Any]) -> None:
        """A reset ahead of time that failed is forgotten: ``open`` makes its own and reports what happens."""
        if answer.cancelled() or answer.exception() is None or ahead not in self._ahead:
            return
        self._ahead.remove(ahead)
        self._release(ahead.lease)

    def _new_worker(self, *, eager: bool) -> _Worker:
        return _Worker(
            self._command,
            self._spec,
            slots=self._envs_per_worker,
            timeout_s=self._timeout_s,
            eager=eager,
            stats=self.stats,
            on_fault=self._on_fault,
            on_lost=self._on_lost,
        )

    def _on_fault(self, worker: _Worker) -> None:
        """A simulator raised: what else it left behind in its process is unknown, so no new episode starts there."""
        if worker in self._active:
            self.stats["replaced"] += 1
            self._retire(worker, eager=False)

    def _retire(self, worker: _Worker, *, eager: bool) -> None:
        self._active[self._active.index(worker)] = self._new_worker(eager=eager)
        self._draining.add(worker)
        self._stop_if_drained(worker)

    def _on_lost(self, worker: _Worker) -> None:
        """The process is gone. Its successor starts on demand, so that a world that cannot start is no endless loop."""
        self.stats["replaced"] += 1
        self._draining.discard(worker)
        if worker in self._active:
            self._active[self._active.index(worker)] = self._new_worker(eager=False)
        self._ahead = [item for item in self._ahead if item.lease.worker is not worker]
        self._in_use -= len(worker.leases)
        worker.leases.clear()
        self._stop_later(worker)
        self._assign()

    def _stop_later(self, worker: _Worker) -> None:
        task = asyncio.create_task(worker.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


class Session:
    """One episode in one slot of a pool.

    ``first`` is the reset's result. ``expert_steps`` is the length of a known solution where the world tells one (in
    ScienceWorld only after ``expert`` was asked). Every call raises EnvFault once its worker or world has failed, and
    RuntimeError after ``close``.
    """

    def __init__(
        self, task: Task, seed: int, reset: dict[str, Any], lease: _Lease, release: Callable[[_Lease], None]
    ) -> None:
        self.task = task
        self.seed = seed
        self.first = StepResult(**reset["first"])
        self.expert_steps: int | None = reset["expert_steps"]
        self._last = self.first
        self._lease = lease
        self._release = release
        self._fault: EnvFault | None = None
        self._closed = False

    async def step(self, action: str) -> StepResult:
        """Play one action. Raises RuntimeError after the end of the episode."""
        if self._last.done:
            raise RuntimeError(f"step: the episode of {self.task.id} is over; open a new session")
        self._last = StepResult(**await self._call("step", action=action))
        return self._last

    async def admissible(self) -> list[str]:
        """The actions the world would accept now, sorted."""
        return list(await self._call("admissible"))

    async def expert(self) -> ExpertMove:
        """The expert's move for the present situation. An EnvFault of the expert alone does not end the session."""
        answer = await self._call("expert")
        self.expert_steps = answer["expert_steps"]
        return ExpertMove(**answer["move"])

    async def close(self) -> None:
        """Free the slot. May be called twice."""
        self._closed = True
        self._release(self._lease)

    async def _call(self, op: str, **fields: str) -> Any:
        if self._closed:
            raise RuntimeError(f"{op}: the session of {self.task.id} is closed")
        if self._fault:
            raise EnvFault(str(self._fault))
        request = {"op": op, "slot": self._lease.slot, **fields}
        try:
            return await self._lease.worker.call(request, f"{op} in {self.task.id}").answer
        except EnvFault as fault:
            if op != "expert":
                self._fault = fault
            raise


@dataclass(eq=False)
class _Lease:
    """A slot in use."""

    worker: _Worker
    slot: int


@dataclass(eq=False)
class _Call:
    """A request and the future of its answer. ``what`` names it in messages."""

    request: dict[str, Any]
    what: str
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(type(error)(str(error)))
            self.answer.exception()  # seen: nobody may be waiting any more


@dataclass(eq=False)
class _Ahead:
    """A reset made ahead of time, or on its way."""

    task: Task
    seed: int
    lease: _Lease
    reset: _Call


class _Worker:
    """One process, its queue of calls and its slots. It is lost when the process hangs, dies or cannot start."""

    def __init__(
        self,
        command: Sequence[str],
        spec: dict[str, Any],
        *,
        slots: int,
        timeout_s: float,
        eager: bool,
        stats: dict[str, float],
        on_fault: Callable[[_Worker], None],
        on_lost: Callable[[_Worker], None],
    ) -> None:
        self.free = set(range(slots))
        self.leases: set[_Lease] = set()
        self.episodes = 0
        self._command = command
        self._spec = spec
        self._timeout_s = timeout_s
        self._stats = stats
        self._on_fault = on_fault
        self._on_lost = on_lost
        self._queue: deque[_Call] = deque()
        self._later: deque[_Call] = deque()  # resets ahead of time
        self._current: _Call | None = None
        self._changed = asyncio.Event()
        self._lost: EnvFault | TaskError | None = None
        self._process: WorkerProcess | None = None
        self._serving = asyncio.create_task(self._serve(eager))

    def call(self, request: dict[str, Any], what: str, *, ahead: bool = False) -> _Call:
        """Queue ``request``; its turn comes after all that wait already (``ahead``: when nothing else waits)."""
        call = _Call(request, what)
        if self._lost:
            call.fail(self._lost)
        else:
            (self._later if ahead else self._queue).append(call)
            self._changed.set()
        return call

    def promote(self, call: _Call) -> None:
        """Somebody waits for this reset now."""
        if call in self._later:
            self._later.remove(call)
            self._queue.append(call)

    async def stop(self) -> None:
        """Fail what waits and end the process."""
        self._fail(EnvFault("the environment pool was closed"))
        self._serving.cancel()
        await asyncio.wait({self._serving})
        if self._process:
            await self._process.stop()

    async def _serve(self, eager: bool) -> None:
        """Start the process, then answer the calls one by one."""
        try:
            if not eager:
                await self._call_or_exit()
            process = self._process = await WorkerProcess.start(self._command)
            process.exited.add_done_callback(lambda _: self._changed.set())
            reply = await process.ask({"op": "start", "spec": self._spec}, "start of a worker", _START_S)
            if "error" in reply:
                raise _error(reply)
            while True:
                await self._call_or_exit()
                if process.exited.done():
                    raise await process.death("between two calls")
                call = (self._queue or self._later).popleft()
                if not call.answer.done():  # else cancelled before its turn
                    self._current = call
                    self._settle(call, await process.ask(call.request, call.what, self._timeout_s))
                    self._current = None
        except (EnvFault, TaskError) as error:
            self._lose(error)
        except Exception as error:  # a command that does not exist, an answer that is no JSON: nobody may wait for ever
            self._lose(EnvFault(f"environment worker: {type(error).__name__}: {error}"))

    async def _call_or_exit(self) -> None:
        while not (self._queue or self._later or (self._process and self._process.exited.done())):
            self._changed.clear()
            await self._changed.wait()

    def _settle(self, call: _Call, reply: dict[str, Any]) -> None:
        if "error" in reply:
            error = _error(reply)
            call.fail(error)
            if isinstance(error, EnvFault) and call.request["op"] != "expert":
                self._on_fault(self)
            return
        self._stats["env_seconds"] += reply["seconds"]
        if call.request["op"] == "reset":
            self._stats["resets"] += 1
        if not call.answer.done():
            call.answer.set_result(reply["ok"])

    def _lose(self, error: EnvFault | TaskError) -> None:
        self._fail(error)
        self._on_lost(self)

    def _fail(self, error: EnvFault | TaskError) -> None:
        self._lost = error
        for call in (self._current, *self._queue, *self._later):
            if call:
                call.fail(error)
        self._queue.clear()
        self._later.clear()


def _error(reply: dict[str, Any]) -> EnvFault | TaskError:
    return TaskError(reply["message"]) if reply["error"] == "task" else EnvFault(reply["message"])
