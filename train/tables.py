"""Tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def compact_table(title: str, columns: Sequence[str], *, left: Sequence[str] = ()) -> Table:
    """An empty table; ``left`` names the columns that hold text, the others hold numbers."""
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column not in left)
    return table


def printable(text: str) -> str:
    """Text of a model, a world or a file without what moves a cursor, hides, or turns the direction of writing."""
    text = text.replace("\t", " ")
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def success_text(success: float, interval: Sequence[float]) -> str:
    """``45.8 (33–59)``: per cent with its interval."""
    low, high = interval
    return f"{100 * success:.1f} ({100 * low:.0f}–{100 * high:.0f})"
