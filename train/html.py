"""Pages from templates: whatever a template prints is escaped, and shows nothing that hides or turns the writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from memory.records import LEVEL_NAMES
from train.metrics import failure_class
from train.tables import percent, printable, success_text


def environment() -> Environment:
    """Templates of ``train/templates``. Markup comes from the templates alone: what they print is text."""
    made = Environment(
        loader=PackageLoader("train"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "breakable": breakable,
        "duration": duration,
        "p_value": p_value,
        "percent": percent,
        "signed": signed,
        "short": short,
    }
    made.globals |= {
        "url": url,
        "level_names": LEVEL_NAMES,
        "success_text": success_text,
        "failure_class": failure_class,
    }
    return made


def url(path: str, **query: object) -> str:
    """A link within these pages; what ``query`` gives as "" or None is left out."""
    told = urlencode({name: value for name, value in query.items() if value not in ("", None)})
    return quote(path, safe="/#") + (f"?{told}" if told else "")


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}"


def short(text: str, length: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def breakable(name: str) -> Markup:
    """A name of words joined by underscores, which may be broken after each."""
    return Markup(escape(printable(name)).replace("_", Markup("_<wbr>")))


def p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def duration(seconds: float) -> str:
    """
    >>> duration(45.4), duration(3729)
    ('45 s', '1 h 02 min')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def style() -> Markup:
    """The style sheet, for a page that holds its own."""
    return Markup((Path(__file__).parent / "templates" / "style.css").read_text())


def _clean(value: Any) -> Any:
    if isinstance(value, Markup):  # of a macro, which cleaned what it printed
        return value
    return printable(value) if isinstance(value, str) else value
