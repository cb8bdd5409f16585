"""The records of the four levels and the links between them (SAGA, arXiv 2610.06964).

Level 0 trajectory (never edited) -> level 1 episode -> level 2 procedure -> level 3 principle. A link joins two
adjacent levels, says whether the lower record supports or contradicts the upper one, and cites steps of trajectories.
Ids are hashes of what a record claims, so that the same claim, found twice, is one record.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Level = Literal[0, 1, 2, 3]
LEVEL_NAMES = ("trajectory", "episode", "procedure", "principle")

Status = Literal["candidate", "audited", "validated", "rejected", "retired"]
"""A principle's life: a builder's output is a ``candidate``; its predicate passed the audit: ``audited``; it helped in
the validation experiment: ``validated``; it failed one of the two: ``rejected``; taken out later, or consolidated into
another record: ``retired``. Episodes and procedures are ``candidate`` until they are ``retired``."""

TrajectoryStatus = Literal["complete", "truncated", "odd"]
"""``complete``: ends with a stated outcome. ``truncated``: breaks off. ``odd``: parsed, but something in it is not as
the format says (``note`` tells what)."""


class MemoryRecordError(ValueError):
    """A record, file or snapshot that memory cannot take: names the field, the value and the remedy (exit code 2)."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TraceStep(Record):
    """One step of a trajectory. ``observation``: what the agent saw before it acted; ``result``: the world's answer."""

    index: int
    observation: str
    thought: str = ""
    action: str | None = None
    """None: the reply held no action."""
    result: str = ""
    valid: bool | None = None
    """Whether the world accepted the action; None where the source does not tell."""
    reward: float = 0.0
    admissible: tuple[str, ...] | None = None
    """The actions that the world would have accepted before this one, where they were recorded."""
    inventory: tuple[str, ...] | None = None
    """What the agent held before it acted, where the world told it."""


class Trajectory(Record):
    """Level 0: one rollout as it happened.

    ``grammar`` names the form of the actions (two versions of one world may differ): what was learnt in one grammar is
    never shown in another. ``source`` says where it came from: ``run:<name>/<episode id>`` or ``<file>#<line>``.
    """

    level: ClassVar[Level] = 0
    source: str
    world: str
    grammar: str
    task: str
    task_type: str = ""
    goal: str = ""
    agent: str = ""
    success: bool | None = None
    score: float = 0.0
    status: TrajectoryStatus = "complete"
    note: str = ""
    round: int = 0
    steps: tuple[TraceStep, ...] = ()

    @property
    def id(self) -> str:
        content = self.model_dump(mode="json", exclude={"round", "note"})
        for step in content["steps"]:
            if step["inventory"] is None:  # ids are those of before there was such a field
                del step["inventory"]
        return record_id("t", content)


class Evidence(Record):
    """Where a claim can be checked: a step of a trajectory, and words that stand in it.

    ``quote`` must occur, up to case and white space, in the step's observation, thought, action or result; "" quotes
    nothing.
    """

    trajectory: str
    step: int = Field(ge=0)
    quote: str = ""


class Item(Record):
    """What levels 1 to 3 share. ``round``: when it was built; ``builder``: ``offline`` or a model's name.

    Status, utility and removal are not part of the record: the store keeps them beside it, with their history.
    """

    level: ClassVar[Level]
    prefix: ClassVar[str]
    world: str
    grammar: str
    task_type: str = ""
    """"": of any type."""
    builder: str = "offline"
    round: int = 0

    @property
    def id(self) -> str:
        return record_id(self.prefix, self.model_dump(mode="json", exclude={"round", "builder"}))

    @abstractmethod
    def text(self) -> str:
        """What is embedded for retrieval, and shown to an agent."""


class KeyStep(Record):
    """A step that mattered. ``what``: what it changed or showed."""

    step: int = Field(ge=0)
    what: str


class EpisodeItem(Item):
    """Level 1: what happened in one trajectory."""

    level: ClassVar[Level] = 1
    prefix: ClassVar[str] = "e"
    trajectory: str
    goal: str
    outcome: Literal["success", "failure", "unknown"]
    key_steps: tuple[KeyStep, ...] = ()
    obstacles: tuple[str, ...] = ()

    def text(self) -> str:
        steps = "; ".join(key.what for key in self.key_steps)
        obstacles = f" Obstacles: {'; '.join(self.obstacles)}." if self.obstacles else ""
        return f"{self.goal} ({self.outcome}) {steps}.{obstacles}"


class ProcedureItem(Item):
    """Level 2: how a kind of task is done. ``steps`` are actions with slots in braces, as ``take {0} from {1}``."""

    level: ClassVar[Level] = 2
    prefix: ClassVar[str] = "p"
    when: str
    steps: tuple[str, ...]
    pitfalls: tuple[str, ...] = ()

    def text(self) -> str:
        pitfalls = f" Pitfalls: {'; '.join(self.pitfalls)}." if self.pitfalls else ""
        return f"When {self.when}: {' -> '.join(self.steps)}.{pitfalls}"


class Predicate(Record):
    """A principle as a check of actions: violated where ``trigger`` holds and ``requirement`` does not.

    Both are CEL expressions over the context that :mod:`memory.predicates` documents.
    """

    trigger: str
    requirement: str


class PrincipleItem(Item):
    """Level 3: a conditional rule. ``predicate``: only of principles whose violation is judged harmful."""

    level: ClassVar[Level] = 3
    prefix: ClassVar[str] = "r"
    condition: str
    guidance: str
    """What to do, or not to do, where the condition holds."""
    expected_effect: str = ""
    mechanism: str = ""
    scope: str = ""
    exceptions: tuple[str, ...] = ()
    predicate: Predicate | None = None

    def text(self) -> str:
        exceptions = f" Except: {'; '.join(self.exceptions)}." if self.exceptions else ""
        because = f" Because {self.mechanism}." if self.mechanism else ""
        return f"When {self.condition}: {self.guidance}.{because}{exceptions}"


AnyItem = EpisodeItem | ProcedureItem | PrincipleItem
ITEM_TYPES: dict[int, type[EpisodeItem] | type[ProcedureItem] | type[PrincipleItem]] = {
    1: EpisodeItem,
    2: ProcedureItem,
    3: PrincipleItem,
}


class Link(Record):
    """``lower`` (id, level n) supports or contradicts ``upper`` (id, level n + 1), as ``evidence`` shows."""

    lower: str
    upper: str
    relation: Literal["supports", "contradicts"] = "supports"
    evidence: tuple[Evidence, ...]

    @property
    def id(self) -> str:
        return record_id("l", self.model_dump(mode="json"))


def record_id(prefix: str, content: dict[str, Any]) -> str:
    """``prefix`` and 16 hex digits of the SHA-256 of the content's canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return f"{prefix}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"
