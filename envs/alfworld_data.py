"""The official ALFWorld games on disk: where they are, which there are, how to fetch them. Imports no simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from envs.base import Task, TaskError

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
OFFICIAL_COUNTS = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
"""Solvable games of each split, as the official loader counts them."""

_GAMES = "json_2.1.1"
_FOOTER_BYTES = 4096


def data_folder() -> Path:
    """The folder that holds ``json_2.1.1``: $ALFWORLD_DATA or, when unset, the alfworld package's own default.

    Raises:
        TaskError: neither holds games.
    """
    named = os.environ.get("ALFWORLD_DATA")
    folder = Path(named).expanduser() if named else _default_folder()
    if not (folder / _GAMES).is_dir():
        state = f"{named!r} has no folder {_GAMES}" if named else f"not set, and {folder} has no folder {_GAMES}"
        raise TaskError(
            f"ALFWORLD_DATA: {state}; set it to the folder that holds {_GAMES}, or run 'saga data alfworld' to fetch it"
        )
    return folder


def game_file(data: Path, task_id: str) -> Path:
    """The game of task ``<split>/<game>/<trial>``. Raises TaskError when ``data`` lacks it."""
    parts = task_id.split("/")
    path = data / _GAMES / task_id / "game.tw-pddl"
    if len(parts) != 3 or not all(parts) or ".." in parts or not path.is_file():
        raise TaskError(
            f"task {task_id!r}: no {path} (ALFWORLD_DATA is {data}); "
            "a task id is <split>/<game>/<trial>; 'saga data alfworld' fetches the games"
        )
    return path


def alfworld_tasks(split: str, data: Path) -> list[Task]:
    """The solvable games of ``split``, sorted by id (the official loader takes the file system's order).

    Like the official loader it skips games with sliced or movable objects, of other task types, and those that are
    not marked as solvable. It reads the last few bytes of each game.

    Raises:
        TaskError: ``data`` has no such split.
    """
    folder = data / _GAMES / split
    if not split or "/" in split or not folder.is_dir():
        present = sorted(item.name for item in (data / _GAMES).glob("*") if item.is_dir())
        raise TaskError(
            f"alfworld split {split!r}: not in {data / _GAMES} (it has: {', '.join(present) or 'nothing'}); "
            "set ALFWORLD_DATA to complete data, or run 'saga data alfworld'"
        )
    tasks = []
    for path in sorted(folder.glob("*/*/game.tw-pddl")):
        task_id = path.parent.relative_to(data / _GAMES).as_posix()
        task_type = path.parent.parent.name.partition("-")[0]
        supported = task_type in TASK_TYPES and "movable" not in task_id and "Sliced" not in task_id
        if supported and read_footer(path).get("solvable") is True:
            tasks.append(Task("alfworld", task_id, task_type))
    return tasks


def read_footer(path: Path) -> dict[str, Any]:
    """``solvable`` and ``walkthrough`` of a game, which stand behind its 80 kB of PDDL: no need to parse those.

    Raises:
        TaskError: not a game file.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _FOOTER_BYTES))
        tail = file.read()
    start = tail.rfind(b'"solvable"')
    try:
        if start >= 0:
            return json.loads(b"{" + tail[start:])
        game = json.loads(path.read_bytes())  # another order of keys
        return {key: game[key] for key in ("solvable", "walkthrough") if key in game}
    except ValueError as error:
        raise TaskError(f"game file {path}: not JSON ({error}); run 'saga data alfworld' to fetch it again") from None


def check_counts(data: Path) -> dict[str, int]:
    """Games per official split. Raises TaskError unless they are the official numbers."""
    counts = {
        split: len(alfworld_tasks(split, data)) if (data / _GAMES / split).is_dir() else 0 for split in OFFICIAL_COUNTS
    }
    wrong = [f"{split} has {n} games, not {OFFICIAL_COUNTS[split]}" for split, n in counts.items()]
    wrong = [line for line, split in zip(wrong, counts, strict=True) if counts[split] != OFFICIAL_COUNTS[split]]
    if wrong:
        raise TaskError(f"ALFWORLD_DATA {data}: {'; '.join(wrong)}; run 'saga data alfworld' to fetch what is missing")
    return counts


def fetch(folder: Path | None = None) -> tuple[Path, dict[str, int]]:
    """Fetch the official games with the alfworld package's own downloader, unless they are complete already.

    Args:
        folder: where to; None: $ALFWORLD_DATA, else the package's default.

    Returns:
        The folder (to be ALFWORLD_DATA) and the number of games per split.

    Raises:
        TaskError: the package is not installed, the download failed, or the games are incomplete afterwards.
    """
    named = os.environ.get("ALFWORLD_DATA")
    folder = folder or (Path(named).expanduser() if named else _default_folder())
    try:
        return folder, check_counts(folder)
    except TaskError:
        pass
    script = Path(sysconfig.get_path("scripts")) / "alfworld-download"
    if not script.is_file():
        raise TaskError(f"alfworld-download: not found at {script}; pip install 'saga-agents[alfworld]'")
    code = subprocess.run([sys.executable, str(script), "--data-dir", str(folder)], check=False).returncode
    try:
        # The downloader fetches a vision model last. Text games do not need it: what counts is whether they are there.
        return folder, check_counts(folder)
    except TaskError as error:
        if code:
            raise TaskError(
                f"alfworld-download: failed with exit code {code} (its message is above); "
                f"check the network and disk, then run it again: it goes on where it stopped. State: {error}"
            ) from None
        raise


def _default_folder() -> Path:
    return Path("~/.cache/alfworld").expanduser()
