"""Tables of values in a memory's file: they come back as they were, and what was changed is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.embedding import HashingEmbedder
from memory.exchange import export_memory, import_memory
from memory.experience import Experience, Visit
from memory.forgetting import Trial, Verdict
from memory.qtable import QTable
from memory.records import MemoryRecordError
from memory.samem_settings import SamemSettings
from memory.samem_store import load_table, read_barriers, read_updates, save_barrier, table_names, table_provenance
from memory.store import Store
from memory.summary import Words
from tests.vault import trajectory

pytestmark = pytest.mark.unit

WORDS = Words(kinds=("door", "lever"), forms=(("door", "enter it"),))
SETTINGS = SamemSettings(threshold=0.9, thought_threshold=0.9, alpha=0.5, gamma=0.5, forget_above=2)


def judged(trial: Trial) -> Verdict:
    return Verdict(trial.thought, False, "no \u00e4 lever", "test", trial.value)


def learn_table(store: Store, name: str = "main") -> QTable:
    """Learn from two episodes at two barriers; one thought is forgotten."""
    table = QTable(SETTINGS, HashingEmbedder(), judged)
    store.add_trajectories([trajectory(0), trajectory(1)])
    for number in range(2):
        visits = (
            Visit(0, "the hall", f"pull lever {number}", (0.0,)),
            Visit(1, "the hall", "wait and see", (0.25,)),
            Visit(1, "a door is open", "enter", (1.0,)),
        )
        barrier = table.learn([Experience(trajectory(number).id, str(number), visits, round=number)])
        save_barrier(store, table, barrier, WORDS, name=name)
    return table


def open_store(folder: Path, name: str) -> Store:
    return Store(f"sqlite:///{folder}/{name}.db")


def new_lines(store: Store, path: Path) -> dict[str, int]:
    return {kind: count for kind, count in import_memory(store, path).items() if count}


def test_a_table_comes_back(tmp_path: Path) -> None:
    first, second = open_store(tmp_path, "first"), open_store(tmp_path, "second")
    table = learn_table(first)
    assert table.forgotten == {0}  # half of half of half of 1/2: the lowest of three
    learn_table(first, "other")
    counts = export_memory(first, tmp_path / "a.jsonl")
    assert counts == {
        "trajectory": 2, "qtable": 2, "state": 4, "thought": 8, "update": 12, "verdict": 2, "barrier": 4,
    }  # fmt: skip
    assert new_lines(second, tmp_path / "a.jsonl") == counts
    export_memory(second, tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    assert table_names(second) == ["main", "other"]
    loaded, words = load_table(second, SETTINGS, HashingEmbedder(), judge=judged)
    assert words == WORDS
    assert loaded.snapshot().id == table.snapshot().id == read_barriers(second)[-1].snapshot
    assert loaded.judged == table.judged
    assert read_updates(second) == read_updates(first)
    assert table_provenance(second) == {("vault", "task-0"), ("vault", "task-1")}
    more = [Experience("t-2", "2", (Visit(0, "the hall", "dance", (0.5,)),))]
    assert loaded.learn(more).snapshot == table.learn(more).snapshot  # and goes on as the first one does


def test_a_known_table_stays_as_it_is(tmp_path: Path) -> None:
    first, second = open_store(tmp_path, "first"), open_store(tmp_path, "second")
    learn_table(first)
    export_memory(first, tmp_path / "a.jsonl")
    table = QTable(SETTINGS, HashingEmbedder())
    save_barrier(second, table, table.learn([Experience("t-9", "9", (Visit(0, "a cellar", "dig", (1.0,)),))]), None)
    assert new_lines(second, tmp_path / "a.jsonl") == {"trajectory": 2}
    kept, _ = load_table(second, SETTINGS, HashingEmbedder())
    assert kept.snapshot().id == table.snapshot().id


def line_of(kind: str, **changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Change the last line of that kind."""

    def edit(read: list[dict[str, Any]]) -> None:
        next(line for line in reversed(read) if line["kind"] == kind).update(changes)

    return edit


def without(kind: str) -> Callable[[list[dict[str, Any]]], None]:
    def edit(read: list[dict[str, Any]]) -> None:
        read[:] = [line for line in read if line["kind"] != kind]
        read[-1]["lines"] = len(read) - 1

    return edit


def packed(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers, dtype="<f4").tobytes()).decode()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (line_of("thought", value=9.0), "samem table 'main' is q-.*; it was changed"),
        (line_of("state", text="a trap"), "it was changed"),
        (line_of("thought", visits=-1), "thought.visits: Input should be greater than or equal to 0"),
        (line_of("thought", value=float("nan")), "thought.value: Input should be a finite number"),
        (line_of("thought", state=2), "state: 2 is not in the table"),
        (line_of("update", thought=4), "thought: 4 is not in the table"),
        (line_of("verdict", thought=4), "thought: 4 is not in the table"),
        (line_of("update", trajectory="t-none"), "names step 0 of t-none, which is not in the memory"),
        (line_of("update", step=7), "names step 7 of t-"),
        (line_of("state", vector=packed(1.0)), "1 numbers that are no vector of length one like the others"),
        (line_of("state", vector=packed(*[1.0] * 256)), "256 numbers that are no vector of length one"),
        (line_of("state", vector=packed(*[float("nan")] * 256)), "no vector of length one"),
        (line_of("state", vector="x"), "no float32 numbers in base64"),
        (line_of("qtable", identity={"threshold": 0.9}), "identity: it is not whole"),
        (line_of("qtable", identity={"threshold": 2}), "identity: "),
        (line_of("qtable", words={"kinds": 1}), "qtable.words"),
        (without("qtable"), "kind: 'state' before any qtable"),
        (without("trajectory"), "which is not in the memory"),
    ],
)
def test_a_changed_table_is_refused(tmp_path: Path, edit: Callable[[list[dict[str, Any]]], None], message: str) -> None:
    path = tmp_path / "a.jsonl"
    first = open_store(tmp_path, "first")
    learn_table(first)
    export_memory(first, path)
    read = [json.loads(line) for line in path.read_text().splitlines()]
    edit(read)
    path.write_text("".join(json.dumps(line) + "\n" for line in read))
    second = open_store(tmp_path, "second")
    with pytest.raises(MemoryRecordError, match=message):
        import_memory(second, path)
    assert table_names(second) == []
    assert list(second.trajectories()) == []
