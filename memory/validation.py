"""Validation of principles: an experiment on held-out training tasks, with and without each principle.

Who plays the episodes implements :class:`Experiment`; here is which principle is tried on which tasks, and what follows
from the scores. The arms are paired by task, not by seed: prompts differ, so equal seeds are no common random numbers.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any, Literal, Protocol

from memory.records import PrincipleItem, Status
from memory.settings import ValidationSettings
from memory.statistics import Effect, holm, newcombe_interval, paired_effect
from memory.store import Ledger, Store

Scores = Mapping[str, Sequence[float]]
"""Of each task the scores of its episodes, in [0, 1]."""

Decision = Literal["validated", "rejected", "undecided", "untested", "kept", "retired"]
"""Of a hypothesis: ``validated`` (it helps), ``rejected`` (it showed no help), ``undecided`` (perhaps; it may be tried
again), ``untested`` (all episodes of both arms scored the same, as where the policy wins nothing at all, or it was
hardly ever shown; it does not count as tried). Of a validated principle: ``kept`` or ``retired`` (it harms)."""


MIN_SHOWN = 0.5
"""A principle that was shown in a smaller share of the episodes with it was not tried."""


@dataclass(frozen=True)
class Arm:
    """``shown``: share of the episodes in which the principle on trial was instantiated; 0 in the control."""

    scores: Scores
    shown: float


class Experiment(Protocol):
    """Plays episodes for a validation."""

    async def run(self, principle: PrincipleItem | None, tasks: Sequence[str], samples: int) -> Arm:
        """Scores of ``samples`` episodes of each task, under the policy and the memory as they are, in [0, 1].

        ``principle``: shown wherever it can be instantiated, whatever its status, its predicate regulating if its audit
        allows; None: the control. In both arms no other principle on trial is shown. An episode that ends in a fault
        is retried, then counts as 0, so that every task has ``samples`` scores.
        """


@dataclass(frozen=True)
class Contender:
    """A principle that may be tried. ``tried``: experiments that left it undecided; ``active``: it is validated."""

    id: str
    principle: PrincipleItem
    promise: float = 0.0
    tried: int = 0
    active: bool = False
    round: int = 0
    """When it was last tried."""


@dataclass(frozen=True)
class Trial:
    contender: Contender
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """``control``: the tasks that are also played without any principle on trial. ``skipped``: (principle, reason)."""

    trials: tuple[Trial, ...]
    control: tuple[str, ...]
    samples: int
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def episodes(self) -> int:
        return self.samples * (len(self.control) + sum(len(trial.tasks) for trial in self.trials))


@dataclass(frozen=True)
class Result:
    trial: Trial
    without: Scores
    with_principle: Scores
    shown: float = 1.0
    """Share of the episodes with the principle in which it was shown."""


@dataclass(frozen=True)
class Validation:
    """The verdict of an experiment on one principle. ``p_holm``: ``effect.p`` corrected for those tried with it."""

    id: str
    tasks: tuple[str, ...]
    without: float
    """Mean score of the tasks without the principle."""
    with_principle: float
    decision: Decision
    effect: Effect
    p_holm: float
    tried: int
    reason: str

    def record(self) -> dict[str, Any]:
        """As JSON, for the judgement in the store."""
        return {
            "decision": self.decision,
            "reason": self.reason,
            "p_holm": self.p_holm,
            "tried": self.tried,
            "tasks": list(self.tasks),
            "without": self.without,
            "with_principle": self.with_principle,
            **asdict(self.effect),
        }


def promise(ledger: Ledger, direction: float | None) -> float:
    """How much is expected of a principle: its utility so far, shrunk towards 0, plus the direction of its audit.

    The utility is the difference of mean outcomes with and without it, times n / (n + 10) with n the smaller number of
    episodes; the direction is the audit's difference of good moves, None where there was no audit.
    """
    n = min(ledger.episodes_with, ledger.episodes_without)
    utility = (ledger.outcome_with - ledger.outcome_without) * n / (n + 10)
    return utility + (direction or 0.0)


def plan_validation(
    contenders: Sequence[Contender],
    tasks: Mapping[str, str],
    settings: ValidationSettings,
    round: int,
    provenance: Collection[str] = (),
) -> Plan:
    """Choose what is tried on which tasks, within the budget: the least tried and most promising first.

    Every fourth trial is a re-validation that is due, the one longest ago first. Principles of one task type are tried
    on tasks of that type, the others on tasks of all types in equal parts; those that share their tasks share the
    episodes without a principle.

    Args:
        tasks: task type of each held-out training task.
        provenance: tasks that the memory rests on; they are left out.
    """
    new = sorted((c for c in contenders if not c.active), key=lambda c: (c.tried, -c.promise, c.id))
    due = [c for c in contenders if c.active and round - c.round >= settings.revalidate_after]
    due.sort(key=lambda c: (c.round, c.id))
    threes = [new[start : start + 3] for start in range(0, len(new), 3)]
    order = [c for group, again in zip_longest(threes, due) for c in [*(group or ()), *([again] if again else ())]]

    free = {task: kind for task, kind in tasks.items() if task not in provenance}
    chosen: dict[str, tuple[str, ...]] = {}
    trials: list[Trial] = []
    control: set[str] = set()
    skipped: list[tuple[str, str]] = []
    left = settings.episodes
    for contender in order:
        kind = contender.principle.task_type
        if kind not in chosen:
            chosen[kind] = _choose(free, kind, settings, round)
        own = chosen[kind]
        if len(own) < settings.tasks:
            of = f"of type {kind}" if kind else "in all"
            skipped.append((contender.id, f"{len(own)} held-out tasks {of}; {settings.tasks} are needed"))
            continue
        cost = settings.samples * (len(own) + len(set(own) - control))
        if cost > left:
            skipped.append((contender.id, f"would cost {cost} episodes, {left} are left of {settings.episodes}"))
            continue
        left -= cost
        control |= set(own)
        trials.append(Trial(contender, own))
    return Plan(tuple(trials), tuple(sorted(control)), settings.samples, tuple(skipped))


def _choose(tasks: Mapping[str, str], kind: str, settings: ValidationSettings, round: int) -> tuple[str, ...]:
    """``settings.tasks`` tasks for principles of ``kind``, types in turn; others each round."""
    groups: dict[str, list[str]] = defaultdict(list)
    for task in sorted(tasks):
        if kind in ("", tasks[task]):
            groups[tasks[task]].append(task)
    chance = random.Random(f"{settings.seed}/{round}/{kind}")
    for group in groups.values():
        chance.shuffle(group)
    rows = zip_longest(*(groups[name] for name in sorted(groups)))
    return tuple(sorted([task for row in rows for task in row if task is not None][: settings.tasks]))


async def run_validation(plan: Plan, experiment: Experiment) -> list[Result]:
    """Play the plan: the control once, and each trial; all arms at once, as far as the experiment lets them."""
    if not plan.trials:
        return []
    try:
        async with asyncio.TaskGroup() as group:
            control = group.create_task(experiment.run(None, plan.control, plan.samples))
            arms = [
                group.create_task(experiment.run(trial.contender.principle, trial.tasks, plan.samples))
                for trial in plan.trials
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    without = control.result().scores
    return [
        Result(trial, {task: without[task] for task in trial.tasks}, arm.result().scores, arm.result().shown)
        for trial, arm in zip(plan.trials, arms, strict=True)
    ]


def judge_validation(results: Sequence[Result], settings: ValidationSettings) -> list[Validation]:
    """The verdicts: bootstrap over tasks, Holm over the hypotheses tried.

    A hypothesis is validated where Holm's procedure rejects that it makes no difference and the difference is positive
    (at level 0.05 its 95 % interval then lies above zero). It is rejected where the difference is not positive, or when
    it has stayed undecided ``settings.tries`` times; unless all scores are equal, or it was hardly ever shown, which
    tells nothing of it. A validated principle is retired where its interval lies below zero.

    Raises:
        ValueError: the arms of a result have not the same tasks.
    """
    effects = [
        paired_effect(result.without, result.with_principle, settings.resamples, settings.seed) for result in results
    ]
    untested = [_untested(result) for result in results]
    hypotheses = [
        index for index, result in enumerate(results) if not result.trial.contender.active and not untested[index]
    ]
    corrected = dict(zip(hypotheses, holm([effects[index].p for index in hypotheses]), strict=True))
    verdicts = []
    for index, (result, effect) in enumerate(zip(results, effects, strict=True)):
        contender = result.trial.contender
        tried = contender.tried + (not untested[index])
        p_holm = corrected.get(index, effect.p)
        if contender.active:
            decision: Decision = "retired" if effect.high < 0 else "kept"
        elif untested[index]:
            decision = "untested"
        elif p_holm <= settings.level and effect.difference > 0:
            decision = "validated"
        else:
            decision = "rejected" if effect.difference <= 0 or tried >= settings.tries else "undecided"
        reason = (
            f"difference {effect.difference:+.3f} ({effect.low:+.3f} to {effect.high:+.3f}) over {effect.n} tasks x "
            f"{settings.samples} samples; p {effect.p:.3g}, corrected {p_holm:.3g}{untested[index]}"
        )
        means = mean_score(result.without), mean_score(result.with_principle)
        verdicts.append(Validation(contender.id, result.trial.tasks, *means, decision, effect, p_holm, tried, reason))
    return verdicts


def _untested(result: Result) -> str:
    """Why the scores say nothing of a principle; "": they do."""
    arms = result.without, result.with_principle
    scores = {score for arm in arms for of_task in arm.values() for score in of_task}
    if len(scores) == 1:
        return f"; every episode scored {scores.pop():.3g}, which tells nothing"
    if result.shown < MIN_SHOWN:
        return f"; it was shown in {result.shown:.0%} of the episodes only, which tells nothing"
    return ""


def mean_score(scores: Scores) -> float:
    """The mean over tasks of the mean of their episodes."""
    return fmean(fmean(of_task) for of_task in scores.values())


def ledger_interval(ledger: Ledger) -> tuple[float, float]:
    """95 % interval of the difference of mean outcomes, with minus without (Newcombe; outcomes lie in [0, 1])."""
    return newcombe_interval(
        ledger.outcome_with * ledger.episodes_with,
        ledger.episodes_with,
        ledger.outcome_without * ledger.episodes_without,
        ledger.episodes_without,
    )


def ledger_retires(ledger: Ledger, settings: ValidationSettings) -> bool:
    """Whether enough episodes show that outcomes are worse with the principle than without it."""
    enough = min(ledger.episodes_with, ledger.episodes_without) >= settings.ledger_episodes
    return enough and ledger_interval(ledger)[1] < 0


# The store: who is tried, and what is written down.


def contenders(store: Store, world: str, grammar: str) -> list[Contender]:
    """The principles that are neither rejected nor retired, with what is known of them."""
    found = []
    for stored in store.items(3, statuses=["candidate", "audited", "validated"], world=world, grammar=grammar):
        assert isinstance(stored.item, PrincipleItem)
        trials = store.judgements(stored.id, "validation")
        found.append(
            Contender(
                stored.id,
                stored.item,
                promise(stored.ledger, _audited_direction(store, stored.id)),
                sum(trial.verdict.get("decision") != "untested" for trial in trials),
                stored.status == "validated",
                max((trial.round for trial in trials), default=0),
            )
        )
    return found


def _audited_direction(store: Store, id: str) -> float | None:
    audits = store.judgements(id, "audit")
    checks: Any = audits[-1].verdict.get("checks", []) if audits else []
    return next((check["estimate"] for check in checks if check["name"] == "direction"), None)


_STATUSES: dict[Decision, Status] = {"validated": "validated", "rejected": "rejected", "retired": "retired"}


def record_validation(store: Store, verdicts: Sequence[Validation], round: int) -> None:
    """Write each verdict as a judgement, and the status that follows from it. Repeating it changes nothing."""
    for verdict in verdicts:
        if all(kept.verdict != verdict.record() for kept in store.judgements(verdict.id, "validation")):
            store.judge(verdict.id, "validation", verdict.record(), round)
        status = _STATUSES.get(verdict.decision)
        if status is not None and store.item(verdict.id).status != status:
            store.set_status(verdict.id, status, f"validation: {verdict.reason}", round)


def retire_by_ledger(
    store: Store, world: str, grammar: str, settings: ValidationSettings, round: int
) -> list[tuple[str, str]]:
    """Retire the principles in use whose ledger is negative; returns (id, reason) of each."""
    retired = []
    for stored in store.items(3, statuses=["candidate", "audited", "validated"], world=world, grammar=grammar):
        ledger = stored.ledger
        if ledger_retires(ledger, settings):
            low, high = ledger_interval(ledger)
            reason = (
                f"ledger: outcome {ledger.outcome_with:.3f} in {ledger.episodes_with} episodes with it, "
                f"{ledger.outcome_without:.3f} in {ledger.episodes_without} without; "
                f"difference {low:+.3f} to {high:+.3f}"
            )
            store.set_status(stored.id, "retired", reason, round)
            retired.append((stored.id, reason))
    return retired
