"""What may have to hold before an action: the vocabulary in which principles are sought.

A condition is read three ways that must agree: as truth values over all occasions at which an action form was played
(:meth:`Condition.holds`), as a CEL expression over the context of :mod:`memory.predicates` (:meth:`Condition.cel`), and
as English (:meth:`Condition.words`). Conditions speak of what was played before and how the names are shared, of what
is seen, of the goal and of kinds of names; none speaks of the number of the step, which merely tracks failure.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memory.grammar import fill, kind, slots
from memory.occasions import ANY, Column, Occasions

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
    "repeats",
    "form",
]
_MAX_KINDS = 25
_MAX_FORMS = 20


@dataclass(frozen=True)
class Condition:
    """One condition on an action, or its negation. What the fields mean depends on ``name``:

    - ``done``: ``columns[0]`` was played (and taken) before. ``since``: so it was, and ``columns[1]`` not after it.
      ``current``: the latest action of that form is this one. ``previous``: it was the latest taken action of all.
    - ``seen``, ``in_view``, ``goal``: name ``slot`` occurs in anything seen so far, in the present observation, in the
      goal. ``kind``: name ``slot`` is an instance of ``text``. ``shown``: the present observation says ``text``, in
      which ``{i}`` stands for name i.
    - ``listed``: the action is among the admissible ones, where these are known. ``never``: holds nowhere.
    - ``repeats_refused``: the same was refused and nothing was taken since. ``repeats``: the same was played at least
      ``slot`` times. ``form``: the action is of one of ``forms``.
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
        base = {"never": 0, "listed": 1, "done": 2, "current": 3, "kind": 3, "goal": 3, "in_view": 3}
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
            return f"{name}.matches({quote(f'^{_escaped(self.text)}( [0-9]+)*$')})"
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
        return _latest(f"h.action == action.text || ({taken})", f"!({_taken(_LAST, refusals)})")

    def words(self) -> str:
        """The condition as a clause: "`rub {1}` has been done before"."""
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
        if self.name == "repeats_refused":
            return f"the same action was {'' if yes else 'not '}refused before, and nothing was done since"
        forms = " or ".join(f"`{form}`" for form in self.forms)
        return f"the action is {'' if yes else 'not '}of the form {forms}"


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
    found = [Condition("repeats_refused", False)]
    found += [Condition("repeats", False, slot=times) for times in range(1, max_repeats + 1)]
    found += [Condition("form", False, forms=(verb,)) for verb in verbs]
    taken: dict[str, set[int]] = defaultdict(set)
    for run, event in zip(at.runs, at.events, strict=True):
        if not event.refused or event.source.valid:  # what the world calls valid it knows, if it did nothing
            taken[event.verb].add(run)
    known = tuple(sorted((verb for verb in taken if len(taken[verb]) > 1), key=lambda verb: (-len(taken[verb]), verb)))
    refused = Counter(event.verb for event in at.events if event.verb not in taken)
    never = tuple(sorted((verb for verb in refused if refused[verb] > 1), key=lambda verb: (-refused[verb], verb)))
    # A list of the forms that work says more than one of those that do not, but must not be endless.
    if known and len(known) <= _MAX_FORMS:
        found.append(Condition("form", True, forms=known))
    elif never:
        found.append(Condition("form", False, forms=never[:_MAX_FORMS]))
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


def _escaped(text: str) -> str:
    return re.sub(r"([.^$*+?{}()|\[\]\\])", r"\\\1", text)


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
