"""Predicates: principles as checks of proposed actions, evaluated where they can do no harm.

A predicate is a pair of CEL expressions over a read-only context: it is *violated* where its trigger holds and its
requirement does not. Both come from language models, so they are untrusted twice over: :mod:`memory.expressions` bounds
their cost before they are evaluated, and :class:`PredicateHost` evaluates them in processes that it kills when they are
late, without making the agent wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from memory.expressions import BOOL, INT, MAX_COST, ExpressionError, Type, compile_expression, list_of, text
from memory.predicate_worker import HISTORY
from memory.records import MemoryRecordError, Predicate, TraceStep

_ACTION, _ARGS, _NAME, _OBSERVATION, _RESULT, _GOAL, _TYPE = 300, 5, 100, 2000, 500, 1000, 100
"""Most characters of each text; of the arguments, most of them."""
_ADMISSIBLE, _INVENTORY = 100, 50

_ACTION_FIELDS = {"text": text(_ACTION), "verb": text(_ACTION), "args": list_of(text(_NAME), _ARGS)}
_ENTRY_FIELDS = {
    "action": text(_ACTION),
    "verb": text(_ACTION),
    "args": list_of(text(_NAME), _ARGS),
    "result": text(_RESULT),
    "valid": BOOL,
}
CONTEXT: Mapping[str, Type] = {
    "action": Type("record", fields=_ACTION_FIELDS),
    "admissible": list_of(text(_ACTION), _ADMISSIBLE),
    "observation": text(_OBSERVATION),
    "goal": text(_GOAL),
    "task_type": text(_TYPE),
    "step": INT,
    "history": list_of(Type("record", fields=_ENTRY_FIELDS), HISTORY),
    "inventory": list_of(text(_NAME), _INVENTORY),
}
"""What a predicate sees. ``action``: the proposed one; ``verb``: its template, as ``take {0} from {1}``; ``args``: the
names in its slots. ``admissible``: the actions that the world would accept; empty where the agent is not shown them
(``agent.show_admissible``), cut to 100 (the proposed one stays). ``step``: number of turns before this one.
``history``: the actions before this one with what the world answered, newest last, at most 50; turns without an action
are not in it. ``valid``: false where the world refused the action. ``inventory``: names of what the agent holds, where
the world tells it unasked (ALFWorld and households do, other worlds and outside rollouts do not);
else empty, as in the audit on trajectories recorded without it. What was taken stands in ``history`` too."""

Parse = Callable[[str], tuple[str, tuple[str, ...]]]
"""An action's template and arguments, as :meth:`memory.grammar.ActionGrammar.parse` gives them."""

Context = dict[str, Any]

Outcome = Literal["idle", "followed", "violated", "error", "unjudged"]
"""``idle``: the trigger does not hold. ``followed``, ``violated``: it holds, and the requirement does or does not.
``error``: it was refused, raised or took too long. ``unjudged``: no verdict in time, through no fault of its own."""


@dataclass(frozen=True)
class Verdict:
    """``note``: what was wrong, of an error."""

    outcome: Outcome
    note: str = ""


@dataclass(frozen=True)
class CompiledPredicate:
    """``source``: CEL that yields 0 (idle), 1 (followed) or 2 (violated); ``names``: what it reads of the context."""

    source: str
    cost: int
    names: frozenset[str]


@lru_cache(maxsize=4096)
def compile_predicate(predicate: Predicate) -> CompiledPredicate:
    """The static check: nothing is evaluated. Raises ExpressionError with what to change."""
    parts = []
    for field in ("trigger", "requirement"):
        try:
            parts.append(compile_expression(getattr(predicate, field), CONTEXT))
        except ExpressionError as error:
            raise ExpressionError(f"{field}: {error}") from None
    trigger, requirement = parts
    cost = trigger.cost + requirement.cost
    if cost > MAX_COST:
        raise ExpressionError(f"trigger and requirement can cost {cost} steps, {MAX_COST} are allowed; simplify one")
    source = f"({trigger.source}) ? (({requirement.source}) ? 1 : 2) : 0"
    return CompiledPredicate(source, cost, trigger.names | requirement.names)


def make_context(
    action: str,
    parse: Parse,
    *,
    observation: str,
    goal: str = "",
    task_type: str = "",
    step: int = 0,
    history: Sequence[Mapping[str, Any]] = (),
    admissible: Sequence[str] | None = None,
    inventory: Sequence[str] | None = None,
) -> Context:
    """The context of a proposed action, every part capped as :data:`CONTEXT` says.

    Args:
        history: entries that :func:`history_entry` made, newest last; the newest 50 are taken.
        step: turns before this one, those without an action included.
    """
    return {
        "action": action_value(action, parse),
        "admissible": _admissible(action, admissible),
        "observation": _cut(observation, _OBSERVATION),
        "goal": _cut(goal, _GOAL),
        "task_type": _cut(task_type, _TYPE),
        "step": step,
        "history": list(history[-HISTORY:]),
        "inventory": [_cut(name, _NAME) for name in (inventory or ())[:_INVENTORY]],
    }


def action_value(action: str, parse: Parse) -> dict[str, Any]:
    """``action`` as predicates see it."""
    verb, args = parse(action)
    return {
        "text": _cut(action, _ACTION),
        "verb": _cut(verb, _ACTION),
        "args": [_cut(name, _NAME) for name in args[:_ARGS]],
    }


def history_entry(action: str, parse: Parse, result: str, valid: bool | None) -> dict[str, Any]:
    """A played action as later predicates see it. ``valid`` None (the source does not tell) counts as accepted."""
    value = action_value(action, parse)
    return {
        "action": value["text"],
        "verb": value["verb"],
        "args": value["args"],
        "result": _cut(result, _RESULT),
        "valid": valid is not False,
    }


def _admissible(action: str, admissible: Sequence[str] | None) -> list[str]:
    if not admissible:
        return []
    shown = list(admissible[:_ADMISSIBLE])
    if len(admissible) > _ADMISSIBLE and action in admissible and action not in shown:
        shown[-1] = action
    return [_cut(name, _ACTION) for name in shown]


def _cut(value: str, size: int) -> str:
    """At most ``size`` characters; halves of surrogate pairs, which CEL cannot hold, become question marks."""
    value = value[:size]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class Step:
    """One step of a bulk evaluation. ``values``: context names that change; ``push``: what enters the history after."""

    values: Mapping[str, Any]
    push: Mapping[str, Any] | None = None


def trajectory_steps(steps: Iterable[TraceStep], parse: Parse, goal: str, task_type: str) -> list[tuple[int, Step]]:
    """A recorded trajectory as predicates would have seen it live: (position, step) of each step that has an action."""
    found = []
    for position, step in enumerate(steps):
        if step.action is None:
            continue
        values = make_context(
            step.action,
            parse,
            observation=step.observation,
            goal=goal,
            task_type=task_type,
            step=position,
            admissible=step.admissible,
            inventory=step.inventory,
        )
        del values["history"]  # grows by what the steps push
        found.append((position, Step(values, history_entry(step.action, parse, step.result, step.valid))))
    return found


class PredicateHost:
    """Evaluates predicates in worker processes, for any number of episodes at once.

    A check never holds an agent up for longer than ``deadline``: a predicate that hangs costs its worker, which is
    killed and replaced while the other workers go on; what has no verdict then is ``unjudged``. Thread-safe, and bound
    to no event loop.

    Args:
        workers: processes kept ready (0.1 s to start, 30 MB each); with one, nothing is judged while it is replaced.
        deadline: seconds that a check may take, waiting included.

    Raises:
        MemoryRecordError: a worker does not start.
    """

    def __init__(self, workers: int = 2, deadline: float = 0.05) -> None:
        self.deadline = deadline
        self.killed = 0
        """Workers that were killed, or died."""
        self.unjudged = 0
        """Verdicts that were not reached in time, through no fault of the predicate."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(max_workers=2 * workers, thread_name_prefix="predicates")
        try:
            self._start()
        except MemoryRecordError:
            self._threads.shutdown()
            raise
        self._starting: list[Future[None]] = [self._threads.submit(self._start) for _ in range(workers - 1)]

    def wait_ready(self) -> None:
        """Wait until all workers have started (checks need not). Raises MemoryRecordError."""
        for start in self._starting:
            start.result()

    async def check(self, predicates: Mapping[str, Predicate], context: Context) -> dict[str, Verdict]:
        """The verdict of each predicate on the context's action, in one round trip, within the deadline."""
        started = time.monotonic()
        if self._closed.is_set():
            return self._count({name: Verdict("unjudged") for name in predicates})
        loop = asyncio.get_running_loop()
        check = loop.run_in_executor(self._threads, self._check, dict(predicates), context, started)
        # wait, not wait_for: a verdict that has come counts, even where the loop was too busy to look.
        done, _ = await asyncio.wait({check}, timeout=max(0.0, started + self.deadline - time.monotonic()))
        return self._count(check.result() if done else {name: Verdict("unjudged") for name in predicates})

    def check_now(self, predicates: Mapping[str, Predicate], context: Context) -> dict[str, Verdict]:
        """:meth:`check` for callers without an event loop."""
        return self._count(self._check(dict(predicates), context, time.monotonic()))

    def check_steps(
        self, predicates: Sequence[CompiledPredicate], steps: Sequence[Step], seconds: float
    ) -> list[list[Verdict]] | None:
        """Bulk evaluation of consecutive steps: verdicts[step][predicate]; None: it took more than ``seconds``.

        Raises:
            MemoryRecordError: no worker is left.
        """
        try:
            worker = self._idle.get(timeout=_START_SECONDS)
        except queue.Empty:
            raise MemoryRecordError("no process that evaluates predicates is left; start the command again") from None
        names = frozenset[str]().union(*(predicate.names for predicate in predicates))
        request = _request([predicate.source for predicate in predicates], names, [], steps, seconds, stream=False)
        wanted = len(predicates) * len(steps)
        results = worker.exchange(request, wanted, time.monotonic() + seconds)
        self._release(worker, alive=len(results) == wanted)
        if len(results) < wanted or any(verdict.outcome == "unjudged" for verdict in results):
            return None
        width = len(predicates)
        return [results[start : start + width] for start in range(0, wanted, width)]

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in list(self._workers):
            self._discard(worker)

    def __enter__(self) -> PredicateHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
        missing = sum(verdict.outcome == "unjudged" for verdict in verdicts.values())
        with self._lock:
            self.unjudged += missing
        return verdicts

    def _check(self, predicates: dict[str, Predicate], context: Context, started: float) -> dict[str, Verdict]:
        verdicts = {name: Verdict("unjudged") for name in predicates}
        compiled: dict[str, CompiledPredicate] = {}
        for name, predicate in predicates.items():
            try:
                compiled[name] = compile_predicate(predicate)
            except ExpressionError as error:
                verdicts[name] = Verdict("error", f"refused: {error}")
        # The cheapest first, so that a slow one is the last to take the others' time.
        order = sorted(compiled, key=lambda name: (compiled[name].cost, name))
        # Of the deadline, two fifths are for waiting and two for the worker, which is killed then; the agent goes on
        # after the whole. A worker begins nothing in the last two fifths of its time: what is late had time to run.
        worker = self._take(started + 0.4 * self.deadline) if order else None
        kill_at = started + 0.8 * self.deadline
        if worker is None:
            return verdicts
        names = frozenset[str]().union(*(compiled[name].names for name in order))
        step = Step({name: value for name, value in context.items() if name != "history"})
        request = _request(
            [compiled[name].source for name in order],
            names,
            context["history"],
            [step],
            0.6 * (kill_at - time.monotonic()),
            stream=True,
        )
        results = worker.exchange(request, len(order), kill_at)
        verdicts.update(zip(order, results, strict=False))
        complete = len(results) == len(order)
        if not complete and worker.begun:
            late = f"took more than {1000 * self.deadline:.0f} ms, or ended its process"
            verdicts[order[len(results)]] = Verdict("error", late)
        self._release(worker, alive=complete)
        return verdicts

    def _take(self, end: float) -> _Worker | None:
        left = end - time.monotonic()
        try:
            return self._idle.get(timeout=left) if left > 0 else None
        except queue.Empty:
            return None

    def _start(self) -> None:
        worker = _Worker()
        with self._lock:
            self._workers.add(worker)
        try:
            worker.wait_ready()
        except MemoryRecordError:
            self._discard(worker)
            if not self._closed.is_set():
                raise
            return
        if self._closed.is_set():
            self._discard(worker)
        else:
            self._idle.put(worker)

    def _restart(self) -> None:
        """Start a worker in place of a lost one; three times, should the machine be short of something."""
        for pause in (0.0, 1.0, 10.0):
            if self._closed.wait(pause):
                return
            with contextlib.suppress(MemoryRecordError, OSError):
                self._start()
                return

    def _release(self, worker: _Worker, *, alive: bool) -> None:
        if alive:
            self._idle.put(worker)
            return
        self._discard(worker)
        with self._lock:
            self.killed += 1
        if not self._closed.is_set():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._threads.submit(self._restart)

    def _discard(self, worker: _Worker) -> None:
        worker.discard()
        with self._lock:
            self._workers.discard(worker)


def _request(
    sources: list[str],
    names: frozenset[str],
    history: Sequence[Mapping[str, Any]],
    steps: Sequence[Step],
    seconds: float,
    *,
    stream: bool,
) -> bytes:
    """A request as :mod:`memory.predicate_worker` reads it; only what the predicates read is sent."""
    pushes = "history" in names
    body = {
        "sources": sources,
        "names": sorted(names),
        "history": history if pushes else [],
        "stream": stream,
        "seconds": max(0.0, seconds),
        "steps": [
            {
                "set": {name: value for name, value in step.values.items() if name in names},
                "push": step.push if pushes else None,
            }
            for step in steps
        ],
    }
    data = json.dumps(body).encode()
    return len(data).to_bytes(4, "big") + data


_START_SECONDS = 60.0
_VERDICTS = {
    ord("0"): Verdict("idle"),
    ord("1"): Verdict("followed"),
    ord("2"): Verdict("violated"),
    ord("s"): Verdict("unjudged"),
}


class _Worker:
    """One worker process and its pipes."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("predicate_worker.py")
        # No environment: nothing in it is the worker's business, least of all keys.
        kept = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(script)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in kept if name in os.environ},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self.begun = False
        """Whether it has begun to evaluate the latest request (or sent anything else)."""

    def wait_ready(self) -> None:
        if self._read(time.monotonic() + _START_SECONDS) != b"r":
            raise MemoryRecordError(
                "the process that evaluates predicates does not start; install common-expression-language, or run "
                f"{sys.executable} -I {Path(__file__).with_name('predicate_worker.py')} to see why"
            )

    def exchange(self, request: bytes, wanted: int, end: float) -> list[Verdict]:
        """Send ``request`` and read ``wanted`` verdicts; fewer: time was over at ``end``, or the process ended."""
        self.begun = False
        if not self._write(request, end):
            return []
        results: list[Verdict] = []
        data = b""
        while len(results) < wanted:
            piece = self._read(end)
            if not piece:
                break
            self.begun = True
            data = _parse(data + piece, results)
        return results

    def kill(self) -> None:
        """End the process; whoever reads from it finds the end of its answer."""
        self._process.kill()

    def discard(self) -> None:
        """Kill it and let go of its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _write(self, data: bytes, end: float) -> bool:
        view = memoryview(data)
        while view:
            if not _ready(self._in, select.POLLOUT, end):
                return False
            try:
                view = view[os.write(self._in, view) :]
            except OSError:
                return False
        return True

    def _read(self, end: float) -> bytes:
        """What has come; empty: nothing did until ``end``, or the process ended."""
        if not _ready(self._out, select.POLLIN, end):
            return b""
        try:
            return os.read(self._out, 1 << 16)
        except OSError:
            return b""


def _ready(pipe: int, event: int, end: float) -> bool:
    """Whether ``pipe`` is ready, or closed at the other end, before ``end``."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, 1000 * (end - time.monotonic()))))


def _parse(data: bytes, results: list[Verdict]) -> bytes:
    """Append the verdicts that ``data`` holds to ``results``; returns what is not yet complete."""
    at = 0
    while at < len(data):
        code = data[at]
        if code == ord("e"):
            end = data.find(b"\n", at)
            if end < 0:
                break
            results.append(Verdict("error", data[at + 1 : end].decode(errors="replace")))
            at = end
        elif code != ord("b"):
            results.append(_VERDICTS[code])
        at += 1
    return data[at:]
