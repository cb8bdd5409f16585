"""The audit of predicates on labelled steps: does a predicate catch mistakes, or does it only look as if it did?

Each predicate is evaluated at every step of trajectories whose outcome is known, and tried on actions that were not
played. :mod:`memory.audit_checks` judges what it did.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.audit_checks import FOLLOWED, IDLE, OFF, VIOLATED, Audit, LabelledSteps, Outcomes, judge, label_steps
from memory.expressions import ExpressionError
from memory.predicates import (
    CompiledPredicate,
    Parse,
    PredicateHost,
    Step,
    Verdict,
    action_value,
    compile_predicate,
    trajectory_steps,
)
from memory.records import PrincipleItem, TraceStep, Trajectory
from memory.settings import AuditSettings
from memory.statistics import cluster_weights


@dataclass
class _Data:
    """Trajectories with a known outcome, and their steps as predicates see them."""

    trajectories: list[Trajectory]
    steps: list[list[tuple[int, Step]]]
    pool: dict[str, list[str]] = field(default_factory=dict)
    """Of each task type, the actions that the world took, the more frequent ones first."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], parse: Parse) -> _Data:
        known = [trajectory for trajectory in trajectories if trajectory.success is not None and trajectory.steps]
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for trajectory in known:
            counts[trajectory.task_type].update(
                step.action for step in trajectory.steps if step.action is not None and step.valid is not False
            )
        return cls(
            known,
            [trajectory_steps(t.steps, parse, t.goal, t.task_type) for t in known],
            {kind: [action for action, _ in count.most_common(100)] for kind, count in counts.items()},
        )

    def context(self, number: int, at: int) -> dict[str, Any]:
        """The whole context of the ``at``-th step of trajectory ``number``."""
        steps = self.steps[number]
        return {**steps[at][1].values, "history": [step.push for _, step in steps[max(0, at - 50) : at]]}


def audit(
    principles: Mapping[str, PrincipleItem],
    trajectories: Sequence[Trajectory],
    parse: Parse,
    host: PredicateHost,
    settings: AuditSettings | None = None,
    key_steps: Mapping[str, Collection[int]] | None = None,
) -> dict[str, Audit]:
    """Audit the predicates of ``principles`` (those that have one) on ``trajectories`` of their world and grammar.

    Args:
        parse: of the grammar that the predicates were written for.
        key_steps: as :func:`label_steps` takes them.

    A principle of one task type is audited on trajectories of that type. Trajectories of unknown outcome count nowhere.
    """
    settings = settings or AuditSettings()
    audits: dict[str, Audit] = {}
    groups: dict[str, dict[str, CompiledPredicate]] = defaultdict(dict)
    for name, principle in principles.items():
        if principle.predicate is None:
            continue
        try:
            groups[principle.task_type][name] = compile_predicate(principle.predicate)
        except ExpressionError as error:
            audits[name] = Audit(refused=str(error))
    for kind, group in groups.items():
        data = _Data.of([t for t in trajectories if kind in ("", t.task_type)], parse)
        if not data.trajectories:
            audits.update(dict.fromkeys(group, Audit()))
            continue
        labels = label_steps(data.trajectories, key_steps)
        weights = cluster_weights(labels.episodes, settings.samples, settings.seed)
        outcomes = evaluate(group, data, host)
        probes = {
            name: _Probe(group[name], data, labels, done, parse, host, settings) for name, done in outcomes.items()
        }
        with ThreadPoolExecutor(_THREADS) as threads:
            dead_ends = dict(zip(probes, threads.map(_Probe.run, probes.values()), strict=True))
        for name, done in outcomes.items():
            audits[name] = judge(labels, done, dead_ends[name], weights, settings)
    return {name: audits[name] for name in principles if name in audits}


_THREADS = 2
"""Requests to the host at once: it has two workers."""


def evaluate(group: Mapping[str, CompiledPredicate], data: _Data, host: PredicateHost) -> dict[str, Outcomes]:
    """What each predicate did at each step that has an action; OFF from its first error in an episode on."""

    def one(steps: list[tuple[int, Step]]) -> NDArray[np.int8]:
        bare = [step for _, step in steps]
        rows = _bulk(list(group.values()), bare, host)
        codes = np.array([[_CODES[verdict.outcome] for verdict in row] for row in rows], dtype=np.int8)
        codes = codes.reshape(len(bare), len(group))
        return np.where(np.logical_or.accumulate(codes == OFF, axis=0), np.int8(OFF), codes)

    with ThreadPoolExecutor(_THREADS) as threads:
        codes = np.concatenate(list(threads.map(one, data.steps)))
    return {name: codes[:, column].copy() for column, name in enumerate(group)}


_CODES = {"idle": IDLE, "followed": FOLLOWED, "violated": VIOLATED, "error": OFF, "unjudged": OFF}


def _bulk(predicates: list[CompiledPredicate], steps: list[Step], host: PredicateHost) -> list[list[Verdict]]:
    """Verdicts[step][predicate]; where they take too long, each predicate for itself, and the slow one is an error."""
    # Generous: 2 ms for each context, and each step of cost several times what it takes.
    cost = sum(predicate.cost for predicate in predicates)
    seconds = 1.0 + len(steps) * (2e-3 + 5e-7 * cost)
    rows = host.check_steps(predicates, steps, seconds)
    if rows is not None:
        return rows
    if len(predicates) == 1:
        return [[Verdict("error", "took too long")] for _ in steps]
    columns = [_bulk([predicate], steps, host) for predicate in predicates]
    return [[column[at][0] for column in columns] for at in range(len(steps))]


@dataclass
class _Probe:
    """Tries a predicate on actions that were not played."""

    predicate: CompiledPredicate
    data: _Data
    labels: LabelledSteps
    outcomes: Outcomes
    parse: Parse
    host: PredicateHost
    settings: AuditSettings

    def __post_init__(self) -> None:
        self._random = random.Random(self.settings.seed)
        self._starts = np.searchsorted(self.labels.episode, np.arange(self.labels.episodes))

    def run(self) -> tuple[int, int]:
        """Mark who followed a prohibition in ``outcomes``; returns :meth:`dead_ends`."""
        if len(np.unique(self.labels.episode[self.outcomes == FOLLOWED])) < self.settings.min_episodes:
            self.outcomes[self.refrained()] = FOLLOWED
        return self.dead_ends()

    def dead_ends(self) -> tuple[int, int]:
        """(firings at which no alternative passed, firings at which there were alternatives), of a sample."""
        fired = self._sample(np.flatnonzero(self.outcomes == VIOLATED), self.settings.firings)
        trials = [(at, others) for at in fired if (others := self._alternatives(at))]
        return sum(all(stopped) for stopped in self._stopped(trials)), len(trials)

    def refrained(self) -> list[int]:
        """Of a sample of idle steps, those at which an action that it stopped elsewhere would have been stopped."""
        fired = Counter(str(self._trace(int(at))[2].action) for at in np.flatnonzero(self.outcomes == VIOLATED))
        tempting = [action for action, _ in fired.most_common(8)]
        trials = []
        for at in self._sample(np.flatnonzero(self.outcomes == IDLE), self.settings.refrained):
            listed = self._trace(at)[2].admissible
            others = [action for action in tempting if listed is None or action in listed]
            if others:
                trials.append((at, others))
        return [at for (at, _), stopped in zip(trials, self._stopped(trials), strict=True) if any(stopped)]

    def _sample(self, found: NDArray[np.intp], size: int) -> list[int]:
        chosen = found if len(found) <= size else self._random.sample(found.tolist(), size)
        return sorted(int(at) for at in chosen)

    def _trace(self, at: int) -> tuple[int, int, TraceStep]:
        """Trajectory, number of the step in it, and the step as it was recorded."""
        number = int(self.labels.episode[at])
        recorded = self.data.trajectories[number].steps[int(self.labels.position[at])]
        return number, at - int(self._starts[number]), recorded

    def _alternatives(self, at: int) -> list[str]:
        """Other actions of that moment: those listed as admissible, else those of the episode and of its task type."""
        number, _, recorded = self._trace(at)
        if recorded.admissible:
            known = list(recorded.admissible)
        else:
            trajectory = self.data.trajectories[number]
            known = [step.action for step in trajectory.steps if step.action is not None and step.valid is not False]
            known += self.data.pool[trajectory.task_type]
        known = sorted(set(known) - {recorded.action})
        size = self.settings.alternatives
        return known if len(known) <= size else self._random.sample(known, size)

    def _stopped(self, trials: list[tuple[int, list[str]]]) -> list[list[bool]]:
        """Of each (step, actions): whether it would have stopped each of the actions there."""
        found: list[bool] = []
        for start in range(0, len(trials), _TRIALS):
            steps: list[Step] = []
            for at, actions in trials[start : start + _TRIALS]:
                number, index, _ = self._trace(at)
                proposed = [{"action": action_value(action, self.parse)} for action in actions]
                steps += [Step({**self.data.context(number, index), **proposed[0]}), *map(Step, proposed[1:])]
            found += [row[0].outcome == "violated" for row in _bulk([self.predicate], steps, self.host)]
        answers = iter(found)
        return [list(islice(answers, len(actions))) for _, actions in trials]


_TRIALS = 50
"""Steps whose alternatives go to a worker at once."""
