"""Rollouts as trajectories of the memory: this project's episode files, and outside files by :mod:`memory.formats`."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from envs.tasksets import MANIFESTS, read_manifest
from memory.formats import Labels, Parsed, read_rollouts
from memory.records import MemoryRecordError, TraceStep, Trajectory
from train.trajectory import Episode, read_episodes

GRAMMARS = {
    "alfworld": "alfworld-0.4",
    "household": "alfworld-0.4",  # the same engine
    "scienceworld": "scienceworld-1.2",
    "jericho": "jericho",
}
"""The form of the actions in this project's worlds. Outside rollouts of another form get another name."""

REFUSALS = {
    "alfworld": ("Nothing happens.",),
    "household": ("Nothing happens.",),
    "scienceworld": ("No known action matches that input.", "Unknown action."),
}
"""How each world begins its answer to an action that it refuses, for files that do not say which were."""

_GAME = re.compile(r"(?:\b(train|valid_seen|valid_unseen)/)?([a-z_]+-[^/]+)/(trial_\w+)")


def trajectory_of(episode: Episode, run: str, round: int = 0) -> Trajectory:
    """One of this project's episodes as level 0.

    A fault leaves the outcome open (success None). A reply without an action is kept as the step's thought.
    """
    fault = episode.status != "ok"
    return Trajectory(
        source=f"run:{run}/{episode.id}",
        world=episode.env,
        grammar=GRAMMARS.get(episode.env, episode.env),
        task=episode.task,
        task_type=episode.task_type,
        goal=episode.goal,
        agent=" ".join(part for part in (episode.agent, episode.model, episode.adapter) if part),
        success=None if fault else episode.won,
        score=min(1.0, max(0.0, episode.score)),
        status="truncated" if fault else "complete",
        note=f"{episode.status}: {episode.error}" if fault else "",
        round=round,
        steps=tuple(
            TraceStep(
                index=step.index,
                observation=step.observation,
                thought=step.text if step.action is None else step.thought or "",
                action=step.action,
                result=step.result,
                valid=step.valid,
                reward=step.reward,
                admissible=None if step.admissible is None else tuple(step.admissible),
                inventory=None if step.inventory is None else tuple(step.inventory),
            )
            for step in episode.steps
        ),
    )


def run_trajectories(path: Path, round: int = 0) -> Iterator[Trajectory]:
    """The episodes of a run's or an evaluation's folder, or of one of its files, phase by phase.

    A run's own evaluations are left out, unless a file is named: a memory that rests on them could not be evaluated.

    Raises:
        MemoryRecordError: no episodes there. TrajectoryError: a damaged file.
    """
    files = sorted((path / "episodes").glob("*.jsonl.gz")) if path.is_dir() else [path]
    if path.is_dir():
        files = [file for file in files if not file.name.startswith("eval-")]
    if not files:
        raise MemoryRecordError(f"{path}: no episodes/*.jsonl.gz there; give a run or evaluation folder, or a file")
    for file in files:
        for episode in read_episodes(file):
            yield trajectory_of(episode, file.resolve().parent.parent.name, round)


def is_own(path: Path) -> bool:
    """Whether ``path`` is a folder, or a file of this project's episodes."""
    if path.is_dir():
        return True
    if path.suffix != ".gz" or not path.is_file():
        return False
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, EOFError, ValueError):
        return False
    return isinstance(first, dict) and "schema_version" in first


def outside_trajectories(path: Path, labels: Labels) -> Parsed:
    """The episodes of an outside file; those of ALFWorld get the official task id (``<split>/<game>/<trial>``), under
    which an evaluation recognises its own tasks. Raises MemoryRecordError."""
    if not labels.refusals:
        labels = replace(labels, refusals=REFUSALS.get(labels.world, ()))
    parsed = read_rollouts(path, labels)
    if labels.world != "alfworld":
        return parsed
    return Parsed([_with_official_id(trajectory) for trajectory in parsed.trajectories], parsed.problems)


def _with_official_id(trajectory: Trajectory) -> Trajectory:
    found = _GAME.search(trajectory.task)
    if not found:
        return trajectory
    split, game, trial = found.groups()
    # The splits share no game: what is in neither of the two frozen ones is of the training split.
    split = split or next((name for name, games in _frozen_games().items() if f"{game}/{trial}" in games), "train")
    return trajectory.model_copy(
        update={"task": f"{split}/{game}/{trial}", "task_type": trajectory.task_type or game.partition("-")[0]}
    )


@cache
def _frozen_games() -> dict[str, set[str]]:
    games = {}
    for split in ("valid_seen", "valid_unseen"):
        tasks = read_manifest(MANIFESTS / f"alfworld-{split}.json")
        games[split] = {task.id.partition("/")[2] for task in tasks}
    return games
