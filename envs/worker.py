"""A process that plays text worlds for :class:`envs.pool.EnvPool`: one request line in, one answer line out.

Started as ``python -m envs.worker``. The protocol is JSON lines on what were standard input and output when the process
started; both are then put out of the reach of libraries, whose prints land on standard error. Requests are
``{"op": "start", "spec": …}`` (once, first), ``{"op": "reset", "slot", "task", "seed"}`` and ``{"op": "step" |
"admissible" | "expert", "slot", …}``. Answers are ``{"ok": …, "seconds": …}`` (the time the world took), or
``{"error": "task" | "fault", "message": …}``.

The process never outlives the pool: it ends at the end of its input, and on Linux the kernel kills it with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from envs.base import EnvFault, Task, TaskError, TextEnv

MakeEnv = Callable[[dict[str, Any]], TextEnv]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def serve(make_env: MakeEnv) -> None:
    """Answer requests until the input ends. Worlds are made by ``make_env(spec)`` when a slot is first used."""
    _die_with_parent()
    requests, answers = _take_over_stdio()
    games = _Games(make_env)
    with requests, answers:
        for line in requests:
            answers.write(json.dumps(_answer(games, json.loads(line))) + "\n")
            answers.flush()
        games.close()


def _answer(games: _Games, request: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        result = games.handle(request)
    except TaskError as error:
        return {"error": "task", "message": str(error)}
    except EnvFault as error:
        return {"error": "fault", "message": str(error)}
    except Exception as error:  # a simulator may raise anything; whatever it is, the episode is lost and says why
        return {"error": "fault", "message": f"{request['op']}: {type(error).__name__}: {error}"}
    return {"ok": result, "seconds": time.perf_counter() - began}


class _Games:
    """The worlds of this process by slot."""

    def __init__(self, make_env: MakeEnv) -> None:
        self._make_env = make_env
        self._spec: dict[str, Any] = {}
        self._envs: dict[int, TextEnv] = {}

    def handle(self, request: dict[str, Any]) -> Any:
        op = request["op"]
        if op == "start":
            self._spec = request["spec"]
            # The first world now: imports (and the first JVM) load while the trainer is still busy elsewhere.
            self._envs[0] = self._make_env(self._spec)
            return None
        if op == "reset":
            return self._reset(request["slot"], Task(**request["task"]), request["seed"])
        env = self._envs[request["slot"]]
        if op == "step":
            return asdict(env.step(request["action"]))
        if op == "admissible":
            return list(env.admissible())
        return {"move": asdict(env.expert()), "expert_steps": _expert_steps(env)}

    def _reset(self, slot: int, task: Task, seed: int) -> dict[str, Any]:
        if slot not in self._envs:
            self._envs[slot] = self._make_env(self._spec)
        env = self._envs[slot]
        first = env.reset(task, seed)
        return {"first": asdict(first), "expert_steps": _expert_steps(env)}

    def close(self) -> None:
        for env in self._envs.values():
            env.close()


def _expert_steps(env: TextEnv) -> int | None:
    """Length of a known solution, from the worlds that know one."""
    return getattr(env, "expert_steps", None)


def _take_over_stdio() -> tuple[Any, Any]:
    """The private ends of the pool's pipes; file descriptors 0 and 1 become /dev/null and standard error."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _die_with_parent() -> None:
    """Have the kernel kill this process when the pool's process dies, even while a game hangs (Linux only).

    Elsewhere the end of the input does it, as soon as the running call returns. Children of this process (JVMs) hold
    a pipe from it and end with it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # A parent that died before this line closed its end of the pipe: the input is at its end already.


if __name__ == "__main__":
    from envs.make import make_env

    serve(make_env)
