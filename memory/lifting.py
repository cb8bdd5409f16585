"""Trajectories as events: which action form was played with which names, and whether the world took it.

What a refusal is, is learnt. Where a source tells that an action was refused (``valid``), that counts. Besides, a text
that shares no word with the names in the action, though it answers many different ones, is one (an effect tells of
what it happened to): if it answers several forms, or if the same action, played again at once, got the same again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from memory.grammar import ActionGrammar
from memory.records import TraceStep, Trajectory

GRAMMAR_TRAJECTORIES = 2000
"""A store's first trajectories, from which the action grammar is learnt: later ones do not change it."""

_MIN_ACTIONS = 5
"""A refusal answers at least so many different actions …"""
_MIN_FORMS = 3
"""… of at least so many different forms, or is the answer to at least …"""
_MIN_REPEATS = 2
"""… so many repetitions …"""
_SAME_SHARE = 0.9
"""… and of this share of them."""
_FINAL_SHARE = 0.2
"""What ends more than this share of the successful episodes is no refusal (a world may answer everything with "OK")."""


@dataclass(frozen=True)
class Event:
    """One executed action. ``step``: the index of its trace step.

    ``refused``: the world did not take it. ``changed``: it was taken and did not just repeat an answer that was already
    given with nothing else done in between.
    """

    step: int
    action: str
    verb: str
    args: tuple[str, ...]
    result: str
    refused: bool
    changed: bool
    source: TraceStep


@dataclass(frozen=True)
class Run:
    """A trajectory with its events in order. ``id``: the trajectory's."""

    id: str
    trajectory: Trajectory
    events: tuple[Event, ...]

    @property
    def success(self) -> bool | None:
        return self.trajectory.success


def fit_grammar(trajectories: Sequence[Trajectory]) -> ActionGrammar:
    """The action grammar of ``trajectories``."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    texts = {text for step in steps for text in (step.observation, step.result)}
    texts.update(trajectory.goal for trajectory in trajectories)
    return ActionGrammar.fit((step.action for step in steps if step.action), texts)


def learn_refusals(trajectories: Sequence[Trajectory], grammar: ActionGrammar) -> tuple[str, ...]:
    """Texts with which the world answers what it does not take, the more frequent first."""
    forms: dict[str, set[str]] = defaultdict(set)
    actions: dict[str, set[str]] = defaultdict(set)
    told: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    count: Counter[str] = Counter()
    final: Counter[str] = Counter()
    successes = 0
    again: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    parsed: dict[str, tuple[str, tuple[str, ...]]] = {}
    for trajectory in trajectories:
        for before, step in zip((None, *trajectory.steps), trajectory.steps, strict=False):
            text = step.result
            if not step.action or not text.strip():
                continue
            if before is not None and before.action == step.action:
                again[before.result][before.result == text] += 1
            if step.action not in parsed:
                parsed[step.action] = grammar.parse(step.action)
            verb, args = parsed[step.action]
            if not _words(text).isdisjoint(word for name in args for word in _words(name)):
                continue
            forms[text].add(verb)
            actions[text].add(step.action)
            count[text] += 1
            if step.valid is not None:
                told[text][step.valid] += 1
        if trajectory.success and trajectory.steps:
            successes += 1
            final[trajectory.steps[-1].result] += 1
    refusals = []
    for text, uses in forms.items():
        invalid, valid = told[text]
        other, same = again[text]
        unchanged = same >= _MIN_REPEATS and same >= _SAME_SHARE * (same + other)
        several = len(uses) >= _MIN_FORMS and not valid
        many = len(actions[text]) >= _MIN_ACTIONS and final[text] <= _FINAL_SHARE * successes
        if (invalid > valid and count[text] > 1) or (many and (several or unchanged)):
            refusals.append(text)
    return tuple(sorted(refusals, key=lambda text: (-count[text], text)))


def read_runs(trajectories: Sequence[Trajectory], grammar: ActionGrammar, refusals: Sequence[str]) -> list[Run]:
    """The events of each trajectory. Steps without an action are no events."""
    known = set(refusals)
    parsed: dict[str, tuple[str, tuple[str, ...]]] = {}
    runs = []
    for trajectory in trajectories:
        events: list[Event] = []
        answered: set[tuple[str, str]] = set()
        for step in trajectory.steps:
            if not step.action:
                continue
            action = " ".join(step.action.split())
            if action not in parsed:
                parsed[action] = grammar.parse(action)
            verb, args = parsed[action]
            refused = step.valid is False or step.result in known
            changed = not refused and (action, step.result) not in answered
            if changed:
                answered = {(action, step.result)}
            events.append(Event(step.index, action, verb, args, step.result, refused, changed, step))
        runs.append(Run(trajectory.id, trajectory, tuple(events)))
    return runs


def _words(text: str) -> set[str]:
    """The words of ``text``, in lower case; numbers and very short words tell nothing."""
    return {word for word in re.findall(r"[^\W\d_]+", text.lower()) if len(word) > 2}


def mentions(text: str, name: str) -> bool:
    """Whether ``name`` stands in ``text`` as whole words, up to case."""
    return name.lower() in text.lower() and _bounded(name).search(text) is not None


def lift(text: str, names: Sequence[str]) -> str:
    """``text`` with each of ``names`` (as whole words, longest first) replaced by its slot ``{i}``."""
    for index in sorted(range(len(names)), key=lambda index: -len(names[index])):
        if names[index]:
            text = _bounded(names[index]).sub(f"{{{index}}}", text)
    return text


_PATTERNS: dict[str, re.Pattern[str]] = {}


def _bounded(name: str) -> re.Pattern[str]:
    if name not in _PATTERNS:
        if len(_PATTERNS) > 50_000:
            _PATTERNS.clear()
        _PATTERNS[name] = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)
    return _PATTERNS[name]
