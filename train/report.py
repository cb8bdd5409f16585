"""``saga report``, and what a run shows at its end: the table of its evaluations on screen, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from train.compare import Comparison
from train.config import Config, ConfigError
from train.report_data import evaluation_name, paired
from train.report_runs import Shown, read_shown, short_names
from train.tables import compact_table, percent, success_text

REPORT = "report"
"""Folder of a run's report within the run's."""


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


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write ``report.html`` and its figures; returns the file.

    Args:
        out: None: RUN/report for one run, report/ for several.

    Raises:
        ConfigError: no such run, or one named twice. TrajectoryError: a damaged episode file.
    """
    from train.figures import save, svg
    from train.html import environment, style
    from train.report_figures import draw_figures

    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("report: a run is named twice; name each once")
    out = out or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    out.mkdir(parents=True, exist_ok=True)
    runs: list[Shown] = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        runs.append(read_shown(folder, name, runs))
    drawings = draw_figures(runs)
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
