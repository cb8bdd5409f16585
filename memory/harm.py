"""Whether breaking a principle does harm: a judgement that counts, and cites where it can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memory.contrast import Finding, Rule, Search
from memory.lifting import Run
from memory.occasions import Occasions
from memory.records import Evidence
from memory.significance import risk_difference
from memory.statistics import newcombe_interval, wilson_interval


@dataclass(frozen=True)
class HarmJudgement:
    """``item``: the principle. ``verdict``: JSON, as :func:`judge_harm` makes it."""

    item: str
    verdict: dict[str, Any]


def judge_harm(finding: Finding, at: Occasions, search: Search, cited: Sequence[Evidence]) -> dict[str, Any]:
    """The record of a harm judgement.

    Breaking a rule is harmful if episodes that do fail more often for certain, or if it is certain to cost steps (what
    breaks it is refused in most episodes, by the interval) and such episodes do not succeed more often for certain.

    Args:
        cited: steps that break it, for the record.
    """
    rule, runs = finding.rule, search.runs
    scope = in_scope(rule, at, runs)
    if rule.bad == "failed":
        scope &= ~at.refused
    broken = rule.broken(at) & scope
    breakers = set(at.run[broken].tolist())
    keepers = set(at.run[scope].tolist()) - breakers
    without, with_it = _outcomes(runs, keepers), _outcomes(runs, breakers)
    low, high = newcombe_interval(*without, *with_it)
    wasted = set(at.run[broken & at.refused].tolist())
    if low > 0:
        because = "episodes that break it fail more often"
    elif wilson_interval(len(wasted), len(breakers))[0] > 0.5 and high >= 0:
        because = "breaking it costs a step each time"
    else:
        because = ""
    actions = sum(len(run.events) for run in runs if rule.task_type in ("", run.trajectory.task_type))
    violations, refused = int(broken.sum()), int(at.refused[broken].sum())
    return {
        "harmful": bool(because),
        "reason": (
            f"{violations} violations in {len(breakers)} episodes, {refused} of them refused; success "
            f"{with_it[0]}/{with_it[1]} with a violation, {without[0]}/{without[1]} without: "
            + (because or "no certain harm")
        ),
        "violations": violations,
        "violations_per_action": violations / max(1, actions),
        "refused": refused,
        "episodes_with": len(breakers),
        "episodes_without": len(keepers),
        "success_with": list(with_it),
        "success_without": list(without),
        "difference_interval": [low, high],
        "tested_on": rule.bad,
        "effect": risk_difference(finding.tables),
        "p_value": finding.p_value,
        "p_value_corrected": finding.adjusted,
        "tried": dict(search.tried),
        "evidence": [evidence.model_dump(mode="json") for evidence in cited],
    }


def in_scope(rule: Rule, at: Occasions, runs: Sequence[Run]) -> np.ndarray:
    """Whether each occasion is in a task of the rule's type, shape (N,)."""
    return np.array([rule.task_type in ("", runs[run].trajectory.task_type) for run in at.runs], bool)


def is_bad(rule: Rule, at: Occasions, runs: Sequence[Run]) -> np.ndarray:
    """Whether each occasion went the way that the rule is to prevent, shape (N,)."""
    if rule.bad == "refused":
        return at.refused
    return np.array([runs[run].success is not True for run in at.runs], bool)


def _outcomes(runs: Sequence[Run], chosen: Iterable[int]) -> tuple[int, int]:
    """(successes, episodes of known outcome) among the chosen."""
    known = [success for run in chosen if (success := runs[run].success) is not None]
    return sum(known), len(known)
