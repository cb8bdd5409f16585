"""SAMem over this project's trajectories: what `saga samem` and `saga memory calibrate` do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from envs.cache import cache_folder
from memory.embedding import Embedder, make_embedder
from memory.experience import Experience, read_experience, rewards_or_outcome
from memory.forgetting import make_judge
from memory.language_model import LanguageModel
from memory.qtable import QTable
from memory.recall import StateMemory
from memory.records import MemoryRecordError, Trajectory
from memory.samem_settings import SamemSettings
from memory.samem_store import (
    DEFAULT_NAME,
    find_table,
    learnt_trajectories,
    load_table,
    save_barrier,
    table_names,
    table_provenance,
)
from memory.schema import memory_url
from memory.store import Store
from memory.summary import Tracker, Words, condense
from train.config import MemoryConfig, SamemConfig, apply_override, read_yaml
from train.ingest import run_trajectories
from train.memory import store_url
from train.memory_build import read_settings as settings_from

BATCH = 64
"""Episodes of one barrier when a table is learnt offline."""


def read_settings(file: Path | None, overrides: Sequence[str], kept: dict[str, object] | None = None) -> SamemSettings:
    """Settings from a YAML file and ``key.sub=value`` words, upon what the table was learnt with.

    Raises:
        MemoryRecordError: a field that there is not, or a value that does not fit.
    """
    values: dict[str, Any] = {**(kept or {}), **(read_yaml(file) if file else {})}
    for override in overrides:
        apply_override(values, override)
    return settings_from(SamemSettings, values, "samem")


def open_table(
    store: Store, name: str, file: Path | None, overrides: Sequence[str], cache: Path | None = None
) -> tuple[QTable, Words | None]:
    """The table ``name`` of a store with an embedder and a judge; an empty one where there is none yet."""
    kept = find_table(store, name)
    settings = read_settings(file, overrides, None if kept is None else kept.identity)
    return open_with(store, name, settings, cache)


def open_with(
    store: Store, name: str, settings: SamemSettings, cache: Path | None = None
) -> tuple[QTable, Words | None]:
    """The same with settings that are read already.

    Raises:
        MemoryRecordError: it was learnt with other settings, or its judge needs a model.
    """
    model = settings.model
    judge_model = (
        LanguageModel(model, cache_folder() / "samem" / "calls") if model and settings.judge == "model" else None
    )
    try:
        judge = make_judge(settings.judge, judge_model)
    except ValueError as error:
        raise MemoryRecordError(f"samem.{error}") from None
    embedder = make_embedder(settings.embedder, cache or cache_folder() / "vectors.db")
    return load_table(store, settings, embedder, name=name, judge=judge)


def open_states(settings: SamemConfig | None, memory: MemoryConfig | None, folder: Path) -> StateMemory | None:
    """What a policy in ``folder`` recalls from: the table as it is now; None without a section ``samem``.

    Raises:
        MemoryRecordError: ``database`` is named and there is no such table, or it was learnt with other settings.
    """
    if settings is None:
        return None
    own = settings.database is None
    url = memory_url(settings.database) if settings.database else store_url(memory or MemoryConfig(), folder)
    with Store(url, create=own) as store:
        if not own:
            check_table(store, settings.table)
        embedder = make_embedder(settings.embedder, cache_folder() / "vectors.db")
        table, words = load_table(store, settings, embedder, name=settings.table)
        learnt_from = table_provenance(store, settings.table)
    return StateMemory(table.snapshot(), words or Words(), settings, learnt_from)


def check_table(store: Store, name: str) -> None:
    """Raise MemoryRecordError unless ``store`` holds the table."""
    if find_table(store, name) is None:
        names = ", ".join(table_names(store)) or "none"
        raise MemoryRecordError(
            f"samem table {name!r} is not in the memory (there are: {names}); `saga samem learn` first"
        )


def experiences(trajectories: Sequence[Trajectory], words: Words, settings: SamemSettings) -> Iterator[Experience]:
    """Episodes with the deterministic summariser's states, and the thoughts that ``settings`` value."""
    for trajectory in trajectories:
        found = condense(trajectory, words, settings.state_key, lift=settings.store == "thought")
        if settings.lifted:
            yield read_experience(
                trajectory, found.states, settings.store, thoughts=found.lifted, options=found.options
            )
        else:
            thoughts = found.thoughts if settings.store == "thought" else None
            yield read_experience(rewards_or_outcome(trajectory), found.states, settings.store, thoughts=thoughts)


@dataclass(frozen=True)
class Learnt:
    """``known``: episodes that the table had learnt from before."""

    episodes: int
    known: int
    updates: int
    forgotten: int
    snapshot: str


def learn_offline(
    store: Store,
    paths: Sequence[Path],
    *,
    name: str = DEFAULT_NAME,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    batch: int = BATCH,
) -> Learnt:
    """Learn from run folders and episode files (which are added to the memory), or from all that the memory holds.

    Episodes that the table has learnt from are left out. A kill leaves whole batches.

    Raises:
        MemoryRecordError: nothing there, no thoughts, or settings other than those that the table was learnt with.
        TrajectoryError: a damaged file.
    """
    table, words = open_table(store, name, config, overrides)
    found = [trajectory for path in paths for trajectory in run_trajectories(path)]
    store.add_trajectories(found)
    if not paths:
        found = list(store.trajectories())
    if not found:
        raise MemoryRecordError("samem: no trajectories in the memory; name run folders, or `saga memory ingest` first")
    settings = table.settings
    written = settings.lifted or settings.store == "action" or any(s.thought for one in found for s in one.steps)
    if not written:
        raise MemoryRecordError(
            f"samem: none of {len(found)} episodes holds a written thought; learn from actions with --lifted, or play "
            "with agent.thoughts=true"
        )
    return learn_new(store, table, words, found, name=name, batch=batch)


def learn_new(
    store: Store,
    table: QTable,
    words: Words | None,
    found: Sequence[Trajectory],
    *,
    name: str = DEFAULT_NAME,
    batch: int = BATCH,
) -> Learnt:
    """Learn from the episodes that the table, which ``store`` holds under ``name``, has not learnt from yet."""
    done = learnt_trajectories(store, name)
    new = [trajectory for trajectory in found if trajectory.id not in done]
    settings = table.settings
    words = Words.learn(new).joined(words or Words())
    updates = forgotten = 0
    for start in range(0, len(new), batch):
        barrier = table.learn(experiences(new[start : start + batch], words, settings))
        save_barrier(store, table, barrier, words, name=name)
        updates += len(barrier.updates)
        forgotten += sum(not verdict.sound for verdict in barrier.verdicts)
    return Learnt(len(new), len(found) - len(new), updates, forgotten, table.snapshot().id)


@dataclass(frozen=True)
class Calibration:
    """Cosines of pairs of summaries. ``threshold``: where the share of same-state pairs at or above it less that of
    different-state pairs is highest (Youden 1950)."""

    same: list[float]
    different: list[float]
    threshold: float

    def merged(self, threshold: float) -> tuple[float, float]:
        """The share of same-state and of different-state pairs at or above a threshold."""
        return float(np.mean(np.array(self.same) >= threshold)), float(np.mean(np.array(self.different) >= threshold))


def calibrate(
    trajectories: Sequence[Trajectory], embedder: Embedder, *, pairs: int = 2000, seed: int = 0
) -> Calibration:
    """Compare summaries that name things, as a language model's do; two are of one state where the summaries with roles
    are equal.

    Raises:
        MemoryRecordError: too few trajectories for pairs of both kinds.
    """
    words = Words.learn(trajectories)
    texts: dict[str, set[str]] = {}
    for trajectory in trajectories:
        if not trajectory.steps:
            continue
        tracker = Tracker(words, trajectory.goal, trajectory.steps[0].observation)
        for step in trajectory.steps:
            summary = tracker.summary(step.admissible)
            texts.setdefault(summary, set()).add(tracker.named(summary))
            tracker.played(step.action, step.result, step.valid)
    chance = Random(seed)
    states = sorted(texts)
    same = [pair for state in states for pair in combinations(sorted(texts[state])[:20], 2)]
    different = [
        (chance.choice(sorted(texts[one])), chance.choice(sorted(texts[other])))
        for one, other in (chance.sample(states, 2) for _ in range(pairs if len(states) > 1 else 0))
    ]
    same = chance.sample(same, min(pairs, len(same)))
    if not same or not different:
        raise MemoryRecordError("samem: too few trajectories to compare; ingest some dozens of episodes first")
    cosines = [_cosines(embedder, kind) for kind in (same, different)]
    # Thresholds up from 0.5 in steps of 0.005; of equally good ones the middle.
    grid = np.arange(0.5, 1.0, 0.005)
    gain = np.array([(cosines[0] >= at).mean() - (cosines[1] >= at).mean() for at in grid])
    best = grid[np.isclose(gain, gain.max())]
    return Calibration(cosines[0].tolist(), cosines[1].tolist(), round(float(best[len(best) // 2]), 3))


def _cosines(embedder: Embedder, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    texts = sorted({text for pair in pairs for text in pair})
    row = {text: number for number, text in enumerate(texts)}
    vectors = embedder.embed(texts)
    left, right = (vectors[[row[pair[side]] for pair in pairs]] for side in (0, 1))
    return (left * right).sum(axis=1)
