"""``saga compare A B``: what separates two evaluations of the same items, and whether they may be compared at all."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from memory.statistics import Effect, paired_effect
from train.config import ConfigError
from train.tables import compact_table, percent

MANY_ZEROS = 0.7
"""Share of episodes with score 0 above which an evaluation says little: both arms stand on the floor."""

_SAME = {
    "task_set": "task sets",
    "manifest_hash": "manifests",
    "env": "settings of the world",
    "seeds": "seeds",
    "tries": "numbers of tries",
    "temperature": "sampling temperatures",
    "prompting": "prompting",
    "dtype": "number formats of the weights",
}
"""Fields of an evaluation that should agree unless they are what is compared, and what they are called."""

Item = dict[str, Any]
Items = dict[str, list[Item]]


@dataclass(frozen=True)
class Row:
    """A metric over the items of one task type ("" for all). ``effect``: b less a; None where there is but one item."""

    task_type: str
    metric: str
    items: int
    a: float
    b: float
    effect: Effect | None


@dataclass(frozen=True)
class Comparison:
    """``better``, ``worse``: the items on which b won more, or less, of its episodes than a: (id, type, share a, b)."""

    rows: list[Row]
    better: list[tuple[str, str, float, float]]
    worse: list[tuple[str, str, float, float]]
    equal: int
    warnings: list[str]


def won(item: Item) -> float:
    return float(item["won"] and item["status"] == "ok")


def score(item: Item) -> float:
    """Between 0 and 1; below 0 (as ScienceWorld has it), and after a fault, 0."""
    return min(1.0, max(0.0, item["score"])) if item["status"] == "ok" else 0.0


def compare(
    a: dict[str, Any], b: dict[str, Any], names: tuple[str, str] = ("A", "B"), meant: Collection[str] = ()
) -> Comparison:
    """Two evaluations (what ``saga eval`` wrote), paired by item: its seeds are averaged first.

    Intervals are bootstrapped over items (see :func:`memory.statistics.paired_effect`), with one made-up episode more
    won and one more lost, which keeps them honest where few items differ. Items that only one of them has are left out,
    with a warning. The score is told where it says more than success.

    Args:
        names: what warnings call the two.
        meant: fields of an evaluation that differ on purpose, which is no reason for a warning.

    Raises:
        ConfigError: no item in common.
    """
    first, second = _by_item(a), _by_item(b)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ConfigError(
            f"no item in common: one evaluated {a['task_set']!r}, the other {b['task_set']!r}; compare evaluations of "
            "one task set"
        )
    types = {id: first[id][0]["type"] for id in common}
    graded = any(score(item) != won(item) for items in (first, second) for id in common for item in items[id])
    metrics = {"success": won} | ({"score": score} if graded else {})
    pseudo = 1 / max(len(items[id]) for items in (first, second) for id in common)
    rows = []
    for kind in ["", *sorted(set(types.values()))]:
        ids = [id for id in common if kind in ("", types[id])]
        for metric, value in metrics.items():
            before, after = ({id: [value(item) for item in items[id]] for id in ids} for items in (first, second))
            mean_a, mean_b = (fmean(fmean(values) for values in arm.values()) for arm in (before, after))
            effect = paired_effect(before, after, pseudo=pseudo) if len(ids) > 1 else None
            rows.append(Row(kind, metric, len(ids), mean_a, mean_b, effect))
    shares = [(id, types[id], *(fmean(map(won, items[id])) for items in (first, second))) for id in common]
    warnings = [*_unmatched(first, second, names), *_differing(a, b, meant), *_lost(a, b, first, second, names)]
    better = [share for share in shares if share[3] > share[2]]
    worse = [share for share in shares if share[3] < share[2]]
    return Comparison(rows, better, worse, len(shares) - len(better) - len(worse), warnings)


def _by_item(evaluation: dict[str, Any]) -> dict[str, list[Item]]:
    items: dict[str, list[Item]] = {}
    for item in evaluation["items"]:
        items.setdefault(item["id"], []).append(item)
    return items


def _unmatched(first: Items, second: Items, names: tuple[str, str]) -> list[str]:
    """Items, and seeds of items, that only one has."""
    found = []
    for name, mine, other in ((names[0], first, second), (names[1], second, first)):
        if only := sorted(mine.keys() - other.keys()):
            found.append(f"{len(only)} items are in {name} only and were left out (for example {only[0]})")
    uneven = [id for id in first.keys() & second.keys() if _seeds(first[id]) != _seeds(second[id])]
    if uneven:
        found.append(f"{len(uneven)} items were played with other seeds (for example {min(uneven)})")
    return found


def _seeds(episodes: list[Item]) -> list[int]:
    return sorted(episode["seed"] for episode in episodes)


def _differing(a: dict[str, Any], b: dict[str, Any], meant: Collection[str]) -> list[str]:
    """Settings that should be equal."""
    return [
        f"the {called} differ: {_short(a.get(field))} and {_short(b.get(field))}"
        for field, called in _SAME.items()
        if field not in meant and a.get(field) != b.get(field)
    ]


def _lost(a: dict[str, Any], b: dict[str, Any], first: Items, second: Items, names: tuple[str, str]) -> list[str]:
    """Faults, and evaluations that stand on the floor."""
    found = []
    for name, evaluation in zip(names, (a, b), strict=True):
        items = evaluation["items"]
        faults = [item for item in items if item["status"] != "ok"]
        if faults:
            found.append(
                f"{len(faults)} of {len(items)} episodes of {name} ended by a fault and count as lost (the first: "
                f"{faults[0]['id']}, {faults[0]['status']})"
            )
    unequal = [id for id in first.keys() & second.keys() if _faults(first[id]) != _faults(second[id])]
    if unequal:
        found.append(
            f"{len(unequal)} items ended by a fault more often in one of them, which counts against it: evaluate that "
            f"one anew (for example {min(unequal)})"
        )
    for name, evaluation in zip(names, (a, b), strict=True):
        zeros = fmean(score(item) == 0 for item in evaluation["items"])
        if zeros > MANY_ZEROS:
            found.append(
                f"{percent(zeros)} % of the episodes of {name} scored 0 (more than {percent(MANY_ZEROS)} %): on such a "
                "floor little can be told apart; compare on easier items or with a stronger policy"
            )
    return found


def _faults(episodes: list[Item]) -> int:
    return sum(episode["status"] != "ok" for episode in episodes)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"


def find_evaluation(path: Path) -> Path:
    """The evaluation that a user named: a file, or a folder's only or final one.

    Raises:
        ConfigError: none there, or several of which none is final.
    """
    if path.is_file():
        return path
    files = sorted((path / "evals").glob("*.json"))
    final = [file for file in files if file.stem == "eval-final"]
    if len(files) != 1 and not final:
        names = ", ".join(str(file) for file in files)
        raise ConfigError(
            f"{path}: " + (f"several evaluations; name one of {names}" if files else "no evals/*.json there")
        )
    return (final or files)[0]


def read_evaluation(path: Path) -> dict[str, Any]:
    """What ``saga eval`` or ``saga train`` wrote. Raises ConfigError: it is no such file."""
    try:
        found = json.loads(path.read_text())
        items = found["items"]
        if items and all({"id", "type", "seed", "won", "score", "status"} <= item.keys() for item in items):
            return dict(found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ConfigError(f"{path}: no evaluation; give a file that `saga eval` or `saga train` wrote under evals/")


def compare_and_show(a: Path, b: Path, items: bool) -> None:
    """Print the comparison of two evaluations. Raises ConfigError."""
    files = find_evaluation(a), find_evaluation(b)
    found = compare(read_evaluation(files[0]), read_evaluation(files[1]))
    console = Console(highlight=False)
    console.print(f"A: {files[0]}\nB: {files[1]}", soft_wrap=True)
    columns = ("task type", "metric", "items", "A %", "B %", "B - A % (95 %)", "p")
    table = compact_table("paired by item", columns, left=("task type", "metric"))
    for row in found.rows:
        told = ("–", "–") if row.effect is None else (difference_text(row.effect), f"{row.effect.p:.3f}")
        table.add_row(row.task_type or "all", row.metric, str(row.items), percent(row.a), percent(row.b), *told)
    console.print(table)
    console.print(f"B won more on {len(found.better)} items, less on {len(found.worse)}, as much on {found.equal}")
    if items:
        for what, rows in (("more", found.better), ("less", found.worse)):
            console.print(*_listed(what, rows), sep="\n", soft_wrap=True)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def difference_text(effect: Effect) -> str:
    """``+8.3 (-2.1 to +18.8)``: percentage points with their interval."""
    return f"{100 * effect.difference:+.1f} ({100 * effect.low:+.1f} to {100 * effect.high:+.1f})"


def _listed(what: str, rows: Iterable[tuple[str, str, float, float]]) -> list[str]:
    return [f"  {what}: {id} ({kind}): {percent(a)} % -> {percent(b)} %" for id, kind, a, b in rows]
