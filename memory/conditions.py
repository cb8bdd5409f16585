"""What may have to hold before an action: the vocabulary in which principles are sought.

A condition is read three ways that must agree: as truth values over all occasions at which an action form was played
(:meth:`Condition.holds`), as a CEL expression over the context of :mod:`memory.predicates` (:meth:`Condition.cel`), and
as English (:meth:`Condition.words`). Conditions speak of what was played before and how the names are shared, of what
is seen, of the goal and of kinds of names; none speaks of the number of the step, which merely tracks failure.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from memory.grammar import fill, kind, slots
from memory.lifting import Event, Run, lift, mentions

ANY = -1
"""In a column: with whatever names."""
Column = tuple[str, int, int]
"""(verb, j, i): an earlier action of form ``verb`` whose name j is name i of the action at hand; (verb, ANY, ANY)."""

Name = Literal[
    "done",
    "since",
    "current",
    "previous",
    "seen",
    "in_view",
    "goal",
    "kind",
    "shown",
    "listed",
    "never",
    "repeats_refused",
    "repeats_last",
    "repeats",
    "form",
]
HISTORY, OBSERVATION, RESULT, GOAL = 50, 2000, 500, 1000
"""What a predicate's context holds: events, and characters of each text. What lies beyond counts as not seen."""
_MAX_SENTENCE = 80
_MAX_SHOWN = 12
_MAX_KINDS = 25


@dataclass(frozen=True)
class Condition:
    """One condition on an action, or its negation. What the fields mean depends on ``name``:

    - ``done``: ``columns[0]`` was played (and taken) before. ``since``: so it was, and ``columns[1]`` not after it.
      ``current``: the latest action of that form is this one. ``previous``: it was the latest taken action of all.
    - ``seen``, ``in_view``, ``goal``: name ``slot`` occurs in anything seen so far, in the present observation, in the
      goal. ``kind``: name ``slot`` is an instance of ``text``. ``shown``: the present observation says ``text``, in
      which ``{i}`` stands for name i.
    - ``listed``: the action is among the admissible ones, where these are known. ``never``: holds nowhere.
    - ``repeats_last``: the last action was the same and was refused. ``repeats_refused``: the same was refused and
      nothing was taken since. ``repeats``: the same was played at least ``slot`` times. ``form``: the action is of one
      of ``forms``.
    """

    name: Name
    positive: bool = True
    columns: tuple[Column, ...] = ()
    slot: int = 0
    text: str = ""
    forms: tuple[str, ...] = ()

    @property
    def complexity(self) -> int:
        """Which of several conditions that tell the same occasions apart is the plainest (lower: plainer)."""
        base = {"never": 0, "listed": 1, "done": 2, "current": 3, "kind": 3, "goal": 3, "in_view": 3, "repeats_last": 3}
        anyhow = sum(column[1] == ANY for column in self.columns)
        return 2 * base.get(self.name, 4) + 2 * (self.name in ("since", "previous")) + anyhow

    def holds(self, at: Occasions) -> np.ndarray:
        """Truth at each occasion, shape (N,)."""
        value = self._value(at)
        return value if self.positive else ~value

    def _value(self, at: Occasions) -> np.ndarray:
        if self.name == "never":
            return np.zeros(len(at), bool)
        if self.columns:
            first = at.last[:, at.column[self.columns[0]]]
            if self.name == "done":
                return first >= 0
            if self.name == "since":
                return first > at.last[:, at.column[self.columns[1]]]
            if self.name == "current":
                return (first >= 0) & (first == at.last[:, at.column[(self.columns[0][0], ANY, ANY)]])
            return (first >= 0) & (first == at.latest)
        if self.name == "kind":
            return np.array([kind(event.args[self.slot]) == self.text for event in at.events], bool)
        if self.name == "repeats":
            return at.flags["played"] >= self.slot
        if self.name == "form":
            return np.array([event.verb in self.forms for event in at.events], bool)
        return at.flags[(self.name, self.text or self.slot)]

    def cel(self, refusals: Sequence[str]) -> str:
        """The condition in CEL; ``refusals``: the texts that say an earlier action was refused."""
        value = self._cel(refusals)
        return value if self.positive else f"!({value})"

    def _cel(self, refusals: Sequence[str]) -> str:
        taken = _taken("h", refusals)
        mine = [_played("h", column) for column in self.columns]
        name = f"action.args[{self.slot}]"
        if self.name == "done":
            return f"history.exists(h, {taken} && {mine[0]})"
        if self.name == "since":
            return _latest(f"{taken} && (({mine[0]}) || ({mine[1]}))", _played(_LAST, self.columns[0]))
        if self.name == "current":
            same_form = f"{taken} && h.verb == {quote(self.columns[0][0])}"
            return _latest(same_form, _played(_LAST, self.columns[0], verb=False))
        if self.name == "previous":
            return _latest(taken, _played(_LAST, self.columns[0]))
        if self.name == "seen":
            return f"observation.contains({name}) || history.exists(h, h.result.contains({name}))"
        if self.name == "in_view":
            return f"observation.contains({name})"
        if self.name == "goal":
            return f"goal.contains({name})"
        if self.name == "kind":
            return f"{name} == {quote(self.text)} || {name}.startsWith({quote(self.text + ' ')})"
        if self.name == "shown":
            parts = [part for part in re.split(r"(\{\d\})", self.text) if part]
            said = [f"action.args[{part[1]}]" if re.fullmatch(r"\{\d\}", part) else quote(part) for part in parts]
            return f"observation.contains({' + '.join(said)})"
        if self.name == "listed":
            return "size(admissible) == 0 || action.text in admissible"
        if self.name == "never":
            return "false"
        if self.name == "form":
            return f"action.verb in [{', '.join(map(quote, self.forms))}]"
        if self.name == "repeats":
            return f"size(history.filter(h, h.action == action.text)) >= {self.slot}"
        if self.name == "repeats_last":
            last = "history[size(history) - 1]"
            return f"size(history) > 0 && {last}.action == action.text && !({_taken(last, refusals)})"
        return _latest(f"h.action == action.text || ({taken})", f"!({_taken(_LAST, refusals)})")

    def words(self) -> str:
        """The condition as a clause: "`go to {1}` has been done before"."""
        yes = self.positive
        mine = [f"`{shown(column)}`" for column in self.columns]
        name = f"{{{self.slot}}}"
        if self.name == "done":
            return f"{mine[0]} has {'' if yes else 'not '}been done before"
        if self.name == "since":
            if yes:
                return f"{mine[0]} has been done and {mine[1]} not after it"
            return f"{mine[0]} has not been done, or {mine[1]} has followed it"
        if self.name == "current":
            form = fill(self.columns[0][0], ["…"] * slots(self.columns[0][0]))
            return f"{mine[0]} is {'' if yes else 'not '}the latest `{form}`"
        if self.name == "previous":
            return f"{mine[0]} was {'' if yes else 'not '}the action just before"
        if self.name == "seen":
            return f"{name} has {'' if yes else 'not '}been seen"
        if self.name == "in_view":
            return f"{name} is {'' if yes else 'not '}in what you see now"
        if self.name == "goal":
            return f"{name} is {'' if yes else 'not '}named in the task"
        if self.name == "kind":
            return f"{name} is {'' if yes else 'not '}a {self.text}"
        if self.name == "shown":
            return f'what you see {"says" if yes else "does not say"} "{self.text}"'
        if self.name == "listed":
            return f"the action is {'' if yes else 'not '}listed as possible"
        if self.name == "repeats":
            times = "once" if self.slot == 1 else f"{self.slot} times"
            return f"the same action has {'' if yes else 'not '}been played {times} already"
        if self.name in ("repeats_last", "repeats_refused"):
            return f"the same action was {'' if yes else 'not '}refused just before"
        forms = " or ".join(f"`{form}`" for form in self.forms)
        return f"the action is {'' if yes else 'not '}of the form {forms}"


@dataclass
class Occasions:
    """All times that an action of one form was played (``verb`` "": of any form), in order of runs and steps.

    ``last[n, c]``: index of the latest taken event before occasion n that column c describes, -1 where there is none;
    ``latest[n]``: of the latest taken event of all. ``position``: index of the occasion itself among its run's events.
    """

    verb: str
    columns: list[Column]
    runs: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    latest_rows: list[int] = field(default_factory=list)
    truths: dict[tuple[str, int | str], list[bool]] = field(default_factory=lambda: defaultdict(list))
    played: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.events)

    @cached_property
    def column(self) -> dict[Column, int]:
        return {column: index for index, column in enumerate(self.columns)}

    @cached_property
    def last(self) -> np.ndarray:
        return np.array(self.rows, np.int32).reshape(len(self), len(self.columns))

    @cached_property
    def latest(self) -> np.ndarray:
        return np.array(self.latest_rows, np.int32)

    @cached_property
    def run(self) -> np.ndarray:
        return np.array(self.runs, np.int32)

    @cached_property
    def position(self) -> np.ndarray:
        return np.array(self.positions, np.int32)

    @cached_property
    def refused(self) -> np.ndarray:
        return np.array([event.refused for event in self.events], bool)

    @cached_property
    def flags(self) -> dict[object, np.ndarray]:
        found: dict[object, np.ndarray] = {key: np.array(values, bool) for key, values in self.truths.items()}
        found["played"] = np.array(self.played, np.int32)
        return found


def gather(runs: Sequence[Run], verbs: Sequence[str]) -> dict[str, Occasions]:
    """The occasions of each of ``verbs`` and, under "", of all actions. Only actions of ``verbs`` are in columns."""
    pairs = [(verb, j) for verb in verbs for j in range(slots(verb))]
    anyhow: list[Column] = [(verb, ANY, ANY) for verb in verbs]
    gathered = {
        verb: Occasions(verb, [*anyhow, *((other, j, i) for other, j in pairs for i in range(slots(verb)))])
        for verb in verbs
    }
    gathered[""] = Occasions("", [])
    sentences = {verb: _sentences(runs, verb) for verb in verbs}
    for index, run in enumerate(runs):
        last_any: dict[str, int] = {}
        last_name: dict[tuple[str, int, str], int] = {}
        latest = -1
        counts: Counter[str] = Counter()
        refused_since: set[str] = set()
        before: Event | None = None
        results: deque[str] = deque(maxlen=HISTORY)
        goal = run.trajectory.goal[:GOAL]
        for position, event in enumerate(run.events):
            everything = gathered[""]
            _append(everything, index, event, position, latest, counts)
            everything.truths[("repeats_refused", 0)].append(event.action in refused_since)
            everything.truths[("repeats_last", 0)].append(
                before is not None and before.refused and before.action == event.action
            )
            listed = event.source.admissible
            everything.truths[("listed", 0)].append(not listed or event.action in listed)
            here = gathered.get(event.verb)
            if here is not None:
                _append(here, index, event, position, latest, counts)
                row = [last_any.get(verb, -1) for verb in verbs]
                row += [last_name.get((verb, j, name), -1) for verb, j in pairs for name in event.args]
                here.rows.append(row)
                observation = event.source.observation[:OBSERVATION]
                for i, name in enumerate(event.args):
                    here.truths[("in_view", i)].append(name in observation)
                    here.truths[("seen", i)].append(name in observation or any(name in text for text in results))
                    here.truths[("goal", i)].append(name in goal)
                for sentence in sentences[event.verb]:
                    here.truths[("shown", sentence)].append(fill(sentence, event.args) in observation)
            counts[event.action] += 1
            results.append(event.result[:RESULT])
            before = event
            if event.refused:
                refused_since.add(event.action)
                continue
            refused_since.clear()
            latest = position
            last_any[event.verb] = position
            for j, name in enumerate(event.args):
                last_name[(event.verb, j, name)] = position
    return gathered


def _append(at: Occasions, run: int, event: Event, position: int, latest: int, counts: Counter[str]) -> None:
    at.runs.append(run)
    at.events.append(event)
    at.positions.append(position)
    at.latest_rows.append(latest)
    at.played.append(counts[event.action])


def candidates(at: Occasions, *, pairs: bool) -> list[Condition]:
    """The conditions that might have to hold before actions of the form of ``at``. ``pairs``: ``since`` as well."""
    found: list[Condition] = []
    known = [column for column in at.columns if (at.last[:, at.column[column]] >= 0).any()]
    for column in known:
        found += [Condition("done", yes, (column,)) for yes in (True, False)]
        found.append(Condition("previous", True, (column,)))
        if column[1] != ANY:
            found.append(Condition("current", True, (column,)))
    if pairs:
        for first in known:
            for second in known:
                if first[0] != second[0] and first[2] == second[2]:  # both of the same name, or both of any
                    found += [Condition("since", yes, (first, second)) for yes in (True, False)]
    for i in range(slots(at.verb)):
        found += [Condition(name, True, slot=i) for name in ("seen", "in_view", "goal")]
        found += [Condition("kind", yes, slot=i, text=text) for text in _kinds(at, i) for yes in (True, False)]
    for key, values in at.truths.items():
        if key[0] == "shown" and any(values):
            found += [Condition("shown", yes, text=str(key[1])) for yes in (True, False)]
    return found


def general_candidates(at: Occasions, verbs: Sequence[str], max_repeats: int) -> list[Condition]:
    """The conditions that might have to hold before any action; ``at``: the occasions of all forms."""
    found = [Condition(name, False) for name in ("repeats_last", "repeats_refused")]
    found += [Condition("repeats", False, slot=times) for times in range(1, max_repeats + 1)]
    found += [Condition("form", False, forms=(verb,)) for verb in verbs]
    taken = {event.verb for event in at.events if not event.refused}
    counts = Counter(event.verb for event in at.events if event.verb not in taken)
    unknown = tuple(sorted((verb for verb in counts if counts[verb] > 1), key=lambda verb: (-counts[verb], verb)))
    if unknown:
        found.append(Condition("form", False, forms=unknown[:_MAX_KINDS]))
    if any(event.source.admissible for event in at.events):
        found.append(Condition("listed"))
    return found


def exemptions(at: Occasions) -> list[Condition]:
    """The conditions that may exempt an action from a rule."""
    found = [Condition("kind", True, slot=i, text=text) for i in range(slots(at.verb)) for text in _kinds(at, i)]
    found += [Condition("done", True, (column,)) for column in at.columns if (at.last[:, at.column[column]] >= 0).any()]
    return found + [
        Condition("shown", True, text=str(key[1]))
        for key, values in at.truths.items()
        if key[0] == "shown" and any(values)
    ]


def quote(text: str) -> str:
    """``text`` as a CEL string."""
    return json.dumps(text, ensure_ascii=False)


def shown(column: Column) -> str:
    """A column as an action: the name that is shared as the slot of the action at hand, others as an ellipsis."""
    verb, j, i = column
    return fill(verb, [f"{{{i}}}" if at == j else "…" for at in range(slots(verb))])


_LAST = "found[size(found) - 1]"


def _latest(among: str, holds: str) -> str:
    """CEL: the latest h in the history for which ``among`` holds exists, and ``holds`` holds of it (:data:`_LAST`).

    CEL binds no variables, so exists over a list of one does: the history is searched once.
    """
    return f"[history.filter(h, {among})].exists(found, size(found) > 0 && {holds})"


def _taken(event: str, refusals: Sequence[str]) -> str:
    if not refusals:
        return f"{event}.valid"
    if len(refusals) == 1:
        return f"{event}.valid && {event}.result != {quote(refusals[0])}"
    return f"{event}.valid && !({event}.result in [{', '.join(map(quote, refusals))}])"


def _played(event: str, column: Column, verb: bool = True) -> str:
    form, j, i = column
    said = [f"{event}.verb == {quote(form)}"] if verb else []
    if j != ANY:
        said.append(f"{event}.args[{j}] == action.args[{i}]")
    return " && ".join(said)


def _kinds(at: Occasions, slot: int) -> list[str]:
    """The most frequent kinds of names in ``slot``; none where there is only one."""
    counts = Counter(kind(event.args[slot]) for event in at.events)
    if len(counts) < 2:
        return []
    frequent = sorted((text for text, count in counts.items() if count > 1), key=lambda text: (-counts[text], text))
    return frequent[:_MAX_KINDS]


def _sentences(runs: Iterable[Run], verb: str) -> list[str]:
    """Sentences with the action's own names in them, lifted, that are often seen just before ``verb`` is played."""
    counts: Counter[str] = Counter()
    for run in runs:
        for event in run.events:
            if event.verb != verb:
                continue
            said = set()
            for sentence in re.split(r"[.!?\n]", event.source.observation):
                sentence = sentence.strip()
                if 0 < len(sentence) <= _MAX_SENTENCE and any(mentions(sentence, name) for name in event.args):
                    lifted = lift(sentence, event.args)
                    if not re.search(r"\d", re.sub(r"\{\d\}", "", lifted)) and "{" in lifted:
                        said.add(lifted)
            counts.update(said)
    return [text for text, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count > 2][
        :_MAX_SHOWN
    ]
