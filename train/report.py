"""``saga report``, and what a run shows at its end: the table of its evaluations on screen, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from train.compare import Comparison
from train.config import Config, ConfigError
from train.report_data import (
    Contribution,
    Cost,
    Played,
    Points,
    chart,
    contributions,
    costs,
    curves,
    evaluation_name,
    joined,
    moving_mean,
    paired,
    played,
    type_curves,
)
from train.run_folder import RunFolder, episode_files, phase_of, read_run
from train.tables import compact_table, percent, success_text
from train.trajectory import read_episodes

if TYPE_CHECKING:
    from train.figures import Drawing
    from train.report_memory import MemoryTables

REPORT = "report"
"""Folder of a run's report within the run's."""

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


def closing_table(config: Config, evals: dict[str, dict[str, Any]]) -> Table:
    """The success rates of a run's evaluations, with intervals."""
    columns = ("policy", "games", "success % (95 %)", "score", "steps", "invalid actions %")
    table = compact_table("held-out games", columns, left=("policy",))
    for phase, result in evals.items():
        metrics = result["metrics"]
        table.add_row(
            evaluation_name(config.model_dump(), phase),
            str(metrics["items"]),
            success_text(metrics["success"], metrics["success_interval"]),
            f"{metrics['score']:.3f}",
            f"{metrics['steps']:.1f}",
            percent(metrics["invalid_rate"]),
        )
    return table


@dataclass(frozen=True)
class Shown:
    """A run in a report. ``memory``: None: it has none, or ``memory_missing`` says why it is not shown.

    ``work``: what memory and values did in the episodes, by kind of phase; [] where there were none.
    """

    run: RunFolder
    name: str
    parts: list[Contribution]
    phases: list[Played]
    work: list[Played]
    costs: list[Cost]
    memory: MemoryTables | None
    memory_missing: str

    def label(self, phase: str) -> str:
        return evaluation_name(self.run.config, phase)

    @cached_property
    def curves(self) -> dict[tuple[str, str], Points]:
        return curves(self.run.metrics)

    @property
    def last(self) -> tuple[str, dict[str, Any]] | None:
        """The phase and result of its last evaluation with all that it has."""
        return next(iter(reversed(self.run.evaluations.items())), None)


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write ``report.html`` and its figures; returns the file.

    Args:
        out: None: RUN/report for one run, report/ for several.

    Raises:
        ConfigError: no such run, or one named twice. TrajectoryError: a damaged episode file.
    """
    from train.figures import save, svg
    from train.html import environment, style

    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("report: a run is named twice; name each once")
    out = out or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    out.mkdir(parents=True, exist_ok=True)
    runs: list[Shown] = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        runs.append(_shown(folder, name, runs))
    drawings = _figures(runs)
    for name, (_, draw) in drawings.items():
        save(draw, out / f"{name}.png")
    text = (
        environment()
        .get_template("report.html")
        .render(
            title=" · ".join(run.name for run in runs),
            style=style(),
            runs=runs,
            versus=_versus(runs),
            figures={name: (caption, svg(draw, name)) for name, (caption, draw) in drawings.items()},
            metrics={run.name: _logged(run) for run in runs},
            types=sorted(
                {kind for run in runs for one in run.run.evaluations.values() for kind in one["metrics"]["by_type"]}
            ),
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )
    file = out / "report.html"
    file.write_text(text, encoding="utf-8")
    return file


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of the path as tells them apart, less what all of them begin with.

    >>> short_names([Path("/runs/maze-warm"), Path("/runs/maze-grpo"), Path("/old/maze-grpo")])
    ['runs/maze-warm', 'runs/maze-grpo', 'old/maze-grpo']
    >>> short_names([Path("/runs/maze-warm"), Path("/runs/maze-grpo")])
    ['warm', 'grpo']
    """
    paths = [folder.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    names = ["/".join(path.parts[-depth:]) for path in paths]
    same = len(list(takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))))
    start = max(names[0].rfind("-", 0, same), names[0].rfind("/", 0, same)) + 1
    return [name[start:] for name in names] if len(names) > 1 else names


def _shown(folder: Path, name: str, before: Sequence[Shown]) -> Shown:
    run = read_run(folder)
    files = episode_files(folder) if (folder / "episodes").is_dir() else []
    phases = [played(phase_of(file), read_episodes(file)) for file in files]
    kinds = {
        kind: [one for one in phases if chart(one.phase) == kind]
        for kind in dict.fromkeys(chart(one.phase) for one in phases)
    }
    work = [joined(parts, kind) for kind, parts in kinds.items()]
    memory, missing = _memory(run, before)
    spent = [row for row in costs(run.metrics, phases, run.journal) if row.episodes or row.calls or row.seconds]
    return Shown(
        run,
        name,
        contributions(run.config, run.evaluations),
        phases,
        [one for one in work if one.guided or one.checked or one.recalled],
        spent,
        memory,
        missing,
    )


def _memory(run: RunFolder, before: Sequence[Shown]) -> tuple[MemoryTables | None, str]:
    """The memory's tables, or why there are none; a memory that several runs used is shown once."""
    if run.store is None:
        return None, ""
    same = next((other.name for other in before if other.run.store == run.store), None)
    if same is not None:
        return None, f"It used the memory of {same}."
    from memory.records import MemoryRecordError
    from memory.schema import memory_url
    from memory.store import Store
    from train.report_memory import memory_tables

    try:
        with Store(memory_url(run.store), create=False) as store:
            return memory_tables(store), ""
    except MemoryRecordError as error:  # moved, or not made yet
        return None, str(error)


def _versus(runs: Sequence[Shown]) -> list[tuple[str, Comparison | None]]:
    """Each run's last evaluation less the first run's, paired by item."""
    first = runs[0].last
    found = []
    for run in runs[1:]:
        if first is not None and run.last is not None:
            found.append((f"{run.name} – {runs[0].name}", paired(first[1], run.last[1])))
    return found


def _logged(run: Shown) -> list[tuple[str, str, int, float, float, float, float]]:
    """Of each logged metric the number of values, the first, last, lowest and highest one."""
    return [
        (name, metric, len(points), points[0][1], points[-1][1], min(v for _, v in points), max(v for _, v in points))
        for (name, metric), points in run.curves.items()
    ]


def _figures(runs: Sequence[Shown]) -> dict[str, tuple[str, Drawing]]:
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
    from train.figures import Bar, intervals

    bars = [
        Bar(
            f"{run.name}: {run.label(phase)}" if len(runs) > 1 else run.label(phase),
            result["metrics"]["success"],
            *result["metrics"]["success_interval"],
            colour=number,
        )
        for number, run in enumerate(runs)
        for phase, result in run.run.evaluations.items()
    ]
    caption = "Held-out success with Wilson's 95 % intervals over items."
    return (caption, intervals(bars, x="items won")) if bars else None


def _by_type(runs: Sequence[Shown]) -> tuple[str, Drawing] | None:
    """The first and last evaluation of a run, or the last one of each run."""
    from train.figures import Bar, intervals

    if len(runs) == 1:
        every = list(runs[0].run.evaluations.items())
        chosen = {runs[0].label(phase): result for phase, result in [*every[:1], *every[-1:]]}
    else:
        chosen = {run.name: run.last[1] for run in runs if run.last is not None}
    kinds = sorted({kind for result in chosen.values() for kind in result["metrics"]["by_type"]})
    bars = [
        Bar(kind, metrics["success"], *metrics["success_interval"], colour=number)
        for kind in kinds
        for number, result in enumerate(chosen.values())
        if (metrics := result["metrics"]["by_type"].get(kind)) is not None
    ]
    draw = intervals(bars, x="items won", legend=dict(enumerate(chosen)) if len(chosen) > 1 else None)
    return ("Held-out success by task type.", draw) if bars else None


def _parts(runs: Sequence[Shown]) -> tuple[str, Drawing] | None:
    from train.figures import Bar, intervals

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
    from train.figures import Series, lines

    found: dict[str, tuple[str, Drawing]] = {}
    whole = []
    for number, run in enumerate(runs):
        stages = [result["metrics"] for phase, result in run.run.evaluations.items() if not phase.endswith("-without")]
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
    from train.figures import Series, lines

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
    from train.figures import Series, lines

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
