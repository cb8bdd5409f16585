"""A run of ``saga train`` that kills itself (SIGKILL) at the moment when it would touch a file, in a child process.

The children are forks of a server that has imported everything, so that a run of a tiny model costs seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import train.rollouts
from train.agent import Job
from train.cli import main
from train.trajectory import Episode

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["train.loop", "train.hf_model", "tests.integration.killed"])


@dataclass(frozen=True)
class Moment:
    """Before ``event`` (a name of Python's audit events) at a path that ends with ``path``.

    ``holds``: what the file that is put in its place must hold ("": anything).
    """

    event: str
    path: str
    holds: str = ""

    def is_now(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event != self.event:
            return False
        source, target = arguments[0], arguments[1 if event == "os.rename" else 0]
        if not isinstance(target, str | os.PathLike) or not str(target).endswith(self.path):
            return False
        return not self.holds or self.holds in Path(source).read_text()


def train_in_child(folder: Path, *flags: str, kill: Moment | None = None, shift: float = 0.0) -> int:
    """``saga train demo.yaml FLAGS…`` in ``folder``; its exit code, negative where a signal ended it.

    Rollout k of a group gets the return k mod 2, whatever it did; ``shift``: nats added to what the sampler says of its
    tokens. What it prints is appended to the file ``stdout``.
    """
    child = _CONTEXT.Process(target=_train, args=(folder, flags, kill, shift))
    child.start()
    child.join(timeout=600)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode is not None
    return child.exitcode


def _train(folder: Path, flags: tuple[str, ...], kill: Moment | None, shift: float) -> None:
    os.chdir(folder)
    sys.stdout = (folder / "stdout").open("a")
    sys.stderr = sys.stdout
    train.rollouts.play_episode = _with_hand_set_returns(train.rollouts.play_episode, shift)
    if kill:
        sys.addaudithook(lambda event, arguments: _end() if kill.is_now(event, arguments) else None)
    sys.argv = ["saga", "train", "demo.yaml", *flags]
    try:
        main()
    finally:
        sys.stdout.flush()


def _end() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _with_hand_set_returns(play: Callable[..., Any], shift: float) -> Callable[..., Any]:
    async def play_and_change(pool: Any, player: Any, job: Job, max_steps: int) -> Episode:
        episode: Episode = await play(pool, player, job, max_steps)
        episode.steps[-1].reward = float(int(job.id.rpartition("-")[2]) % 2)
        for context in episode.contexts:
            for span in context.spans:
                span.logprobs = [value + shift for value in span.logprobs or []]
        return episode

    return play_and_change
