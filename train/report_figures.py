"""Which figures a report has: those that its runs have values for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train.figures import Bar, Drawing, Series, intervals, lines
from train.report_data import WITHOUT, chart, moving_mean, type_curves
from train.report_runs import Shown

SMOOTH = 3
"""Iterations that a smoothed point covers."""

TYPES_SMOOTH = 5
"""The same for one task type, of which an iteration plays few."""

_FEW = 8
"""So many values are shown as they are, more with their moving mean."""

_SHARES = ("success", "invalid_rate", "repeated_rate", "trigger_rate")

_CURVES = {
    "invalid_rate": "invalid actions",
    "repeated_rate": "repeated actions",
    "steps": "steps of an episode",
    "zero_signal_groups": "groups without signal",
    "loss": "loss",
    "entropy": "entropy, nats",
    "grad_norm": "norm of the gradient",
    "sampler_mean_difference": "sampler against trainer, nats",
    "trigger_rate": "steps at which a predicate applies",
    "principles": "principles in use",
    "procedures": "procedures in use",
    "states": "states with values",
    "thoughts": "thoughts with values",
}
"""Metrics that are drawn where a run has them, beside success, and what they are called."""

_MANY_TYPES = 8
"""More task types than this make no readable curves."""


def draw_figures(runs: Sequence[Shown]) -> dict[str, tuple[str, Drawing]]:
    """Of each figure's name its caption and how it is drawn."""
    return {
        name: found
        for name, found in {
            "held-out": _held_out(runs),
            "by-type": _by_type(runs),
            "contributions": _parts(runs),
            **_rounds(runs),
            **_training(runs),
            **_other_curves(runs),
        }.items()
        if found is not None
    }


def _held_out(runs: Sequence[Shown]) -> tuple[str, Drawing] | None:
    bars = [
        _success(f"{run.name}: {run.label(phase)}" if len(runs) > 1 else run.label(phase), result["metrics"], number)
        for number, run in enumerate(runs)
        for phase, result in run.run.evaluations.items()
    ]
    caption = "Held-out success with Wilson's 95 % intervals over items."
    return (caption, intervals(bars, x="items won")) if bars else None


def _success(name: str, metrics: dict[str, Any], colour: int) -> Bar:
    low, high = metrics["success_interval"]
    return Bar(name, metrics["success"], low, high, colour)


def _by_type(runs: Sequence[Shown]) -> tuple[str, Drawing] | None:
    """The first and last evaluation of a run, or the last one of each run."""
    if len(runs) == 1:
        run = runs[0]
        ends = [*list(run.run.evaluations.items())[:1], *([run.last] if run.last else [])]
        chosen = {run.label(phase): result for phase, result in ends}
    else:
        chosen = {run.name: run.last[1] for run in runs if run.last is not None}
    kinds = sorted({kind for result in chosen.values() for kind in result["metrics"]["by_type"]})
    bars = [
        _success(kind, metrics, number)
        for kind in kinds
        for number, result in enumerate(chosen.values())
        if (metrics := result["metrics"]["by_type"].get(kind)) is not None
    ]
    draw = intervals(bars, x="items won", legend=dict(enumerate(chosen)) if len(chosen) > 1 else None)
    return ("Held-out success by task type.", draw) if bars else None


def _parts(runs: Sequence[Shown]) -> tuple[str, Drawing] | None:
    bars = []
    for number, run in enumerate(runs):
        for part in run.parts:
            if part.comparison is not None and (effect := part.comparison.rows[0].effect) is not None:
                name = f"{part.part} {part.when}"
                bars.append(Bar(name, effect.difference, effect.low, effect.high, number))
    caption = "What each part contributed to success, paired by item (95 %, bootstrap over items)."
    legend = {number: run.name for number, run in enumerate(runs)} if len(runs) > 1 else None
    return (caption, intervals(bars, x="difference in items won", zero=True, legend=legend)) if bars else None


def _rounds(runs: Sequence[Shown]) -> dict[str, tuple[str, Drawing]]:
    """Held-out success by evaluation, in all and by task type, of runs that evaluated three times or more."""
    found: dict[str, tuple[str, Drawing]] = {}
    whole = []
    for number, run in enumerate(runs):
        stages = [result["metrics"] for phase, result in run.run.evaluations.items() if not phase.endswith(WITHOUT)]
        if len(stages) < 3:
            continue
        whole.append(Series(run.name, [(at, one["success"]) for at, one in enumerate(stages)], number, "dots"))
        kinds = sorted({kind for one in stages for kind in one["by_type"]})
        if len(kinds) <= _MANY_TYPES:
            series = [
                Series(
                    kind,
                    [(at, one["by_type"][kind]["success"]) for at, one in enumerate(stages) if kind in one["by_type"]],
                    colour,
                    "dots",
                )
                for colour, kind in enumerate(kinds)
            ]
            draw = lines(series, x="evaluation", y="items won", percent=True, zero=True, height=3.4)
            found[f"rounds-by-type-{number}"] = (
                f"{run.name}: held-out success by task type, evaluation by evaluation.",
                draw,
            )
    if whole:
        draw = lines(whole, x="evaluation", y="items won", percent=True, zero=True)
        found = {"rounds": ("Held-out success, evaluation by evaluation.", draw), **found}
    return found


def _training(runs: Sequence[Shown]) -> dict[str, tuple[str, Drawing]]:
    """Success of the training episodes by iteration, in all and by task type."""
    found: dict[str, tuple[str, Drawing]] = {}
    for name in _charts(runs, "success"):
        found[f"training-{_safe(name)}"] = (
            f"{name}: training episodes won{_smoothed(runs, name, 'success')}.",
            _curve(runs, name, "success", "episodes won"),
        )
        for number, run in enumerate(runs):
            phases = [phase for phase in run.phases if chart(phase.phase) == name and phase.phase != name]
            by_type = type_curves(phases, TYPES_SMOOTH)
            if len(phases) > 1 and 1 < len(by_type) <= _MANY_TYPES:
                lot = [Series(kind, points, colour) for colour, (kind, points) in enumerate(by_type.items())]
                draw = lines(lot, x=_axis(name), y="episodes won", percent=True, zero=True, height=3.4)
                caption = (
                    f"{name} of {run.name}: training episodes won by task type, {TYPES_SMOOTH} iterations together."
                )
                found[f"training-{_safe(name)}-by-type-{number}"] = (caption, draw)
    return found


def _other_curves(runs: Sequence[Shown]) -> dict[str, tuple[str, Drawing]]:
    found: dict[str, tuple[str, Drawing]] = {}
    names = dict.fromkeys(name for metric in _CURVES for name in _charts(runs, metric))
    for name in names:
        for metric, called in _CURVES.items():
            if name in _charts(runs, metric):
                caption = f"{name}: {called}{_smoothed(runs, name, metric)}."
                found[f"{_safe(name)}-{_safe(metric)}"] = (caption, _curve(runs, name, metric, called))
    return found


def _charts(runs: Sequence[Shown], metric: str) -> list[str]:
    """The charts but evaluations in which some run has two values of ``metric``, or more."""
    return list(
        dict.fromkeys(
            name
            for run in runs
            for (name, one), points in run.curves.items()
            if one == metric and len(points) > 1 and not name.startswith("eval")
        )
    )


def _curve(runs: Sequence[Shown], name: str, metric: str, called: str) -> Drawing:
    """The values of every run: few as dots, many as a faint line with the moving mean."""
    series = []
    for number, run in enumerate(runs):
        points = run.curves.get((name, metric), [])
        if len(points) > _FEW:
            series += [Series("", points, number, "faint"), Series(run.name, moving_mean(points, SMOOTH), number)]
        elif points:
            series.append(Series(run.name, points, number, "dots"))
    share = metric in _SHARES
    return lines(series, x=_axis(name), y=called, percent=share, zero=metric == "success")


def _smoothed(runs: Sequence[Shown], name: str, metric: str) -> str:
    many = any(len(run.curves.get((name, metric), [])) > _FEW for run in runs)
    return f", and the mean of {SMOOTH}" if many else ""


def _axis(name: str) -> str:
    return {"grpo": "iteration", "warm-start": "optimiser step", "rejection": "optimiser step"}.get(name, "round")


def _safe(name: str) -> str:
    """For the name of a file and an element."""
    return "".join(char if char.isascii() and char.isalnum() else "-" for char in name)
