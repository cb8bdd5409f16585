"""Figures of a report: drawn once, shown as SVG in the page's own colours (dark, light, print) and saved as PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from train.tables import printable

WIDTH = 4.4
"""Inches: so wide that its letters can be read on a phone."""

Style = Literal["line", "faint", "dots"]


_STYLES: dict[Style, dict[str, Any]] = {
    "line": {"linewidth": 1.8},
    "faint": {"linewidth": 0.9, "alpha": 0.35},
    "dots": {"linewidth": 1.2},
}


@dataclass(frozen=True)
class Series:
    """``colour``: number of a colour; equal ones mean the same run, evaluation or task type throughout a report."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    style: Style = "line"


@dataclass(frozen=True)
class Bar:
    """A value with its interval. Bars of one name stand together under it."""

    name: str
    value: float
    low: float
    high: float
    colour: int = 0


@dataclass(frozen=True)
class Palette:
    text: str
    grid: str
    series: Sequence[str]

    def __getitem__(self, number: int) -> str:
        return self.series[number % len(self.series)]


# The colours of templates/style.css on white.
LIGHT = Palette(
    "#1d2127",
    "#d5d9de",
    ("#2b6cb0", "#c8541d", "#2f855a", "#8046a8", "#a0791a", "#b83268", "#4a7c8c", "#6b7280"),
)
# Stand-ins that no figure uses otherwise: the page's style gives the colours.
_NAMED = Palette("#010101", "#020202", tuple(f"#03030{number}" for number in range(len(LIGHT.series))))

Drawing = Callable[[Palette], Figure]


def lines(
    series: Sequence[Series], *, x: str, y: str, percent: bool = False, zero: bool = False, height: float = 2.9
) -> Drawing:
    """Curves. ``percent``: the values are shares; ``zero``: the axis begins at 0."""

    def draw(palette: Palette) -> Figure:
        figure, axes = _figure(palette, height)
        scale = 100 if percent else 1
        for one in series:
            axes.plot(
                [place for place, _ in one.points],
                [scale * value for _, value in one.points],
                color=palette[one.colour],
                marker="o" if one.style == "dots" or len(one.points) < 2 else "",
                markersize=4,
                **_STYLES[one.style],
            )
        axes.set_xlabel(x)
        axes.set_ylabel(f"{y}, %" if percent else y)
        axes.grid(color=palette.grid, linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        if zero:
            axes.set_ylim(bottom=0)
        named = [(_named(one.name), palette[one.colour]) for one in series if one.name]
        _legend(figure, palette, named if len(named) > 1 else [])
        return figure

    return draw


def intervals(bars: Sequence[Bar], *, x: str, zero: bool = False, legend: Mapping[int, str] | None = None) -> Drawing:
    """Shares, or differences of shares, with their intervals, one below the other.

    ``zero``: they are differences, and 0 is marked; ``legend``: what the colours mean.
    """
    names = list(dict.fromkeys(bar.name for bar in bars))

    def draw(palette: Palette) -> Figure:
        figure, axes = _figure(palette, 0.7 + 0.13 * len(names) + 0.15 * len(bars) + (0.35 if legend else 0))
        ticks, place = [], 0.0
        for name in names:
            mine = [bar for bar in bars if bar.name == name]
            ticks.append(place + (len(mine) - 1) / 2)
            for bar in mine:
                colour = palette[bar.colour]
                axes.plot([100 * bar.low, 100 * bar.high], [place, place], color=colour, linewidth=1.6)
                axes.plot([100 * bar.value], [place], color=colour, marker="o", markersize=5)
                place += 1
            place += 0.8
        axes.set_yticks(ticks, [_named(name) for name in names])
        axes.set_ylim(place - 0.8, -1)
        axes.set_xlabel(f"{x}, %")
        axes.grid(axis="x", color=palette.grid, linewidth=0.6)
        if zero:
            axes.axvline(0, color=palette.text, linewidth=0.9)
        else:
            axes.set_xlim(0, 100)
        _legend(figure, palette, [(_named(name), palette[colour]) for colour, name in (legend or {}).items()])
        return figure

    return draw


def svg(draw: Drawing, name: str) -> Markup:
    """The figure as an element of a page. ``name``: of letters and hyphens, unique in the page."""
    out = io.StringIO()
    with _settings():
        draw(_NAMED).savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(_NAMED.text, "var(--text)").replace(_NAMED.grid, "var(--grid)")
    for number, colour in enumerate(_NAMED.series):
        text = text.replace(colour, f"var(--s{number})")
    return Markup(text.replace("<svg ", '<svg role="img" ', 1))  # matplotlib escapes what it writes


def save(draw: Drawing, file: Path) -> None:
    """The figure as a PNG for paper and slides."""
    with _settings():
        draw(LIGHT).savefig(file, dpi=200, facecolor="white")


def _settings() -> AbstractContextManager[None]:
    # Names come from files: no dollar sign in them starts mathematics.
    return rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "saga",
            "text.parse_math": False,
            "font.family": "sans-serif",
            "font.size": 9,
        }
    )


def _figure(palette: Palette, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.grid)
    axes.tick_params(colors=palette.text, length=0)
    axes.xaxis.label.set_color(palette.text)
    axes.yaxis.label.set_color(palette.text)
    return figure, axes


def _legend(figure: Figure, palette: Palette, named: Sequence[tuple[str, str]]) -> None:
    """Below the axes: what each colour means."""
    if not named:
        return
    handles = [Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in named]
    longest = max(len(name) for name, _ in named)
    columns = 3 if longest < 13 else 2 if longest < 31 else 1
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=7.5,
        handlelength=1.2,
        columnspacing=1,
    )
    for text in legend.get_texts():
        text.set_color(palette.text)


def _named(name: str) -> str:
    line = printable(" ".join(name.split()))
    # A leading underscore would hide it from the legend.
    return (line if len(line) <= 36 else line[:35] + "…").lstrip("_") or "?"
