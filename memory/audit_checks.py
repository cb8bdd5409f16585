"""The statistics of an audit: from what a predicate did at labelled steps to a verdict on it.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memory.records import Trajectory
from memory.settings import AuditSettings
from memory.statistics import Floats, expanded_tail, newcombe_interval, wilson_interval

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
