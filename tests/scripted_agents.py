"""An expert with mistakes for households, who reads constraints: without a language model, only what a text says helps.

:class:`MistakenExpert` plays the world's expert, but makes the mistakes of small models at fixed rates: it acts before
what the action needs was done, skips a step that the task asks for, and repeats what was just refused. It obeys any
constraint that it can read, right or wrong, from the prompt or from feedback alike (:func:`read_constraints`), and
passes over text that says nothing, such as shuffled words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from envs.alfworld_expert import NOTHING_HAPPENS, Goal, parse_goal, type_of
from envs.base import StepResult
from envs.pool import Session
from memory.guide import Guide
from memory.instantiate import Situation
from memory.usage import MemoryUse
from train.agent import Job, Turn
from train.prompts import reply_text
from train.trajectory import Context


@dataclass(frozen=True)
class Rates:
    """Chances of the mistakes, each time that there is an occasion, and of obeying what was read."""

    early: float = 0.35
    """Acting on a receptacle from afar, or before it is open."""
    skip: float = 0.6
    """Bringing the object before it is clean, hot or cool."""
    repeat: float = 0.6
    """The same action again after it was refused."""
    obedience: float = 0.9


@dataclass
class Past:
    """What was played: (action, answer), oldest first; the present observation; the task's words."""

    played: list[tuple[str, str]] = field(default_factory=list)
    observation: str = ""
    goal: str = ""

    @property
    def taken(self) -> list[str]:
        return [action for action, answer in self.played if answer != NOTHING_HAPPENS]

    @property
    def refused_since(self) -> set[str]:
        """The actions refused since something was taken."""
        refused: set[str] = set()
        for action, answer in self.played:
            refused = refused | {action} if answer == NOTHING_HAPPENS else set()
        return refused


@dataclass(frozen=True)
class Constraint:
    """A rule as it was read: about actions of a form ("": any), and what must hold, or must not, before one."""

    form: str
    kind: str
    """``first``, ``since``, ``before``, ``once``, ``never``, ``again``, ``seen``, ``says`` or ``says not``."""
    others: tuple[str, ...] = ()
    slot: int = 0
    thing: str = ""
    """The rule is only about things of this kind in ``slot``."""

    def broken(self, action: str, past: Past) -> bool:
        names = match(self.form, action) if self.form else ()
        if names is None or (self.thing and type_of(names[self.slot]) != self.thing):
            return False
        if self.kind == "again":
            return action in past.refused_since
        if self.kind == "never":
            return True
        if self.kind == "seen":
            return all(names[self.slot] not in text for _, text in [("", past.observation), *past.played])
        if self.kind in ("says", "says not"):
            return bool(re.search(fill(self.others[0], names), past.observation)) != (self.kind == "says")
        wanted = [fill(other, names) for other in self.others]
        hits = [[bool(re.fullmatch(pattern, done)) for done in past.taken] for pattern in wanted]
        if self.kind == "before":
            return not (hits[0] and hits[0][-1])
        last = [max((i for i, hit in enumerate(row) if hit), default=-1) for row in hits]
        if self.kind == "first":
            return last[0] < 0
        if self.kind == "once":
            return last[0] >= 0
        return last[0] <= last[1]  # since

    def instead(self, action: str) -> str:
        """What to do so that the constraint is kept: what it asks for, where that is an action; else look around."""
        names = match(self.form, action) if self.form else None
        if names is None or self.kind not in ("first", "since", "before"):
            return "look"
        wanted = re.sub(r"\{(\d)\}", lambda slot: names[int(slot[1])], self.others[0])
        return "look" if "…" in wanted else wanted


_SENTENCE = re.compile(r"When (.*?): (.*?)\.(?:\s|$)")
_QUOTED = re.compile(r"`([^`]+)`")


def read_constraints(text: str) -> list[Constraint]:
    """The sentences ``When <condition>: <what to do>.`` of ``text`` that say something about actions in backticks.

    - ``do `x` first`` (first), ``do `x` first, and not `y` after it`` (since), ``do `x` just before`` (before),
      ``do not do it once `x` has been done`` (once), ``do not do it`` (never);
    - ``do it only if {0} has been seen`` or ``is in what you see now`` (seen), ``do it only if what you see says "x"``
      or ``does not say "x"`` (says, says not);
    - after a refusal: ``not the same action again`` (again).
    """
    found = []
    for condition, guidance in _SENTENCE.findall(text):
        constraint = _read(condition, guidance)
        if constraint is not None:
            found.append(constraint)
    return found


def _read(condition: str, guidance: str) -> Constraint | None:
    if re.search(r"\bnot the same action again\b", guidance):
        return Constraint("", "again") if "was refused" in condition else None
    about = re.search(r"about to `([^`]+)`(?: and \{(\d)\} is an? (\w+))?", condition)
    if about is None:
        return None
    form, slot, thing = about[1], int(about[2] or 0), about[3] or ""
    others = tuple(_QUOTED.findall(guidance))
    if re.fullmatch(r"do `[^`]+` first, and not `[^`]+` after it", guidance):
        return Constraint(form, "since", others, slot, thing)
    if re.match(r"do `[^`]+` first", guidance):
        return Constraint(form, "first", others[:1], slot, thing)
    if re.fullmatch(r"do `[^`]+` just before", guidance):
        return Constraint(form, "before", others, slot, thing)
    if re.fullmatch(r"do not do it once `[^`]+` has been done", guidance):
        return Constraint(form, "once", others, slot, thing)
    if guidance == "do not do it":
        return Constraint(form, "never", (), slot, thing)
    said = re.fullmatch(r'do it only if what you see (says|does not say) "([^"]+)"', guidance)
    if said:
        return Constraint(form, "says" if said[1] == "says" else "says not", (said[2],), slot, thing)
    seen = re.fullmatch(r"do it only if \{(\d)\} (?:has been seen|is in what you see now)", guidance)
    return Constraint(form, "seen", (), int(seen[1]), thing) if seen else None


def match(form: str, action: str) -> tuple[str, ...] | None:
    """The names in the slots of ``form``, as ``take {0} from {1}``; None: ``action`` is of another form."""
    pattern = re.sub(r"\\\{\d\\\}", "(.+)", re.escape(form))
    found = re.fullmatch(pattern, action)
    return found.groups() if found else None


def fill(form: str, names: Sequence[str]) -> str:
    """A regular expression for ``form`` with ``names`` in its slots; an ellipsis stands for any name."""
    filled = re.sub(r"\{(\d)\}", lambda slot: names[int(slot[1])], form)
    return re.escape(filled).replace("…", ".+")


class MistakenExpert:
    """Plays one episode (see the module).

    Args:
        guide: of the memory; None: plays without.
    """

    agent = "mistaken expert"
    model = ""
    adapter = ""

    def __init__(self, job: Job, rates: Rates, guide: Guide | None, run_seed: int = 0) -> None:
        self._job = job
        self._rates = rates
        self._guide = guide
        self._random = random.Random(f"{run_seed}/{job.id}/{job.seed}")
        self._past = Past()
        self._constraints: list[Constraint] = []
        self._goal: Goal | None = None
        self._receptacles: list[str] = []
        self._last: str | None = None

    @property
    def memory(self) -> MemoryUse | None:
        return None if self._guide is None else self._guide.use

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        await self._notice(result, step)
        move = await session.expert()
        action = self._propose(move.action, [])
        regulation = None
        if self._guide is not None:
            told: list[Constraint] = []

            async def resample(feedback: str) -> str | None:
                told.extend(read_constraints(feedback))
                return self._propose(move.action, told)

            regulation = await self._guide.regulate(
                action, observation=result.observation, step=step, admissible=None, resample=resample
            )
            if regulation is not None:
                action = regulation.proposals[regulation.played] or action
        self._last = action
        return Turn(reply_text(action, None), None, action, regulation=regulation)

    async def _notice(self, result: StepResult, step: int) -> None:
        self._past.observation = result.observation
        if step == 0:
            self._past.goal = result.goal
            self._goal = parse_goal(result.goal)
            self._receptacles = re.findall(r"\ba ([a-z]+ \d+)", result.observation)
            if self._guide is not None:
                situation = Situation(result.goal, result.observation, self._job.task.type)
                self._constraints = read_constraints(await self._guide.open(situation))
        elif self._last is not None:
            self._past.played.append((self._last, result.observation))
            if self._guide is not None:
                self._guide.played(self._last, result.observation, result.valid)

    def _propose(self, expert: str, told: list[Constraint]) -> str:
        """The expert's move or a mistake, unless what was read speaks against it."""
        known = [*self._constraints, *told]
        action = self._mistake(expert) or expert
        if self._random.random() >= self._rates.obedience:
            return action
        for choice in (action, expert):
            broken = [constraint for constraint in known if constraint.broken(choice, self._past)]
            if not broken:
                return choice
        return broken[0].instead(expert)

    def _mistake(self, expert: str) -> str | None:
        """A mistake for which there is an occasion now, or None."""
        draw = self._random.random
        refused = self._past.refused_since
        if self._last in refused and draw() < self._rates.repeat:
            return self._last
        skipped = self._skip(expert)
        if skipped is not None and draw() < self._rates.skip:
            return skipped
        early = self._early(expert)
        if early is not None and early not in refused and draw() < self._rates.early:
            return early
        return None

    def _skip(self, expert: str) -> str | None:
        """On the way to where the object is made ready: go where it shall be put, and put it there."""
        assert self._goal is not None
        if self._goal.verb not in ("clean", "heat", "cool"):
            return None
        held = self._held()
        if held is None or type_of(held) != self._goal.object or self._ready(held):
            return None
        targets = [name for name in self._receptacles if type_of(name) == self._goal.target]
        if not targets or expert.startswith("take "):
            return None
        here = self._here()
        if here in targets:
            return f"move {held} to {here}"
        return f"go to {targets[0]}"

    def _early(self, expert: str) -> str | None:
        """The action after the expert's, before what it needs was done."""
        assert self._goal is not None
        go, opened = match("go to {0}", expert), match("open {0}", expert)
        place = (go or opened or ("",))[0]
        if not place:
            return None
        held = self._held()
        if held is not None:
            return f"move {held} to {place}"
        return f"take {self._goal.object} 1 from {place}" if opened else f"open {place}"

    def _held(self) -> str | None:
        held = None
        for action in self._past.taken:
            if names := match("take {0} from {1}", action):
                held = names[0]
            elif match("move {0} to {1}", action):
                held = None
        return held

    def _here(self) -> str:
        places = [names[0] for action in self._past.taken if (names := match("go to {0}", action))]
        return places[-1] if places else ""

    def _ready(self, thing: str) -> bool:
        assert self._goal is not None
        return any(action.startswith(f"{self._goal.verb} {thing} with ") for action in self._past.taken)

    def contexts(self) -> list[Context]:
        return []

    def release(self) -> None:
        return None
