"""Progress with rate and ETA: a bar on a terminal, plain lines at most every ten seconds elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_INTERVAL_S = 10.0


class Bar(Protocol):
    def advance(self, n: int = 1, **figures: float) -> None:
        """Count ``n`` more items done and show ``figures`` (the newest value of each name)."""


@contextmanager
def progress(
    total: int, description: str, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Bar]:
    """Show the progress of ``total`` items on standard error while the block runs (in rank 0 of several processes).

    Args:
        console: where to write; a terminal gets a bar, anything else plain lines.
        clock: seconds, monotonic.
    """
    console = console or Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    if console.is_terminal:
        with _terminal_bar(total, description, console, clock) as bar:
            yield bar
    else:
        lines = _PlainLines(total, description, console, clock)
        yield lines
        lines.close()


def rate_text(done: int, total: int, seconds: float) -> str:
    """Average rate and the time left at it: ``2.0/s, ETA 0:01:05``; empty before the first item."""
    if done == 0 or seconds <= 0:
        return ""
    rate = done / seconds
    if rate >= 1:
        speed = f"{rate:.1f}/s"
    elif rate >= 1 / 60:
        speed = f"{1 / rate:.1f} s each"
    else:
        speed = f"{1 / rate / 60:.1f} min each"
    left = max(0, total - done) / rate
    return f"{speed}, ETA {int(left // 3600)}:{int(left // 60 % 60):02d}:{int(left % 60):02d}"


def _figures_text(figures: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in figures.items())


@contextmanager
def _terminal_bar(total: int, description: str, console: Console, clock: Callable[[], float]) -> Iterator[Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("[dim]{task.fields[figures]}"),
    )
    with Progress(*columns, console=console) as shown:
        task = shown.add_task(description, total=total, rate="", figures="")
        yield _TerminalBar(shown, task, total, clock)


class _TerminalBar:
    def __init__(self, shown: Progress, task: int, total: int, clock: Callable[[], float]) -> None:
        self._shown = shown
        self._task = task
        self._total = total
        self._clock = clock
        self._started = clock()
        self._done = 0
        self._figures: dict[str, float] = {}

    def advance(self, n: int = 1, **figures: float) -> None:
        self._done += n
        self._figures.update(figures)
        rate = rate_text(self._done, self._total, self._clock() - self._started)
        self._shown.update(self._task, advance=n, rate=rate, figures=_figures_text(self._figures))  # type: ignore[arg-type]


class _PlainLines:
    def __init__(self, total: int, description: str, console: Console, clock: Callable[[], float]) -> None:
        self._total = total
        self._description = description
        self._console = console
        self._clock = clock
        self._started = self._printed = clock()
        self._done = self._shown = 0
        self._figures: dict[str, float] = {}

    def advance(self, n: int = 1, **figures: float) -> None:
        self._done += n
        self._figures.update(figures)
        if self._clock() - self._printed >= PLAIN_INTERVAL_S:
            self._print()

    def close(self) -> None:
        if self._done > self._shown:
            self._print()

    def _print(self) -> None:
        self._printed, self._shown = self._clock(), self._done
        rate = rate_text(self._done, self._total, self._printed - self._started)
        parts = [f"{self._description}: {self._done}/{self._total}", rate, _figures_text(self._figures)]
        self._console.print("  ".join(filter(None, parts)), highlight=False, markup=False, soft_wrap=True)
