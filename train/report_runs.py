"""Runs as a report shows them: read from their folders, with all that is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.report_data import (
    WITHOUT,
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
    played,
)
from train.run_folder import RunFolder, episode_files, phase_of, read_run
from train.trajectory import read_episodes

if TYPE_CHECKING:
    from train.report_memory import MemoryTables


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
        """The phase and result of its last evaluation, with the memory where it has one."""
        whole = [pair for pair in self.run.evaluations.items() if not pair[0].endswith(WITHOUT)]
        return whole[-1] if whole else None


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


def read_shown(folder: Path, name: str, before: Sequence[Shown] = ()) -> Shown:
    """A run as a report shows it under ``name``, after those ``before`` it.

    Raises:
        ConfigError: no such run. TrajectoryError: a damaged episode file.
    """
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
