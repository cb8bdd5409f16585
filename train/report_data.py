"""What a report computes from runs: curves, what each part contributed, cost. Pure functions over what they left."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from train.compare import Comparison, compare
from train.config import ConfigError
from train.trajectory import Episode

Evaluations = Mapping[str, dict[str, Any]]
Points = list[tuple[float, float]]

WITHOUT = "-without"
"""Ends the phase of an evaluation that leaves out the memory which the run has."""

_NAMES = {
    "eval": "evaluation",
    "eval-start": "at the start",
    "eval-warm": "after warm start",
    "eval-rejection": "after rejection sampling",
}


def evaluation_name(config: Mapping[str, Any], phase: str) -> str:
    """What a table calls the evaluation of ``phase`` in a run with this configuration.

    >>> evaluation_name({"rounds": 3}, "eval-round-0002-without"), evaluation_name({"grpo": {}}, "eval-final")
    ('after round 2, without memory', 'after RL')
    """
    whole = phase.removesuffix(WITHOUT)
    number = re.fullmatch(r"eval-round-0*(\d+)", whole)
    rounds = config.get("rounds", 1)
    if number or (whole == "eval-final" and rounds > 1):
        name = f"after round {number[1] if number else rounds}"
    elif whole == "eval-final":
        name = "at the end" if config.get("grpo") is None else "after RL"
    else:
        name = _NAMES.get(whole, whole)
    return name if whole == phase else f"{name}, without memory"


def chart(phase: str) -> str:
    """Phases that are counted make one curve: grpo-0001, grpo-0002, …"""
    return re.sub(r"-\d+$", "", phase)


def curves(metrics: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Points]:
    """Of each (chart, metric) that is a number the values by step. Booleans, texts and what is missing are left out."""
    found: dict[tuple[str, str], Points] = defaultdict(list)
    for line in metrics:
        for name, value in line.items():
            if name in ("step", "time") or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            found[chart(line["phase"]), name].append((line["step"], value))
    return {key: sorted(points) for key, points in found.items()}


def moving_mean(points: Sequence[tuple[float, float]], width: int) -> Points:
    """Each value replaced by the mean of the last ``width`` up to it (fewer at the start)."""
    smooth = []
    for end in range(1, len(points) + 1):
        window = [value for _, value in points[max(0, end - width) : end]]
        smooth.append((points[end - 1][0], sum(window) / len(window)))
    return smooth


# ---- what each part contributed


@dataclass(frozen=True)
class Contribution:
    """``part``: weights, memory or everything; ``when``: the later evaluation; ``what``: both of them.
    ``comparison``: None: they have no item in common."""

    part: str
    when: str
    what: str
    comparison: Comparison | None


def contributions(config: Mapping[str, Any], evaluations: Evaluations) -> list[Contribution]:
    """The paired differences between the evaluations of a run with this configuration, in their order.

    weights: each evaluation without memory against the one before (a run without memory has only such); memory: each
    evaluation with memory against the one without; everything: the last one against the first.
    """
    stages = [phase for phase in evaluations if not phase.endswith(WITHOUT)]
    bare = [phase + WITHOUT if phase + WITHOUT in evaluations else phase for phase in stages]
    pairs = [("weights", before, after) for before, after in pairwise(bare)]
    pairs += [("memory", without, phase) for phase, without in zip(stages, bare, strict=True) if phase != without]
    if len(stages) > 1 and ("weights", stages[0], stages[-1]) not in pairs:
        pairs.append(("everything", stages[0], stages[-1]))
    return [
        Contribution(
            part,
            evaluation_name(config, after.removesuffix(WITHOUT)),
            f"{evaluation_name(config, after)} – {evaluation_name(config, before)}",
            paired(evaluations[before], evaluations[after]),
        )
        for part, before, after in pairs
    ]


def paired(a: dict[str, Any], b: dict[str, Any]) -> Comparison | None:
    """b less a, by item; None: they have none in common."""
    try:
        return compare(a, b)
    except ConfigError:
        return None


# ---- what the episodes tell


@dataclass(frozen=True)
class Played:
    """The episodes of one phase in numbers. ``calls``: generations of a model. ``by_type``: won and played.

    Memory: ``guided`` episodes were played with one, ``shown``: items that stood in their prompts. Predicates:
    ``checked`` steps, at ``objected`` of which one objected to the first proposal; then another proposal was played
    (``resampled``), or the first one all the same (``fallback``). Values: steps at which a thought was ``recalled``,
    and those at which the agent ``followed`` it.
    """

    phase: str
    episodes: int = 0
    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    by_type: dict[str, tuple[int, int]] = field(default_factory=dict)
    guided: int = 0
    shown: int = 0
    checked: int = 0
    objected: int = 0
    resampled: int = 0
    fallback: int = 0
    recalled: int = 0
    followed: int = 0


def played(phase: str, episodes: Iterable[Episode]) -> Played:
    counts: dict[str, int] = defaultdict(int)
    by_type: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        counts["episodes"] += 1
        counts["calls"] += sum(span.logprobs is not None for context in episode.contexts for span in context.spans)
        counts["tokens_in"] += episode.tokens_in
        counts["tokens_out"] += episode.tokens_out
        won, count = by_type.get(episode.task_type, (0, 0))
        by_type[episode.task_type] = won + (episode.won and episode.status == "ok"), count + 1
        if episode.memory is not None:
            counts["guided"] += 1
            counts["shown"] += sum(not one.suppressed for one in episode.memory.instantiations)
        for step in episode.steps:
            if step.regulation is not None:
                checks = step.regulation.checks
                counts["checked"] += 1
                counts["objected"] += any(one.attempt == 0 and one.outcome == "violated" for one in checks)
                counts["resampled"] += step.regulation.choice == "resampled"
                counts["fallback"] += step.regulation.choice == "fallback"
            if step.recall is not None and step.recall.thought:
                counts["recalled"] += 1
                counts["followed"] += bool(step.recall.followed)
    return Played(phase, **counts, by_type=dict(sorted(by_type.items())))


def joined(parts: Sequence[Played], name: str) -> Played:
    """Several phases as one."""
    by_type: dict[str, tuple[int, int]] = {}
    for part in parts:
        for kind, (won, count) in part.by_type.items():
            old = by_type.get(kind, (0, 0))
            by_type[kind] = old[0] + won, old[1] + count
    counted = [one for one in Played.__dataclass_fields__ if one not in ("phase", "by_type")]
    sums = {one: sum(getattr(part, one) for part in parts) for one in counted}
    return Played(name, **sums, by_type=dict(sorted(by_type.items())))


def type_curves(phases: Sequence[Played], width: int) -> dict[str, Points]:
    """Of each task type the share won in a phase and the ``width`` - 1 before it, by the phase's place from 1 on.

    Phases in whose window no episode of the type was played have no point.
    """
    kinds = sorted({kind for phase in phases for kind in phase.by_type})
    found: dict[str, Points] = {kind: [] for kind in kinds}
    for end in range(1, len(phases) + 1):
        window = joined(phases[max(0, end - width) : end], "")
        for kind, (won, count) in window.by_type.items():
            found[kind].append((end, won / count))
    return found


# ---- cost


@dataclass(frozen=True)
class Cost:
    """What the phases of one kind took. ``seconds``: None: not told. Calls and tokens are the policy's, and of a
    language model that built the memory those that were paid for; ``money``: in the currency of its prices."""

    name: str
    phases: int
    episodes: int
    calls: int
    tokens_in: int
    tokens_out: int
    seconds: float | None
    money: float = 0.0


def phase_seconds(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each chart the wall-clock seconds: those that an iteration states, else from the record before it.

    The first record of a run has none before it; a pause before ``--resume`` counts where no seconds are stated.
    """
    found: dict[str, float] = defaultdict(float)
    before: float | None = None
    for line in metrics:
        if "iteration_seconds" in line:
            found[chart(line["phase"])] += line["iteration_seconds"]
        elif before is not None:
            found[chart(line["phase"])] += max(0.0, line["time"] - before)
        before = line["time"]
    return dict(found)


def costs(
    metrics: Sequence[Mapping[str, Any]], phases: Sequence[Played], journal: Mapping[str, Mapping[str, Any]]
) -> list[Cost]:
    """The cost of a run by kind of phase, in the order of time; the last row is the sum."""
    seconds = phase_seconds(metrics)
    spent = {phase: left["spend"] for phase, left in journal.items() if left.get("spend")}
    names = dict.fromkeys([chart(line["phase"]) for line in metrics])
    names |= dict.fromkeys(chart(name) for name in (*(part.phase for part in phases), *spent))
    rows = []
    for name in names:
        mine = joined([part for part in phases if chart(part.phase) == name], name)
        spends = [spend for phase, spend in spent.items() if chart(phase) == name]
        numbers = {line["phase"] for line in metrics if chart(line["phase"]) == name}
        numbers |= {phase for phase in (*(part.phase for part in phases), *spent) if chart(phase) == name}
        rows.append(
            Cost(
                name,
                len(numbers),
                mine.episodes,
                mine.calls + sum(spend.get("calls", 0) for spend in spends),
                mine.tokens_in + sum(spend.get("tokens_in", 0) for spend in spends),
                mine.tokens_out + sum(spend.get("tokens_out", 0) for spend in spends),
                seconds.get(name),
                sum(spend.get("cost", 0.0) for spend in spends),
            )
        )
    return [*rows, _sum(rows)]


def _sum(rows: Sequence[Cost]) -> Cost:
    known = [row.seconds for row in rows if row.seconds is not None]
    return Cost(
        "all",
        sum(row.phases for row in rows),
        sum(row.episodes for row in rows),
        sum(row.calls for row in rows),
        sum(row.tokens_in for row in rows),
        sum(row.tokens_out for row in rows),
        sum(known) if known else None,
        sum(row.money for row in rows),
    )
