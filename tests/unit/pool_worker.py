"""A worker that plays a scripted world, for the tests of the pool (run as a script, not a test module)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from envs.base import EnvFault, ExpertMove, StepResult, Task, TaskError, TextEnv
from envs.worker import serve


class ScriptedWorld(TextEnv):
    """Does what the action, or the task's id at reset, says; first observation: process id and count of resets."""

    resets = 0

    def __init__(self, max_steps: int) -> None:
        super().__init__(max_steps)
        self.expert_steps = 7

    def _reset(self, task: Task, seed: int) -> StepResult:
        ScriptedWorld.resets += 1
        if task.id == "unknown":
            raise TaskError("task 'unknown' does not exist; choose another")
        self._do(task.id)
        return StepResult(f"{os.getpid()} {ScriptedWorld.resets}", goal=f"{task.id} {seed}")

    def _step(self, action: str) -> StepResult:
        if action == "win":
            return StepResult("won", score=1.0, won=True)
        return StepResult(self._do(action))

    def _do(self, what: str) -> str:
        verb, _, rest = what.partition(" ")
        if verb == "sleep":
            time.sleep(float(rest))
        elif verb == "hang":
            time.sleep(1000)
        elif verb == "die":
            print("last words", file=sys.stderr)
            os._exit(3)
        elif verb == "raise":
            raise ZeroDivisionError("no such number")
        elif verb == "fault":
            raise EnvFault("the simulator is gone")
        elif verb == "print":
            print("print")
            sys.stdout.flush()
            os.write(1, b'{"ok": "raw"}\n')
            subprocess.run(["echo", "child"], check=True)
            subprocess.run(["cat"], check=True)  # ends at once: the requests are out of its reach
        elif verb == "spawn":
            return str(subprocess.Popen(["sleep", "1000"]).pid)
        elif verb == "time":
            return repr(time.monotonic())
        return f"did {what}"

    def admissible(self) -> list[str]:
        return ["\ud800", "x" * 300_000]

    def expert(self) -> ExpertMove:
        if self.steps:
            raise EnvFault("no expert here")
        self.expert_steps = 8
        return ExpertMove("win", "I win.")

    def close(self) -> None: ...


def make_world(spec: dict[str, Any]) -> ScriptedWorld:
    if spec["name"] == "missing":
        raise TaskError("env.name 'missing': install it")
    return ScriptedWorld(spec["max_steps"])


if __name__ == "__main__":
    serve(make_world)
