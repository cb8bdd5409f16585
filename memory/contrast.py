"""Rules that separate failures from successes, found by exact tests over episodes.

A rule says: an action of one form needs a condition (:mod:`memory.conditions`), exceptions apart. It is sought twice.

- **Refusals.** Breaking it gets the action refused: a precondition. Units are episodes, each with its first breaking
  and its first keeping occasion.
- **Outcomes.** Breaking it, though the world takes the action, goes with a failed episode: an order, a prohibition. An
  episode that breaks the rule for the first time is compared with those of its task type that at about the same step
  (a bin) had the same occasion and had not broken it, as in a log-rank test. So what merely tracks time, and with it
  failure, shows nothing: all episodes reach step 30 at step 30.

The p-values are corrected for all the rules tried (Bonferroni, with a third of the level for each of: plain conditions,
conditions with a pair of actions, rules with an exception; there are many more of the latter two). A rule must moreover
hardly ever stop what went well, and of several rules that explain the same, the plainest is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from memory.conditions import Condition, candidates, exemptions, general_candidates
from memory.lifting import Run
from memory.occasions import Occasions, gather
from memory.records import Record
from memory.significance import Table, risk_difference, stratified_test

Bad = Literal["refused", "failed"]


class ContrastSettings(Record):
    """When a difference counts."""

    min_support: int = 5
    """Episodes that must break a rule, and that must keep it."""
    alpha: float = 0.05
    """Level of significance over all tests of one build."""
    max_good_stopped: float = 0.01
    """Largest share of the taken actions of successful episodes that a rule may forbid."""
    max_broken_well: float = 0.05
    """Largest share of the breaking episodes that may get away with it."""
    min_effect: float = 0.15
    """Smallest difference between breaking and keeping: in the share refused, or in the share failed."""
    per_form: int = 4
    """Most preconditions of one action form."""
    deciders: int = 12
    """Most rules about outcomes."""
    max_repeats: int = 4
    max_episodes: int = 2000
    """Most episodes compared, drawn by their ids (hashes: any draw is as good as random)."""


@dataclass(frozen=True)
class Rule:
    """``verb`` ("": any form) needs ``requirement`` or one of ``exceptions``, in tasks of ``task_type`` ("": any)."""

    verb: str
    requirement: Condition
    exceptions: tuple[Condition, ...] = ()
    task_type: str = ""
    bad: Bad = "refused"

    @property
    def complexity(self) -> int:
        exceptions = sum(4 + exception.complexity for exception in self.exceptions)
        return self.requirement.complexity + exceptions + bool(self.task_type)

    def broken(self, at: Occasions) -> np.ndarray:
        """Whether each occasion breaks it, whatever its task type; shape (N,)."""
        kept = self.requirement.holds(at)
        for exception in self.exceptions:
            kept = kept | exception.holds(at)
        return ~kept


@dataclass(frozen=True, eq=False)
class Finding:
    """A rule with what was counted. Tables are (breaking, breaking and bad, keeping, keeping and bad) episodes."""

    rule: Rule
    tables: tuple[Table, ...]
    p_value: float
    """Of one test."""
    adjusted: float
    """After the correction for all rules tried."""
    score: int
    """Bad episodes that it explains, less twice those that broke it and got away with it."""
    broken: np.ndarray
    """Indices of the occasions that break it …"""
    kept: np.ndarray
    """… and that keep it (what earlier rules explain apart)."""

    @property
    def total(self) -> Table:
        breaking, bad, keeping, kept_bad = np.array(self.tables).sum(axis=0).tolist()
        return breaking, bad, keeping, kept_bad


_BINS = np.array([2, 4, 7, 11, 16, 22, 30, 40, 55, 75, 100])
"""Events from which the bins after the first begin."""


@dataclass(frozen=True)
class _Sample:
    """Some occasions of one form (arrays over them) and one way in which they may be bad."""

    at: Occasions
    task_type: str
    kind: Bad
    use: np.ndarray
    """Indices into the occasions of the form."""
    run: np.ndarray
    bad: np.ndarray
    good: np.ndarray
    """Taken, in a successful episode."""
    stratum: np.ndarray
    """0 for refusals, which follow at once; else task type and bin of the step, as one number."""
    good_actions: int
    """Taken actions in the successful episodes of the scope."""


@dataclass
class _Pool:
    """What is worth testing on a sample; each truth is an array over its occasions.

    ``plain``: conditions that stop some bad and hardly any good actions. ``mixed``: conditions that stop too many good
    ones, and ``exempt``: what may be exempted from them. ``tried``: the numbers of all that were looked at, by family.
    """

    plain: list[Condition]
    plain_broken: list[np.ndarray]
    mixed: list[Condition]
    mixed_broken: list[np.ndarray]
    exempt: list[Condition]
    exempt_holds: np.ndarray
    """Shape (exempt, occasions)."""
    tried: Counter[str] = field(default_factory=Counter)


class Search:
    """One search over all runs of a world and grammar.

    Attributes:
        tried: number of rules tried, by family.
    """

    def __init__(self, runs: Sequence[Run], settings: ContrastSettings) -> None:
        self.runs = runs = _sampled(runs, settings.max_episodes)
        self.settings = settings
        self.verbs = _frequent(runs, settings.min_support)
        self.occasions = gather(runs, self.verbs)
        self._success = np.array([run.success is True for run in runs], bool)
        self._known = np.array([run.success is not None for run in runs], bool)
        types = sorted({run.trajectory.task_type for run in runs})
        self._types = types if len(types) > 1 else []
        self._type = np.array([types.index(run.trajectory.task_type) for run in runs], np.int64)
        self._good_actions = self._success * np.array([sum(not event.refused for event in run.events) for run in runs])
        self._plan = [entry for verb in ("", *self.verbs) for entry in self._pools(self.occasions[verb])]
        self.tried = sum((pool.tried for _, pool in self._plan), Counter())

    def findings(self) -> list[Finding]:
        """The rules found: preconditions form by form, then what decides the outcome."""
        found: list[Finding] = []
        for sample, pool in self._plan:
            if sample.kind == "refused":
                found += self._preconditions(sample, pool)
        return found + self._deciders([entry for entry in self._plan if entry[0].kind == "failed"])

    def _preconditions(self, sample: _Sample, pool: _Pool) -> list[Finding]:
        """Greedily the rules that explain most refusals of one form.

        Once a rule is chosen, the occasions that break it are set aside: another has to show its worth on the rest.
        """
        found: list[Finding] = []
        rest = np.ones(len(sample.use), bool)
        while len(found) < self.settings.per_form:
            trials = self._trials(sample, pool, rest)
            if not trials:
                break
            close = _close(trials)
            found.append(min(close, key=lambda trial: (trial.rule.complexity, -trial.score, repr(trial.rule))))
            rest &= ~np.isin(sample.use, found[-1].broken)
        return found

    def _deciders(self, plan: Sequence[tuple[_Sample, _Pool]]) -> list[Finding]:
        """Greedily the rules that explain most failures, over all forms and task types.

        Once a rule is chosen, the episodes that break it are set aside. Of rules that explain about the same, the one
        that is broken first is the cause; what comes after it in the same episodes is its consequence.
        """
        found: list[Finding] = []
        explained: set[int] = set()
        while len(found) < self.settings.deciders:
            trials: list[tuple[Finding, dict[int, int]]] = []
            for sample, pool in plan:
                rest = ~np.isin(sample.run, list(explained))
                for trial in self._trials(sample, pool, rest):
                    trials.append((trial, _first_positions(sample.at, trial.broken)))
            if not trials:
                break
            close = [(trial, first) for trial, first in trials if trial in _close([one for one, _ in trials])]
            runs = set.intersection(*(set(first) for _, first in close))
            chosen = min(
                close,
                key=lambda entry: (
                    sum(entry[1][run] for run in runs),
                    entry[0].rule.complexity,
                    -entry[0].score,
                    repr(entry[0].rule),
                ),
            )
            found.append(chosen[0])
            explained.update(chosen[1])
        return found

    def _trials(self, sample: _Sample, pool: _Pool, rest: np.ndarray) -> list[Finding]:
        """The rules that pass on the occasions ``rest`` of ``sample``."""
        trials = (self._test(sample, rule, broken, rest) for rule, broken in self._rules(sample, pool, rest))
        return [trial for trial in trials if trial is not None]

    def _samples(self, at: Occasions) -> list[_Sample]:
        """Refusals, then outcomes over all task types, then outcomes type by type."""
        if not len(at):
            return []
        taken = ~at.refused & self._known[at.run]
        samples = [self._sample(at, "", "refused", np.ones(len(at), bool)), self._sample(at, "", "failed", taken)]
        for number, task_type in enumerate(self._types):
            samples.append(self._sample(at, task_type, "failed", taken & (self._type[at.run] == number)))
        return [sample for sample in samples if len(set(sample.run[sample.bad])) >= self.settings.min_support]

    def _sample(self, at: Occasions, task_type: str, bad: Bad, mask: np.ndarray) -> _Sample:
        use = np.flatnonzero(mask)
        run = at.run[use]
        bins = np.digitize(at.position[use], _BINS) + self._type[run] * (len(_BINS) + 1)
        actions = self._good_actions
        if task_type:
            actions = actions * (self._type == self._types.index(task_type))
        return _Sample(
            at=at,
            task_type=task_type,
            kind=bad,
            use=use,
            run=run,
            bad=at.refused[use] if bad == "refused" else ~self._success[run],
            good=~at.refused[use] & self._success[run],
            stratum=np.zeros(len(use), np.int64) if bad == "refused" else bins,
            good_actions=int(actions.sum()),
        )

    def _pools(self, at: Occasions) -> list[tuple[_Sample, _Pool]]:
        """The samples of one form, each with what is worth testing on it."""
        samples = self._samples(at)
        if not samples:
            return []
        if at.verb == "":
            conditions = general_candidates(at, self.verbs, self.settings.max_repeats)
            exempt: list[Condition] = []
        else:
            conditions = candidates(at, pairs=samples[0].kind == "refused")
            exempt = exemptions(at)
        pools = [
            _Pool([], [], [], [], exempt, _stack([one.holds(at)[sample.use] for one in exempt], len(sample.use)))
            for sample in samples
        ]
        for condition in conditions:
            broken_at = ~condition.holds(at)
            pair = condition.name == "since"
            for sample, pool in zip(samples, pools, strict=True):
                if pair and sample.kind == "failed":
                    continue
                pool.tried["pairs" if pair else "plain"] += 1
                pool.tried["mixed"] += len(exempt) if _mixable(condition) else 0
                broken = broken_at[sample.use]
                if np.count_nonzero(broken & sample.bad) < self.settings.min_support:
                    continue
                if np.count_nonzero(broken & sample.good) <= self._allowed(sample):
                    pool.plain.append(condition)
                    pool.plain_broken.append(broken)
                elif _mixable(condition):
                    pool.mixed.append(condition)
                    pool.mixed_broken.append(broken)
        return list(zip(samples, pools, strict=True))

    def _allowed(self, sample: _Sample) -> float:
        """Good actions that a rule may stop."""
        return self.settings.max_good_stopped * sample.good_actions

    def _rules(self, sample: _Sample, pool: _Pool, rest: np.ndarray) -> Iterator[tuple[Rule, np.ndarray]]:
        """The rules to test on the occasions ``rest``, with where they are broken there."""
        for condition, broken in zip(pool.plain, pool.plain_broken, strict=True):
            yield Rule(sample.at.verb, condition, (), sample.task_type, sample.kind), broken & rest
        if not pool.mixed or not pool.exempt:
            return

        mixed = _stack(pool.mixed_broken, len(sample.use))
        others = (~pool.exempt_holds).astype(np.float32).T

        def count(occasions: np.ndarray) -> np.ndarray:
            """Of ``occasions``, those that break each of the mixed and are not exempted by each of the exempt."""
            return (mixed & occasions).astype(np.float32) @ others

        support = self.settings.min_support
        saved = (mixed & rest & ~sample.bad).sum(axis=1)[:, None] - count(rest & ~sample.bad)
        worth = (count(rest & sample.good) <= self._allowed(sample)) & (count(rest & sample.bad) >= support)
        for row, column in np.argwhere(worth & (saved >= support)):
            broken, exempted = mixed[row] & rest, pool.exempt_holds[column]
            rule = Rule(sample.at.verb, pool.mixed[row], (pool.exempt[column],), sample.task_type, sample.kind)
            # Among what breaks the condition, the exempted must differ from the others for certain.
            tables = self._tables(sample, broken & ~exempted, broken & exempted)
            if self._adjusted(rule, stratified_test(tables)) <= self.settings.alpha:
                yield rule, broken & ~exempted

    def _test(self, sample: _Sample, rule: Rule, broken: np.ndarray, rest: np.ndarray) -> Finding | None:
        """The finding, or None where the rule does not pass."""
        settings = self.settings
        tables = self._tables(sample, broken, rest & ~broken)
        _, breaking_bad, keeping, _ = np.array(tables).sum(axis=0).tolist() if tables else (0, 0, 0, 0)
        if breaking_bad < settings.min_support or keeping < settings.min_support:
            return None
        if not self._sharper(sample, rule, broken):
            return None
        breakers = np.unique(sample.run[broken])
        if sample.kind == "refused":
            well = len(np.unique(sample.run[broken & ~sample.bad]))
            well_share = well / len(breakers)
        else:  # "successes keep it": of the successful episodes with such an occasion, how many break it
            well = int(self._success[breakers].sum())
            well_share = well / max(1, len(np.unique(sample.run[sample.good & rest])))
        if well_share > settings.max_broken_well or risk_difference(tables) < settings.min_effect:
            return None
        p_value = stratified_test(tables)
        adjusted = self._adjusted(rule, p_value)
        if adjusted > settings.alpha:
            return None
        return Finding(
            rule=rule,
            tables=tuple(tables),
            p_value=p_value,
            adjusted=adjusted,
            score=breaking_bad - 2 * well,
            broken=sample.use[broken],
            kept=sample.use[rest & ~broken],
        )

    def _sharper(self, sample: _Sample, rule: Rule, broken: np.ndarray) -> bool:
        """Whether a rule on when an action was last played has support where it was played, but not so.

        Where only its not having been played is bad, the plain rule says as much.
        """
        requirement = rule.requirement
        if requirement.name not in ("since", "current", "previous") or not requirement.positive:
            return True
        played = sample.at.last[sample.use, sample.at.column[requirement.columns[0]]] >= 0
        return len(np.unique(sample.run[broken & played & sample.bad])) >= self.settings.min_support

    def _adjusted(self, rule: Rule, p_value: float) -> float:
        family = "mixed" if rule.exceptions else "pairs" if rule.requirement.name == "since" else "plain"
        return min(1.0, 3 * self.tried[family] * p_value)

    def _tables(self, sample: _Sample, broken: np.ndarray, kept: np.ndarray) -> list[Table]:
        """Per stratum, the episodes that break there first, and those that keep and have not broken yet."""
        never = np.iinfo(np.int64).max
        first = np.full(len(self.runs), never)
        where = np.flatnonzero(broken)[::-1]
        first[sample.run[where]] = where  # the earliest is written last
        breakers = np.flatnonzero(first < never)
        start = first[breakers]
        breaking: dict[int, list[int]] = {}
        for stratum, bad in zip(sample.stratum[start].tolist(), sample.bad[start].tolist(), strict=True):
            cell = breaking.setdefault(stratum, [0, 0])
            cell[0] += 1
            cell[1] += bad
        where = np.flatnonzero(kept)
        if sample.kind == "failed":  # comparable only up to the bin in which the episode breaks the rule
            limit = np.full(len(self.runs), never)
            limit[breakers] = sample.stratum[start]
            where = where[sample.stratum[where] < limit[sample.run[where]]]
        pairs = sample.run[where] * 1_000_000 + sample.stratum[where]
        _, once = np.unique(pairs, return_index=True)
        keeping: dict[int, list[int]] = {}
        for stratum, bad in zip(sample.stratum[where[once]].tolist(), sample.bad[where[once]].tolist(), strict=True):
            cell = keeping.setdefault(stratum, [0, 0])
            cell[0] += 1
            cell[1] += bad
        strata = sorted({*breaking, *keeping})
        return [(*breaking.get(one, (0, 0)), *keeping.get(one, (0, 0))) for one in strata]


def _close(trials: Sequence[Finding]) -> list[Finding]:
    """Those that explain about as much as the best."""
    most = max(trial.score for trial in trials)
    return [trial for trial in trials if trial.score >= 0.9 * most - 1]


def _first_positions(at: Occasions, broken: np.ndarray) -> dict[int, int]:
    """Run -> position of its first broken occasion."""
    first: dict[int, int] = {}
    for run, position in zip(at.run[broken].tolist(), at.position[broken].tolist(), strict=True):
        first.setdefault(run, position)
    return first


def _sampled(runs: Sequence[Run], size: int) -> list[Run]:
    """At most ``size`` of ``runs``, in their order."""
    chosen = {run.id for run in sorted(runs, key=lambda run: run.id)[:size]}
    return [run for run in runs if run.id in chosen]


def _mixable(condition: Condition) -> bool:
    """Whether rules with exceptions are made of the condition."""
    return condition.positive and condition.name in ("done", "current", "goal", "seen")


def _stack(rows: list[np.ndarray], size: int) -> np.ndarray:
    """Shape (rows, size), of no row as well."""
    return np.array(rows, bool).reshape(len(rows), size)


def _frequent(runs: Sequence[Run], support: int) -> list[str]:
    """The forms that were taken in at least ``support`` episodes, the more frequent first."""
    uses = Counter(verb for run in runs for verb in {event.verb for event in run.events if not event.refused})
    return [verb for verb, count in sorted(uses.items(), key=lambda item: (-item[1], item[0])) if count >= support]
