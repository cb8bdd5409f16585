"""One worker process seen from the pool: start it, ask it one thing at a time, learn how it ended, end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from envs.base import EnvFault

_GRACE_S = 1.0  # a second look at the pipe after a time limit, which may have passed while the event loop was blocked
_STOP_S = 5.0  # for closing the worlds (JVMs) before the process is killed
_LINE_BYTES = 2**26  # longest answer: ScienceWorld lists up to 9,000 admissible actions


class WorkerProcess:
    """A running ``envs.worker`` process and the pipes to it.

    ``exited`` completes with its exit code (-n: killed by signal n).
    """

    def __init__(self, process: asyncio.subprocess.Process, stderr: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._pid = process.pid
        self._requests = process.stdin
        self._answers = process.stdout
        self._stderr = stderr
        self._resting = True
        self.exited = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str]) -> Self:
        """Raises OSError when ``command`` cannot be run."""
        package_root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - a file, so that nobody must drain it; closed by stop()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except BaseException:
            stderr.close()
            raise
        return cls(process, stderr)

    async def ask(self, request: dict[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        """Send one request and read its answer. ``what`` names it in messages.

        Raises:
            EnvFault: the process died, or did not answer within ``timeout_s``. It must be stopped then.
        """
        self._resting = False
        self._requests.write(json.dumps(request).encode() + b"\n")
        reading = asyncio.create_task(self._answers.readline())
        try:
            for patience in (timeout_s, _GRACE_S):
                await asyncio.wait({reading}, timeout=patience)
                if reading.done():
                    break
            else:
                raise EnvFault(f"{what}: no answer within {timeout_s:g} s; its worker was replaced")
        finally:
            reading.cancel()
        line = reading.result()
        if not line.endswith(b"\n"):
            raise await self.death(what)
        self._resting = True
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def death(self, what: str) -> EnvFault:
        """How the process ended and what it printed last."""
        await asyncio.wait({self.exited}, timeout=_STOP_S)
        code = self.exited.result() if self.exited.done() else None
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        said = next((line.strip() for line in reversed(tail.split("\n")) if line.strip()), "")
        return EnvFault(f"{what}: its worker died ({how})" + (f"; it last printed: {said}" if said else ""))

    async def stop(self) -> None:
        """End the process and everything it started: politely when it is at rest, so that its worlds can close."""
        if self._resting:
            self._requests.close()
            await asyncio.wait({self.exited}, timeout=_STOP_S)
        # The worker leads a process group of its own: JVMs and planners go with it, even when it is dead already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        await self.exited
        self._requests.close()
        self._stderr.close()
