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
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memory.conditions import Condition, Occasions, candidates, exemptions, gather, general_candidates
from memory.lifting import Run
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
    """Most rules about one action form, for each of the two kinds."""
    max_repeats: int = 4


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
        return self.requirement.complexity + sum(4 + exception.complexity for exception in self.exceptions)

    def broken(self, at: Occasions) -> np.ndarray:
        """Whether each occasion breaks it, whatever its task type; shape (N,)."""
        kept = self.requirement.holds(at)
        for exception in self.exceptions:
            kept = kept | exception.holds(at)
        return ~kept


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class _Pool:
    """Conditions to try, with their truth at the occasions of a sample, shape (conditions, occasions)."""

    plain: list[Condition]
    plain_kept: np.ndarray
    mixed: list[int]
    """Indices of the plain ones that may have exceptions."""
    exempt: list[Condition]
    exempt_holds: np.ndarray


class Search:
    """One search over all runs of a world and grammar.

    Attributes:
        tried: number of rules tried, by family.
    """

    def __init__(self, runs: Sequence[Run], settings: ContrastSettings) -> None:
        self.runs = runs
        self.settings = settings
        self.verbs = _frequent(runs, settings.min_support)
        self.occasions = gather(runs, self.verbs)
        self._success = np.array([run.success is True for run in runs], bool)
        self._known = np.array([run.success is not None for run in runs], bool)
        types = sorted({run.trajectory.task_type for run in runs})
        self._types = types if len(types) > 1 else []
        self._type = np.array([types.index(run.trajectory.task_type) for run in runs], np.int64)
        self._good_actions = self._success * np.array([sum(not event.refused for event in run.events) for run in runs])
        self._plan = [
            (sample, self._pool(sample)) for verb in ("", *self.verbs) for sample in self._samples(self.occasions[verb])
        ]
        self.tried: Counter[str] = Counter()
        for _, pool in self._plan:
            pairs = sum(one.name == "since" for one in pool.plain)
            self.tried.update(plain=len(pool.plain) - pairs, pairs=pairs, mixed=len(pool.mixed) * len(pool.exempt))

    def findings(self) -> list[Finding]:
        """The rules found, form by form; a rule of one task type only where none of any type explains the same."""
        found: list[Finding] = []
        explained: dict[tuple[str, Bad], np.ndarray] = {}
        for sample, pool in self._plan:
            mask = explained.setdefault((sample.at.verb, sample.kind), np.zeros(len(sample.at), bool))
            found += self._cover(sample, pool, mask)
        return found

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

    def _pool(self, sample: _Sample) -> _Pool:
        at = sample.at
        if at.verb == "":
            plain = general_candidates(at, self.verbs, self.settings.max_repeats)
            exempt: list[Condition] = []
        else:
            plain = candidates(at, pairs=sample.kind == "refused")
            exempt = exemptions(at)
        mixed = [n for n, one in enumerate(plain) if one.positive and one.name in ("done", "current", "goal", "seen")]
        return _Pool(plain, _truth(plain, sample), mixed, exempt, _truth(exempt, sample))

    def _cover(self, sample: _Sample, pool: _Pool, explained: np.ndarray) -> list[Finding]:
        """Greedily the rules that explain most; ``explained``: per occasion of the form, whether a rule does already.

        Once a rule is chosen, what breaks it is set aside (refusals: those occasions; outcomes: those episodes), and
        the others have to show their worth on the rest.
        """
        found: list[Finding] = []
        while len(found) < self.settings.per_form:
            rest = ~explained[sample.use]
            trials = [
                trial
                for rule, broken in self._rules(sample, pool, rest)
                if (trial := self._test(sample, rule, broken, rest))
            ]
            if not trials:
                break
            most = max(trial.score for trial in trials)
            close = [trial for trial in trials if trial.score >= 0.9 * most - 1]
            chosen = min(close, key=lambda trial: (trial.rule.complexity, -trial.score, repr(trial.rule)))
            found.append(chosen)
            if sample.kind == "refused":
                explained[chosen.broken] = True
            else:
                explained[np.isin(sample.at.run, sample.at.run[chosen.broken])] = True
        return found

    def _rules(self, sample: _Sample, pool: _Pool, rest: np.ndarray) -> Iterator[tuple[Rule, np.ndarray]]:
        """The rules that pass simple counts of occasions, with where they are broken."""
        good, bad = sample.good & rest, sample.bad & rest
        allowed = self.settings.max_good_stopped * sample.good_actions
        support = self.settings.min_support
        broken = ~pool.plain_kept
        stops_good = broken @ good.astype(np.float32)
        stops_bad = broken @ bad.astype(np.float32)
        for n in np.flatnonzero((stops_good <= allowed) & (stops_bad >= support)):
            yield Rule(sample.at.verb, pool.plain[n], (), sample.task_type, sample.kind), broken[n] & rest
        base = [n for n in pool.mixed if stops_good[n] > allowed and stops_bad[n] >= support]
        if not base or not pool.exempt:
            return
        out = pool.exempt_holds.T.astype(np.float32)
        fine = (~sample.bad & rest).astype(np.float32)
        saved = (broken[base] * fine) @ out
        left_good = stops_good[base][:, None] - (broken[base] * good.astype(np.float32)) @ out
        left_bad = stops_bad[base][:, None] - (broken[base] * bad.astype(np.float32)) @ out
        for row, column in np.argwhere((left_good <= allowed) & (left_bad >= support) & (saved >= support)):
            breaks = broken[base[row]] & rest
            exempted = pool.exempt_holds[column]
            # Among what breaks the rule, the exempted must differ from the others for certain.
            tables = self._tables(sample, breaks & ~exempted, breaks & exempted)
            rule = Rule(sample.at.verb, pool.plain[base[row]], (pool.exempt[column],), sample.task_type, sample.kind)
            if self._adjusted(rule, stratified_test(tables)) <= self.settings.alpha:
                yield rule, breaks & ~exempted

    def _test(self, sample: _Sample, rule: Rule, broken: np.ndarray, rest: np.ndarray) -> Finding | None:
        """The finding, or None where the rule does not pass."""
        settings = self.settings
        tables = self._tables(sample, broken, rest & ~broken)
        _, breaking_bad, keeping, _ = np.array(tables).sum(axis=0).tolist() if tables else (0, 0, 0, 0)
        if breaking_bad < settings.min_support or keeping < settings.min_support:
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


def _truth(conditions: Sequence[Condition], sample: _Sample) -> np.ndarray:
    """Shape (conditions, occasions of the sample)."""
    if not conditions:
        return np.zeros((0, len(sample.use)), bool)
    return np.stack([condition.holds(sample.at)[sample.use] for condition in conditions])


def _frequent(runs: Sequence[Run], support: int) -> list[str]:
    """The forms that were taken in at least ``support`` episodes, the more frequent first."""
    uses = Counter(verb for run in runs for verb in {event.verb for event in run.events if not event.refused})
    return [verb for verb, count in sorted(uses.items(), key=lambda item: (-item[1], item[0])) if count >= support]
