"""Duplicates become one, levels stay within their size, and the reason of every removal is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from memory.builder_settings import ConsolidationSettings
from memory.consolidate import compatible, consolidate, duplicates, negated
from memory.embedding import HashingEmbedder
from memory.records import (
    AnyItem,
    EpisodeItem,
    Evidence,
    KeyStep,
    Link,
    Predicate,
    PrincipleItem,
    ProcedureItem,
    TraceStep,
    Trajectory,
)
from memory.store import LedgerEntry, Store

pytestmark = pytest.mark.unit

W = {"world": "w", "grammar": "g", "task_type": "t"}


def principle(guidance: str, **fields: Any) -> PrincipleItem:
    return PrincipleItem.model_validate(W | {"condition": "it is closed", "guidance": guidance} | fields)


def procedure(*steps: str, when: str = "put it away") -> ProcedureItem:
    return ProcedureItem.model_validate(W | {"when": when, "steps": steps})


class Fixed:
    """An embedder of given vectors; any other text gets a direction of its own."""

    name = "fixed"

    def __init__(self, vectors: dict[str, Sequence[float]]) -> None:
        self._vectors = vectors

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = np.zeros((len(texts), 40), dtype=np.float32)
        for row, text in enumerate(texts):
            given_ = self._vectors.get(text)
            if given_ is None:
                rows[row, 10 + sum(map(ord, text)) % 30] = 1
            else:
                rows[row, : len(given_)] = given_
        return rows


def test_leaders_take_what_is_near() -> None:
    # Cosines with the first: 0.96, 0.8; between second and third: 0.768 + 0.168 = 0.936.
    vectors = np.array([[1, 0], [0.96, 0.28], [0.8, 0.6]], dtype=np.float32)
    items = [principle(str(number)) for number in range(3)]
    assert [(i, j, round(c, 3)) for i, j, c in duplicates(items, vectors, 0.95)] == [(1, 0, 0.96)]
    # 0.936 would do for the second, but that one is no leader.
    assert [(i, j) for i, j, _ in duplicates(items, vectors, 0.9)] == [(1, 0)]
    assert [(i, j) for i, j, _ in duplicates(items, vectors, 0.8)] == [(1, 0), (2, 0)]


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0.1, 1)), max_size=12), st.floats(0.5, 1))
def test_what_is_kept_is_pairwise_apart(rows: list[tuple[float, float]], similarity: float) -> None:
    vectors = np.array(rows, dtype=np.float32).reshape(-1, 2)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = duplicates([principle("x")] * len(rows), vectors, similarity)
    gone = {i for i, _, _ in found}
    kept = [i for i in range(len(rows)) if i not in gone]
    assert all(j in kept and j < i and c >= similarity - 1e-6 for i, j, c in found)
    assert all(vectors[i] @ vectors[j] < similarity + 1e-6 for i in kept for j in kept if i != j)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (principle("open it first"), principle("first open it"), True),
        (principle("open it"), principle("do not open it"), False),
        (principle("never leave it unopened, not once"), principle("open it"), True),
        (principle("open it"), principle("open it", task_type=""), False),
        (
            principle("a", predicate=Predicate(trigger="true", requirement="false")),
            principle("a", predicate=Predicate(trigger="step > 1", requirement="false")),
            False,
        ),
        (principle("a", predicate=Predicate(trigger="true", requirement="false")), principle("a"), True),
        (procedure("go to {0}", "take {1}"), procedure("go to {1}", "take {0}"), True),
        (procedure("go to {0}", "heat {1}"), procedure("go to {0}", "cool {1}"), False),
        (
            EpisodeItem.model_validate(W | {"trajectory": "t-1", "goal": "g", "outcome": "success"}),
            EpisodeItem.model_validate(W | {"trajectory": "t-2", "goal": "g", "outcome": "failure"}),
            False,
        ),
    ],
)
def test_near_texts_that_must_not_be_one(one: AnyItem, other: AnyItem, same: bool) -> None:
    assert compatible(one, other) is same
    assert compatible(other, one) is same


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Do not go", True), ("Don’t", True), ("not without it", False), ("nothing", True), ("", False)],
)
def test_negation_is_odd(text: str, expected: bool) -> None:
    assert negated(text) is expected


class Bench:
    """A store with one trajectory, its episode, and whatever principles a test wants."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(f"sqlite:///{folder}/memory.db")
        step = TraceStep(index=0, observation="o", action="go to box", result="closed")
        self.trajectory = Trajectory(source="s", **W, task="1", goal="g", success=True, steps=(step,))
        self.store.add_trajectories([self.trajectory])
        self.cited = (Evidence(trajectory=self.trajectory.id, step=0, quote="go to box"),)
        self.episode = EpisodeItem(
            **W, trajectory=self.trajectory.id, goal="g", outcome="success", key_steps=(KeyStep(step=0, what="went"),)
        )
        self.write(self.episode, self.trajectory.id)

    def write(self, item: AnyItem, *lowers: str) -> str:
        links = [Link(lower=lower, upper=item.id, evidence=self.cited) for lower in lowers]
        assert not self.store.write([item], links).rejected
        return item.id

    def statuses(self, level: int) -> list[str]:
        return [stored.status for stored in self.store.items(level)]


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path)
    yield made
    made.store.close()


def entry(item: str, episode: str, outcome: float, shown: int) -> LedgerEntry:
    return LedgerEntry(item, episode, outcome, retrieved=shown, instantiated=shown)


def test_duplicates_are_merged_with_links_and_credit(bench: Bench) -> None:
    one, other = procedure("go to {0}", "put {1}"), procedure("go to {0}", "put {1}", when="put it back")
    first, second = bench.write(one, bench.episode.id), bench.write(other, bench.episode.id)
    rule = bench.write(principle("open it"), first)
    bench.store.credit([entry(first, "a", 1.0, 1), entry(second, "a", 0.0, 0), entry(second, "b", 0.0, 0)])
    near = Fixed({one.text(): [1.0, 0.0], other.text(): [0.96, 0.28]})
    report = consolidate(bench.store, near, ConsolidationSettings(), round=3)
    assert [(m.retired, m.kept, round(m.cosine, 3)) for m in report.merges] == [(second, first, 0.96)]
    assert bench.statuses(2) == ["candidate", "retired"]
    assert bench.store.item(second).reason == f"says what {first} says (cosine 0.960)"
    assert bench.store.history(second)[-1].round == 3
    # Its own outcome of episode a stays; that of episode b comes along.
    ledger = bench.store.ledger(first)
    assert (ledger.episodes_with, ledger.outcome_with, ledger.episodes_without) == (1, 1.0, 1)
    assert [link.upper for link in bench.store.links(lower=first)] == [rule]
    assert consolidate(bench.store, near, ConsolidationSettings()).merges == []


def test_what_rested_on_a_duplicate_rests_on_what_is_kept(bench: Bench) -> None:
    one, other = procedure("go to {0}"), procedure("go to {1}", when="go")
    first, second = bench.write(one, bench.episode.id), bench.write(other, bench.episode.id)
    rule = bench.write(principle("open it"), second)
    near = Fixed({one.text(): [1.0], other.text(): [1.0]})
    consolidate(bench.store, near, ConsolidationSettings())
    assert [link.upper for link in bench.store.links(lower=first)] == [rule]


def test_the_validated_one_is_kept_whatever_came_first(bench: Bench) -> None:
    base = bench.write(procedure("go to {0}"), bench.episode.id)
    first, second = bench.write(principle("open it"), base), bench.write(principle("open it now"), base)
    bench.store.set_status(second, "validated", "helped")
    texts = {principle("open it").text(): [1.0], principle("open it now").text(): [1.0]}
    report = consolidate(bench.store, Fixed(texts), ConsolidationSettings())
    assert [(merge.retired, merge.kept) for merge in report.merges] == [(first, second)]


def test_lowest_utility_leaves_first_and_rejected_ones_take_no_room(bench: Bench) -> None:
    base = bench.write(procedure("go to {0}"), bench.episode.id)
    ids = [bench.write(principle(f"rule {letter * (ord(letter) - 96)}"), base) for letter in "abcde"]
    for item, with_, without in ((ids[0], 0.0, 1.0), (ids[1], 1.0, 0.0), (ids[3], 1.0, 0.5)):
        for number in range(4):
            bench.store.credit([entry(item, f"x{number}", with_, 1), entry(item, f"y{number}", without, 0)])
    bench.store.set_status(ids[4], "rejected", "failed the audit")
    settings = ConsolidationSettings.model_validate({"limits": {"principles": 2}})
    report = consolidate(bench.store, Fixed({}), settings)
    # Utilities: -1 * 4/8, +1 * 4/8, 0 (unknown), +0.5 * 4/8: the negative and the unknown one leave.
    assert [(removal.id, removal.utility) for removal in report.removals] == [(ids[0], -0.5), (ids[2], 0.0)]
    assert bench.statuses(3) == ["retired", "candidate", "retired", "candidate", "rejected"]
    assert bench.store.item(ids[0]).reason == ("over the limit of 2 principles of w/g; candidate, with utility -0.500")
    assert bench.statuses(1) == ["candidate"]


def test_with_a_real_embedding_of_words(bench: Bench) -> None:
    base = bench.write(procedure("go to {0}"), bench.episode.id)
    texts = ["open the box before you put a thing in", "open the box before you put a thing in it", "heat an egg"]
    ids = [bench.write(principle(text), base) for text in texts]
    report = consolidate(bench.store, HashingEmbedder(), ConsolidationSettings())
    assert [(merge.retired, merge.kept) for merge in report.merges] == [(ids[1], ids[0])]
