"""What using the memory in one episode leaves behind, for the trajectory. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from memory.records import Record
from memory.settings import Mode


class Retrieved(Record):
    """An item that was found. ``score`` is the sum of its three parts, which are already weighted.

    ``level`` and ``status`` are those at the time; a trajectory has no status.
    """

    item: str
    level: int
    status: str = ""
    similarity: float
    task_type: float
    utility: float
    score: float


class Instantiation(Record):
    """What became of a retrieved item. ``text``: what was shown; "" where it was suppressed for ``reason``."""

    item: str
    text: str = ""
    reason: str = ""

    @property
    def suppressed(self) -> bool:
        return not self.text


Outcome = Literal["idle", "followed", "violated", "error", "unjudged"]
"""``idle``: the trigger did not hold. ``followed``, ``violated``: it did, and the requirement did or did not.
``error``: the predicate raised or took too long, and is switched off for the rest of the episode. ``unjudged``: no
verdict in time, through no fault of its own; it does not block."""


class Check(Record):
    """One predicate on one proposed action. ``item``: the principle that it belongs to; ``attempt`` 0: the original."""

    item: str
    attempt: int
    outcome: Outcome
    note: str = ""


Choice = Literal["original", "resampled", "fallback"]
"""Which proposal was played: the first, which passed; a later one, which passed; or the first, because none did."""


class Regulation(Record):
    """The checks of one step. ``proposals``: the actions proposed, in order; None: a reply without an action."""

    proposals: tuple[str | None, ...]
    checks: tuple[Check, ...] = ()
    choice: Choice = "original"

    @property
    def played(self) -> int:
        """The attempt whose action was played."""
        return len(self.proposals) - 1 if self.choice == "resampled" else 0


class MemoryUse(Record):
    """What an episode began with. ``snapshot``: of the memory that was searched; ``tokens``: length of ``text``."""

    mode: Mode
    snapshot: str
    plan: str = ""
    retrieved: tuple[Retrieved, ...] = ()
    instantiations: tuple[Instantiation, ...] = ()
    text: str = ""
    """What the prompt held, as it was shown."""
    tokens: int = 0


class Recall(Record):
    """What the table of state-thought values gave for one step. ``snapshot``: of the table that was read.

    ``state``: number of the matching state, None where there was none; ``similarity``: cosine with the nearest one.
    ``thought``: "": nothing was recalled, because nothing was known or because the agent was to explore
    (``explored``). ``shown``: the words of it that the prompt held, "" where there is no prompt. ``followed``: whether
    the agent's thought was the recalled one; None: nothing was recalled.
    """

    snapshot: str
    state: int | None = None
    similarity: float = 0.0
    thought: str = ""
    shown: str = ""
    value: float = 0.0
    visits: int = 0
    mode: Literal["replace", "hint"] = "replace"
    explored: bool = False
    followed: bool | None = None
