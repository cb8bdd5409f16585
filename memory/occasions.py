"""When actions were played, and what had been played and seen by then: the table in which principles are sought."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from memory.grammar import fill, slots
from memory.lifting import Event, Run, lift, mentions

ANY = -1
"""In a column: with whatever names."""
Column = tuple[str, int, int]
"""(verb, j, i): an earlier action of form ``verb`` whose name j is name i of the action at hand; (verb, ANY, ANY)."""

HISTORY, OBSERVATION, RESULT, GOAL = 50, 2000, 500, 1000
"""What a predicate's context holds: events, and characters of each text. What lies beyond counts as not seen."""
_MAX_SENTENCE = 80
_MAX_SHOWN = 12


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
    cells: array[int] = field(default_factory=lambda: array("i"))
    """``last``, row after row."""
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
        found = np.array(self.cells, np.int32).reshape(len(self), len(self.columns))
        return np.where(found < self.position[:, None] - HISTORY, -1, found)

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
        results: deque[str] = deque(maxlen=HISTORY)
        goal = run.trajectory.goal[:GOAL]
        for position, event in enumerate(run.events):
            everything = gathered[""]
            _append(everything, index, event, position, latest, counts)
            everything.truths[("repeats_refused", 0)].append(event.action in refused_since)
            listed = event.source.admissible
            everything.truths[("listed", 0)].append(not listed or event.action in listed)
            here = gathered.get(event.verb)
            if here is not None:
                _append(here, index, event, position, latest, counts)
                row = [last_any.get(verb, -1) for verb in verbs]
                row += [last_name.get((verb, j, name), -1) for verb, j in pairs for name in event.args]
                here.cells.extend(row)
                observation = event.source.observation[:OBSERVATION]
                for i, name in enumerate(event.args):
                    here.truths[("in_view", i)].append(name in observation)
                    here.truths[("seen", i)].append(name in observation or any(name in text for text in results))
                    here.truths[("goal", i)].append(name in goal)
                for sentence in sentences[event.verb]:
                    here.truths[("shown", sentence)].append(fill(sentence, event.args) in observation)
            counts[event.action] += 1
            results.append(event.result[:RESULT])
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
