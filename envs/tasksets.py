"""Named lists of tasks. Those that results are reported on are frozen: manifests in this package, with a content hash.

    alfworld/valid_seen  alfworld/valid_unseen  alfworld/dev-30  alfworld/train-30  frozen; the 30s: five of each type
    scienceworld/strict-175  scienceworld/dev-30  scienceworld/train-90            frozen; first variations of each task
    household/easy/eval-48  household/medium/eval-102                              frozen, with the hash of each game
    household/<easy|medium|hard>/<train|eval>:a-b                                  numbers a to b of the split's seeds
    alfworld/train  scienceworld/train  jericho/all                                what data folder or simulator hold

Any name takes a range: ``alfworld/valid_seen:0-9`` is its first ten tasks. ``python -m envs.tasksets --freeze NAME``
makes a manifest again from its source (data folder, simulator or generator).
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from envs.alfworld_data import alfworld_tasks, data_folder
from envs.base import Task, TaskError
from envs.make import packages_of

MANIFESTS = Path(__file__).with_name("manifests")

_FROZEN = {
    "alfworld/valid_seen": ("140", "official games in rooms known from training"),
    "alfworld/valid_unseen": ("134", "official games in rooms never trained in"),
    "alfworld/dev-30": ("30", "five games of each type of valid_seen"),
    "alfworld/train-30": ("30", "five training games of each type, evenly spread"),
    "scienceworld/strict-175": ("175", "the first six (at most) test variations of each of the 30 tasks"),
    "scienceworld/dev-30": ("30", "one development variation of each task"),
    "scienceworld/train-90": ("90", "the first three training variations of each task"),
    "household/easy/eval-48": ("48", "generated games, eight of each type"),
    "household/medium/eval-102": ("102", "generated games, seventeen of each type"),
}
_ENUMERATED = {
    "alfworld/train": ("3553", "official training games"),
    "scienceworld/train": ("3592", "the simulator's training variations"),
    "jericho/all": ("", "the game files in env.folder"),
}
_DIFFICULTIES = ("easy", "medium", "hard")
_RANGES = {
    f"household/{difficulty}/{split}": (":a-b", f"generated games, numbers a to b of the {split} seeds")
    for difficulty in _DIFFICULTIES
    for split in ("train", "eval")
}
_KNOWN = _FROZEN | _ENUMERATED | _RANGES


def load_task_set(name: str, env_spec: dict[str, Any]) -> list[Task]:
    """The tasks of a set, in its fixed order.

    Args:
        name: a name of this module's list, with or without a range ``:a-b`` (both ends included, counted from 0).
        env_spec: ``config.env.model_dump(mode="json")``; its ``name`` must be the set's world.

    Raises:
        TaskError: an unknown name, another world, a range outside the set, missing data, a changed manifest.
    """
    base, bounds = _parse(name)
    env = base.split("/")[0]
    if env != env_spec["name"]:
        raise TaskError(f"task set {name!r} is for env.name {env!r}, not {env_spec['name']!r}; change one of them")
    if base in _RANGES:
        return _households(base, bounds)
    if base in _FROZEN:
        tasks = read_manifest(MANIFESTS / _file_name(base))
    elif base == "alfworld/train":
        tasks = alfworld_tasks("train", data_folder())
    elif base == "scienceworld/train":
        tasks = list(_scienceworld("train"))
    else:
        tasks = _jericho_games(Path(env_spec.get("folder", "games")))
    if bounds:
        tasks = tasks[_within(name, bounds, len(tasks))]
    if env == "alfworld":
        _check_games(name, tasks)
    return tasks


def describe_task_sets() -> list[tuple[str, str, str]]:
    """(name, number of tasks, what it is) of every set."""
    return [(name, count, what) for name, (count, what) in _KNOWN.items()]


def task_set_hash(tasks: Sequence[Task]) -> str:
    """Hex SHA-256 over the canonical JSON of the tasks' ids, types and content hashes, in order."""
    return _hash([_item(task) for task in tasks])


def read_manifest(file: Path) -> list[Task]:
    """The tasks of a frozen set. Raises TaskError when count or hash do not match its items."""
    manifest = json.loads(file.read_text(encoding="utf-8"))
    name, items = manifest["name"], manifest["items"]
    if len(items) != manifest["count"]:
        raise TaskError(f"manifest {file}: {len(items)} items, recorded {manifest['count']}; reinstall the package")
    if _hash(items) != manifest["sha256"]:
        raise TaskError(
            f"manifest {file}: its items hash to {_hash(items)}, recorded {manifest['sha256']}: {name} was changed; "
            "reinstall the package"
        )
    return [Task(manifest["env"], item["id"], item["type"], item.get("sha256")) for item in items]


def write_manifest(file: Path, name: str, tasks: Sequence[Task]) -> None:
    """Freeze ``tasks`` under ``name``."""
    items = [_item(task) for task in tasks]
    manifest = {"name": name, "env": tasks[0].env, "count": len(items), "sha256": _hash(items), "items": items}
    file.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def per_type(tasks: Sequence[Task], count: int) -> list[Task]:
    """``count`` tasks of each type, evenly spread over those of the type; all of a type that has fewer."""
    chosen = []
    for _, group in groupby(sorted(tasks, key=lambda task: task.type), key=lambda task: task.type):
        same = list(group)
        number = min(count, len(same))
        chosen += [same[index * len(same) // number] for index in range(number)]
    return chosen


def _parse(name: str) -> tuple[str, tuple[int, int] | None]:
    base, colon, text = name.partition(":")
    if base not in _KNOWN:
        near = difflib.get_close_matches(base, _KNOWN, n=3, cutoff=0.5) or list(_KNOWN)
        raise TaskError(f"task set {name!r} is unknown; near names: {', '.join(near)}")
    if not colon:
        return base, None
    match = re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII)
    if not match:
        raise TaskError(f"task set {name!r}: {text!r} is no range; write {base}:0-9 for the first ten tasks")
    return base, (int(match[1]), int(match[2]))


def _within(name: str, bounds: tuple[int, int], size: int) -> slice:
    first, last = bounds
    if not first <= last < size:
        raise TaskError(f"task set {name!r}: the range must lie within 0-{size - 1}, first number first")
    return slice(first, last + 1)


def _households(base: str, bounds: tuple[int, int] | None) -> list[Task]:
    with packages_of("household"):
        from envs.household import EVAL_SEEDS, TRAIN_SEEDS, household_task
    _, difficulty, split = base.split("/")
    if bounds is None:
        raise TaskError(f"task set {base!r} has a million games; give a range, for example {base}:0-47")
    seeds = TRAIN_SEEDS if split == "train" else EVAL_SEEDS
    inside = _within(f"{base}:{bounds[0]}-{bounds[1]}", bounds, len(seeds))
    return [household_task(difficulty, seed) for seed in seeds[inside]]


@cache
def _scienceworld(split: Literal["train", "dev", "test"]) -> tuple[Task, ...]:
    """Kept, because each asking starts a JVM."""
    with packages_of("scienceworld"):
        from envs.scienceworld import scienceworld_tasks
    return tuple(scienceworld_tasks(split))


def _check_games(name: str, tasks: Sequence[Task]) -> None:
    root = data_folder() / "json_2.1.1"
    missing = [task.id for task in tasks if not (root / task.id / "game.tw-pddl").is_file()]
    if missing:
        raise TaskError(
            f"task set {name!r}: {len(missing)} of {len(tasks)} games are not in the ALFWorld data, the first of them "
            f"{root / missing[0]}; set ALFWORLD_DATA to complete data, or run 'saga data alfworld'"
        )


def _jericho_games(folder: Path) -> list[Task]:
    names = sorted(path.name for path in folder.glob("*") if re.fullmatch(r"\.(z[1-8]|zblorb)", path.suffix.lower()))
    if not names:
        raise TaskError(f"env.folder: {folder} holds no Z-machine game (*.z3, *.z5, *.z8 …); put game files there")
    return [Task("jericho", name, "jericho") for name in names]


def _freeze(name: str) -> list[Task]:
    """The tasks of a frozen set from their source."""
    if name in ("alfworld/dev-30", "alfworld/train-30"):
        split = "train" if name.endswith("train-30") else "valid_seen"
        return per_type(alfworld_tasks(split, data_folder()), 5)
    if name.startswith("alfworld/"):
        return alfworld_tasks(name.removeprefix("alfworld/"), data_folder())
    if name == "scienceworld/strict-175":
        return _first_of_each(_scienceworld("test"), 6)
    if name == "scienceworld/train-90":
        return _first_of_each(_scienceworld("train"), 3)
    if name == "scienceworld/dev-30":
        return _first_of_each(_scienceworld("dev"), 1)
    from envs.household import generate

    _, difficulty, size = name.split("/")
    tasks = _households(f"household/{difficulty}/eval", (0, int(size.removeprefix("eval-")) - 1))
    return [replace(task, sha256=_sha256(generate(difficulty, int(task.id.split("/")[1])))) for task in tasks]


def _first_of_each(tasks: Sequence[Task], count: int) -> list[Task]:
    return [task for _, same in groupby(tasks, key=lambda task: task.type) for task in list(same)[:count]]


def _file_name(name: str) -> str:
    return name.replace("/", "-") + ".json"


def _item(task: Task) -> dict[str, str]:
    return {"id": task.id, "type": task.type} | ({"sha256": task.sha256} if task.sha256 else {})


def _hash(items: Sequence[dict[str, str]]) -> str:
    return _sha256(json.dumps(items, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the manifest of a frozen task set again from its source.")
    parser.add_argument("--freeze", required=True, choices=_FROZEN)
    name = parser.parse_args().freeze
    write_manifest(MANIFESTS / _file_name(name), name, _freeze(name))


if __name__ == "__main__":
    main()
