"""The audit of predicates on labelled steps: does a predicate catch mistakes, or does it only look as if it did?

A step is *good* when its trajectory succeeded, the world took its action and, where key steps are known, it was one of
them. A predicate is *violated* or *followed* at a step; a prohibition, whose trigger names the forbidden action and
which therefore nobody is seen to follow, is followed by whoever could have violated it and did not.

Six checks, each with its counts and interval; all must pass:

- ``direction``: good moves are rarer among violating steps than among following ones (bootstrap over episodes).
- ``risk_set``: so they are at equal times. Failures last longer, so what fires late, as ``step > 30``, goes with
  failure without being its cause (immortal time bias; Suissa 2008). Therefore a violation is compared with episodes of
  its task type that had not violated either and follow at that very step or within the next few (risk set matching;
  Li, Propert and Rosenbaum 2001).
- ``way_out``: where it fires, it lets some other action pass. What stops every action judges the situation and not the
  action, and a predicate that merely tracks failure does.
- ``false_positives``: the share of good moves that it would have stopped (Wilson).
- ``trigger_rate``: the share of steps at which it fires lies in a band (Wilson).
- ``errors``: it is hardly ever switched off because it raises or takes too long.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memory.expressions import ExpressionError
from memory.grammar import ActionGrammar
from memory.lifting import GRAMMAR_TRAJECTORIES, fit_grammar, learn_refusals, read_runs
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
from memory.records import PrincipleItem, Status, TraceStep, Trajectory
from memory.settings import AuditSettings
from memory.statistics import Floats, cluster_weights, expanded_tail, newcombe_interval, wilson_interval
from memory.store import Store, Stored

State = Literal["passed", "failed", "open"]
"""``open``: not passed, for want of evidence."""

IDLE, FOLLOWED, VIOLATED, OFF = 0, 1, 2, 3
"""What a predicate did at a step; OFF: it raised here or earlier in the episode, or does not apply."""

Outcomes = NDArray[np.int8]


@dataclass(frozen=True)
class Check:
    """One check: ``estimate`` with its 95 % interval, over ``n`` units of which ``k`` count (``note`` names them)."""

    name: str
    state: State
    estimate: float | None
    low: float | None
    high: float | None
    k: int
    n: int
    note: str

    @property
    def told(self) -> str:
        """The note, and of a difference the estimate with its interval."""
        if self.name not in ("direction", "risk_set") or self.estimate is None:
            return self.note
        return f"{self.note}, difference {self.estimate:+.3f} ({self.low:+.3f} to {self.high:+.3f})"

    def record(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Audit:
    """The verdict on one predicate. ``refused``: why the static check refuses it, "" where it does not."""

    checks: tuple[Check, ...] = ()
    steps: int = 0
    episodes: int = 0
    refused: str = ""

    @property
    def decision(self) -> State:
        """``passed``: every check did; ``failed``: one failed, or it is refused; ``open``: evidence is wanting."""
        states = {check.state for check in self.checks}
        if self.refused or "failed" in states:
            return "failed"
        return "open" if "open" in states or not self.checks else "passed"

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that it did not pass."""
        return ("static",) if self.refused else tuple(check.name for check in self.checks if check.state != "passed")

    @property
    def reason(self) -> str:
        """One line: what it did not pass."""
        if self.refused:
            return f"refused: {self.refused}"
        if not self.checks:
            return "no trajectory of known outcome"
        return "; ".join(f"{check.name}: {check.told}" for check in self.checks if check.state != "passed")

    def record(self) -> dict[str, Any]:
        """As JSON, for the judgement in the store."""
        return {
            "decision": self.decision,
            "failed": list(self.failed),
            "reason": self.reason,
            "steps": self.steps,
            "episodes": self.episodes,
            "checks": [check.record() for check in self.checks],
        }


@dataclass(frozen=True)
class LabelledSteps:
    """The steps that had an action, in order. Arrays of shape (steps,), but ``kinds``: (episodes,)."""

    episode: NDArray[np.int64]
    """Number of the step's episode."""
    position: NDArray[np.int64]
    good: NDArray[np.bool_]
    kinds: NDArray[np.int64]
    """Number of each episode's task type."""

    @property
    def episodes(self) -> int:
        return len(self.kinds)


def label_steps(
    trajectories: Sequence[Trajectory], key_steps: Mapping[str, Collection[int]] | None = None
) -> LabelledSteps:
    """Label the steps of trajectories whose outcome is known.

    Args:
        key_steps: of a trajectory's id, the indices of the steps that changed something; others are no good moves then.
    """
    kinds: dict[str, int] = {}
    episode, position, good = [], [], []
    for number, trajectory in enumerate(trajectories):
        kinds.setdefault(trajectory.task_type, len(kinds))
        keys = (key_steps or {}).get(trajectory.id)
        for at, step in enumerate(trajectory.steps):
            if step.action is not None:
                episode.append(number)
                position.append(at)
                good.append(
                    bool(trajectory.success) and step.valid is not False and (keys is None or step.index in keys)
                )
    return LabelledSteps(
        np.array(episode, dtype=np.int64),
        np.array(position, dtype=np.int64),
        np.array(good, dtype=np.bool_),
        np.array([kinds[trajectory.task_type] for trajectory in trajectories], dtype=np.int64),
    )


def judge(
    labels: LabelledSteps, outcomes: Outcomes, dead_ends: tuple[int, int], weights: Floats, settings: AuditSettings
) -> Audit:
    """The six checks, from what a predicate did at each step.

    Args:
        outcomes: IDLE, FOLLOWED, VIOLATED or OFF of each step. Shape (steps,).
        dead_ends: firings at which no alternative passed, and firings at which alternatives were tried.
        weights: :func:`memory.statistics.cluster_weights` of the episodes. Shape (samples, episodes).
    """
    seen = outcomes != OFF
    violated, followed = outcomes == VIOLATED, outcomes == FOLLOWED
    good = labels.good & seen
    off_episodes = len(np.unique(labels.episode[~seen]))
    checks = (
        _direction(labels, violated, followed, weights, settings),
        _risk_set(labels, violated, followed, weights, settings),
        _way_out(*dead_ends, settings),
        _false_positives(int((violated & good).sum()), int(good.sum()), settings),
        _trigger_rate(int(violated.sum()), int(seen.sum()), settings),
        _errors(off_episodes, labels.episodes, settings),
    )
    return Audit(checks, int(seen.sum()), labels.episodes)


def _direction(
    labels: LabelledSteps,
    violated: NDArray[np.bool_],
    followed: NDArray[np.bool_],
    weights: Floats,
    settings: AuditSettings,
) -> Check:
    """Mean share of good moves among an episode's following steps, minus that among its violating ones."""
    has_v, good_v = _per_episode(labels, violated)
    has_f, good_f = _per_episode(labels, followed)
    v, f = int(has_v.sum()), int(has_f.sum())
    note = f"{v} episodes violate it, {f} follow it"
    if min(v, f) < settings.min_episodes:
        return Check(
            "direction", "open", None, None, None, v, v + f, f"{note}; {settings.min_episodes} each are needed"
        )
    mean_f, mean_v = float(good_f.sum() / f), float(good_v.sum() / v)
    with np.errstate(invalid="ignore", divide="ignore"):
        resampled = (weights @ good_f) / (weights @ has_f) - (weights @ good_v) / (weights @ has_v)
    estimate = mean_f - mean_v
    low, high = _interval(resampled, mean_f, f, mean_v, v)
    return Check("direction", _sign(estimate, low), estimate, low, high, v, v + f, note)


def _per_episode(labels: LabelledSteps, chosen: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Of each episode: 1.0 where it has a chosen step, and the share of good ones among its chosen steps (else 0)."""
    counts = np.bincount(labels.episode[chosen], minlength=labels.episodes)
    good = np.bincount(labels.episode[chosen & labels.good], minlength=labels.episodes)
    return (counts > 0).astype(np.float64), good / np.maximum(counts, 1)


def _risk_set(
    labels: LabelledSteps,
    violated: NDArray[np.bool_],
    followed: NDArray[np.bool_],
    weights: Floats,
    settings: AuditSettings,
) -> Check:
    """Direction between the first violation of one episode and the next following step of another.

    A pair counts where both are of one task type, the following step is the same as the violating one or at most
    ``settings.window`` later, and its episode has not violated before.
    """
    first_v, good_v = _first(labels, violated)
    following = np.unique(labels.episode[followed])
    v = np.flatnonzero(np.isfinite(first_v))
    times = first_v[v].astype(np.int64)
    next_f, good_f = _next(labels, followed, following, times)
    pairs = (
        (labels.kinds[v][:, None] == labels.kinds[following][None, :])
        & (next_f <= times[:, None] + settings.window)
        & (next_f < first_v[following][None, :])
    ).astype(np.float64)
    used_v, used_f, n = int(pairs.any(axis=1).sum()), int(pairs.any(axis=0).sum()), int(pairs.sum())
    note = f"{used_v} violating and {used_f} following episodes compare"
    if min(used_v, used_f) < settings.min_episodes:
        # Enough of both kinds and yet none to compare: it fires when time passes.
        enough = min(len(v), len(following)) >= settings.min_episodes
        return Check("risk_set", "failed" if enough and n == 0 else "open", None, None, None, used_v, n, note)
    mean_f, mean_v = float((pairs * good_f).sum() / n), float(good_v[v] @ pairs.sum(axis=1) / n)
    estimate = mean_f - mean_v
    weight_v, weight_f = weights[:, v], weights[:, following]
    with np.errstate(invalid="ignore", divide="ignore"):
        gains = ((weight_v @ (pairs * (good_f - good_v[v][:, None]))) * weight_f).sum(axis=1)
        resampled = gains / ((weight_v @ pairs) * weight_f).sum(axis=1)
    low, high = _interval(resampled, mean_f, used_f, mean_v, used_v)
    return Check("risk_set", _sign(estimate, low), estimate, low, high, used_v, n, note)


def _next(
    labels: LabelledSteps, chosen: NDArray[np.bool_], episodes: NDArray[np.int64], times: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Of each time and episode: the first chosen step at or after it (infinity: none), and 1.0 where that is good.

    Shapes (times, episodes).
    """
    found, good = np.full((len(times), len(episodes)), np.inf), np.zeros((len(times), len(episodes)))
    at = np.flatnonzero(chosen)
    starts = np.searchsorted(labels.episode[at], episodes)
    ends = np.searchsorted(labels.episode[at], episodes, side="right")
    for column, (start, end) in enumerate(zip(starts, ends, strict=True)):
        own = at[start:end]
        index = np.searchsorted(labels.position[own], times)
        some = index < len(own)
        found[some, column] = labels.position[own[index[some]]]
        good[some, column] = labels.good[own[index[some]]]
    return found, good


def _first(labels: LabelledSteps, chosen: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Of each episode: the position of its first chosen step (infinity: none), and 1.0 where that one is good."""
    first, good = np.full(labels.episodes, np.inf), np.zeros(labels.episodes)
    at = np.flatnonzero(chosen)
    numbers, where = np.unique(labels.episode[at], return_index=True)
    first[numbers] = labels.position[at[where]]
    good[numbers] = labels.good[at[where]]
    return first, good


def _interval(resampled: Floats, mean_f: float, f: int, mean_v: float, v: int) -> tuple[float, float]:
    """95 % interval of the difference of two means over ``f`` and ``v`` episodes, from its bootstrap resamples.

    It is never narrower than Newcombe's for as many episodes: where no violation was a good move, resampling alone
    would take their rate of good moves for certain.
    """
    tail = expanded_tail(max(2, min(f, v)))
    low, high = np.nanquantile(resampled, [tail, 1 - tail])  # a resample without one of the kinds tells nothing
    least_low, least_high = newcombe_interval(mean_f * f, f, mean_v * v, v)
    return min(float(low), least_low), max(float(high), least_high)


def _sign(estimate: float, low: float) -> State:
    return "passed" if low > 0 else "open" if estimate > 0 else "failed"


def _way_out(dead: int, tried: int, settings: AuditSettings) -> Check:
    low, high = wilson_interval(dead, tried)
    note = f"at {dead} of {tried} firings no other action passes"
    if not tried:
        return Check("way_out", "open", None, low, high, dead, tried, note)
    state: State = "passed" if dead / tried <= settings.max_dead_ends else "failed"
    return Check("way_out", state, dead / tried, low, high, dead, tried, note)


def _false_positives(stopped: int, good: int, settings: AuditSettings) -> Check:
    low, high = wilson_interval(stopped, good)
    note = f"stops {stopped} of {good} good moves"
    rate = stopped / good if good else None
    if rate is not None and rate > settings.max_false_positives and low > settings.max_false_positives:
        state: State = "failed"
    elif good < settings.min_good_moves:
        state = "open"
    else:
        state = "passed" if rate is not None and rate <= settings.max_false_positives else "failed"
    return Check("false_positives", state, rate, low, high, stopped, good, note)


def _trigger_rate(fired: int, steps: int, settings: AuditSettings) -> Check:
    low, high = wilson_interval(fired, steps)
    rate = fired / steps if steps else 0.0
    note = f"fires at {fired} of {steps} steps"
    if settings.min_trigger_rate <= rate <= settings.max_trigger_rate:
        state: State = "passed"
    else:
        state = "open" if rate < settings.min_trigger_rate <= high else "failed"
    return Check("trigger_rate", state, rate if steps else None, low, high, fired, steps, note)


def _errors(off: int, episodes: int, settings: AuditSettings) -> Check:
    low, high = wilson_interval(off, episodes)
    state: State = "passed" if off <= settings.max_switched_off * episodes else "failed"
    note = f"is switched off in {off} of {episodes} episodes"
    return Check("errors", state, off / episodes if episodes else None, low, high, off, episodes, note)


# Evaluation: what each predicate did at each step.


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


# The store: what is audited, and what is written down.


@dataclass(frozen=True)
class Audited:
    """A principle's audit, and what became of its status."""

    stored: Stored
    audit: Audit
    status: Status


def audit_store(
    store: Store,
    host: PredicateHost,
    settings: AuditSettings | None = None,
    *,
    round: int = 0,
    world: str | None = None,
    grammar: str | None = None,
) -> list[Audited]:
    """Audit the principles that have a predicate and are in use, on the trajectories of their world and grammar.

    Each verdict becomes a judgement. A candidate that passes is ``audited``; one that fails is ``rejected``, whether it
    was a candidate or audited; one whose evidence is wanting stays what it was. A validated principle keeps its status,
    since its words have helped; its predicate blocks only where its newest audit passed (:mod:`memory.guide`).
    """
    settings = settings or AuditSettings()
    scopes: dict[tuple[str, str], list[Stored]] = defaultdict(list)
    for stored in store.items(3, statuses=["candidate", "audited", "validated"], world=world, grammar=grammar):
        if isinstance(stored.item, PrincipleItem) and stored.item.predicate is not None:
            scopes[stored.item.world, stored.item.grammar].append(stored)
    done = []
    for (in_world, in_grammar), group in scopes.items():
        # The same words as those that a guide parses actions by.
        forms = fit_grammar(list(islice(store.trajectories(grammar=in_grammar), GRAMMAR_TRAJECTORIES)))
        newest = deque(store.trajectories(world=in_world, grammar=in_grammar), maxlen=settings.trajectories)
        principles = {stored.id: stored.item for stored in group if isinstance(stored.item, PrincipleItem)}
        audits = audit(principles, newest, forms.parse, host, settings, changing_steps(newest, forms))
        for stored in group:
            done.append(_record(store, stored, audits[stored.id], round))
    return done


def changing_steps(trajectories: Sequence[Trajectory], grammar: ActionGrammar) -> dict[str, set[int]]:
    """Of each trajectory's id, the indices of the steps that the world took and that brought an answer not seen yet.

    Worlds that do not flag refusals have their refusing texts learnt (:func:`memory.lifting.learn_refusals`).
    """
    runs = read_runs(trajectories, grammar, learn_refusals(trajectories, grammar))
    return {run.id: {event.step for event in run.events if event.changed} for run in runs}


def _record(store: Store, stored: Stored, found: Audit, round: int) -> Audited:
    store.judge(stored.id, "audit", found.record(), round)
    status = stored.status
    if found.decision == "passed" and status == "candidate":
        status = "audited"
        store.set_status(stored.id, status, f"audit: passed on {found.steps} steps", round)
    elif found.decision == "failed" and status in ("candidate", "audited"):
        status = "rejected"
        store.set_status(stored.id, status, f"audit: {found.reason}", round)
    return Audited(stored, found, status)
