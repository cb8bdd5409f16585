"""What one episode leaves behind, and its file format: gzip-compressed JSON lines, one member per episode.

Every episode is written as a gzip member of its own and flushed to disk when it ends, so a killed job loses nothing
that had ended, and the file stays readable by ``zcat``. Everything needed to train on the episode (token ids and
sampling log-probabilities), to replay it (task, seed, actions) and to audit it (observations, raw model text) is in it.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from memory.usage import MemoryUse, Recall, Regulation

SCHEMA_VERSION = 3

Status = Literal["ok", "env_error", "model_error"]
"""``ok``: the episode ran to its end (won, lost or capped). The others are faults: never a success, never dropped."""


Role = Literal["action", "plan", "instantiation", "summary", "note"]
"""What a generation was for: the turn that acts, the plan, an instantiated principle, a state summary, the note on a
lost try of the same task."""


class TrajectoryError(ValueError):
    """A trajectory file that cannot be read: names the file, the episode and the remedy."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Span(_Record):
    """Tokens ``ids[start:end]`` of a context that one model call generated.

    ``logprobs``: log-probability of each token under the distribution it was sampled from, shape (end - start,);
    None when no model sampled them (demonstrations). ``trained``: False for tokens that no loss may touch (an inserted
    mistake of a recovery demonstration, a rejected attempt). ``adapter``: version that produced it.
    """

    start: int
    end: int
    step: int
    role: Role = "action"
    adapter: str = "base"
    logprobs: list[float] | None = None
    trained: bool = True


class Context(_Record):
    """One append-only token sequence: prompts and generations as the model saw them. It becomes one training row.

    A dropped turn starts a new context; generations copied into it are plain context there (no span), so that every
    generated token lies in exactly one span of the episode.
    """

    ids: list[int]
    spans: list[Span]


class Step(_Record):
    """One turn: what the agent saw, wrote and did, and what the world answered."""

    index: int
    observation: str
    text: str
    thought: str | None = None
    action: str | None = None
    """None: the text held no action (malformed): the world was not asked, the turn counts as an invalid action."""
    valid: bool = True
    reward: float = 0.0
    score: float = 0.0
    done: bool = False
    result: str = ""
    """The world's answer to the action."""
    admissible: list[str] | None = None
    inventory: list[str] | None = None
    """What the agent held before the action, where the world tells it."""
    regulation: Regulation | None = None
    """What the predicates of the memory said of the proposed actions; None: nothing was checked."""
    recall: Recall | None = None
    """What the table of state-thought values gave; None: it was not asked."""
    note: str = ""
    """What the policy wrote before the first step on the try before, which was lost; "": it wrote none."""
    state: str = ""
    """The state in which the agent acted, as the summary of what it had seen and done (no hint is in it); "": the
    observation stands for it."""


class Episode(_Record):
    """A finished episode (trajectory), or one that a fault ended."""

    schema_version: int = SCHEMA_VERSION
    id: str
    phase: str
    env: str
    task: str
    task_type: str
    seed: int
    group: str = ""
    goal: str = ""
    agent: str = "policy"
    model: str = ""
    adapter: str = "base"
    status: Status = "ok"
    error: str | None = None
    won: bool = False
    truncated: bool = False
    score: float = 0.0
    episode_return: float = 0.0
    """Sum of environment rewards (without penalties, which are the learner's)."""
    memory: MemoryUse | None = None
    """What was retrieved, instantiated and shown; None: played without memory."""
    steps: list[Step] = []
    contexts: list[Context] = []
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    env_seconds: float = 0.0
    expert_steps: int | None = None
    """Length of a known solution, where the world tells one (for SPL)."""

    @property
    def invalid_actions(self) -> int:
        return sum(not step.valid for step in self.steps)


def append_episode(path: Path, episode: Episode) -> None:
    """Write ``episode`` at the end of ``path`` and flush it to the disk before returning."""
    member = gzip.compress(episode.model_dump_json().encode() + b"\n", compresslevel=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(member)
        file.flush()
        os.fsync(file.fileno())


def read_episodes(path: Path, *, repair: bool = False) -> Iterator[Episode]:
    """Yield the episodes of ``path`` in file order.

    Args:
        repair: cut a truncated tail (a write that a kill interrupted) off the file instead of raising.
            Only the run that owns the file does this.

    Raises:
        TrajectoryError: missing file, truncated or damaged data, an unknown schema version, an invalid record.
    """
    if not path.is_file():
        raise TrajectoryError(f"trajectory file {path} does not exist; name a run folder or a *.jsonl.gz in one")
    data = path.read_bytes()
    start = 0
    number = 0
    while start < len(data):
        number += 1
        member = zlib.decompressobj(wbits=31)
        try:
            text = member.decompress(data[start:])
            complete = member.eof
        except zlib.error as error:
            raise TrajectoryError(
                f"{path}: episode {number} (byte {start}) is not gzip data ({error}); restore the file from a copy"
            ) from None
        if not complete:
            if not repair:
                raise TrajectoryError(
                    f"{path}: truncated in episode {number} (byte {start} of {len(data)}); "
                    f"the {number - 1} before it are whole: resume the run with --resume, which cuts the torn tail"
                )
            os.truncate(path, start)
            return
        for line in text.decode().splitlines():
            yield _parse(path, number, line)
        start = len(data) - len(member.unused_data)


def _parse(path: Path, number: int, line: str) -> Episode:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrajectoryError(f"{path}: episode {number} is not JSON ({error}); restore the file") from None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        raise TrajectoryError(
            f"{path}: episode {number}: schema_version {version!r}; this version reads {SCHEMA_VERSION}"
        )
    try:
        return Episode.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise TrajectoryError(f"{path}: episode {number}: {field}: {first['msg']}") from None
