import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.embedding import HashingEmbedder, Vectors
from memory.retrieve import Entry, LevelIndex, type_match, utility
from memory.settings import RetrievalSettings
from memory.store import Ledger

pytestmark = pytest.mark.unit


class Places:
    """Texts are numbers: angles in degrees."""

    name = "places"

    def embed(self, texts: list[str]) -> Vectors:
        angles = np.deg2rad([float(text) for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


WEIGHTS = RetrievalSettings(similarity=1.0, task_type=0.3, utility=0.5)


def search(entries: list[Entry], k: int = 3, weights: RetrievalSettings = WEIGHTS) -> list[tuple[str, float]]:
    index = LevelIndex(3, entries, Places())
    return [(item.item, item.score) for item in index.search(Places().embed(["0"])[0], "heat", k, weights)]


def test_a_score_is_the_sum_of_its_parts() -> None:
    entries = [
        Entry("a", "60", "heat", "validated", 0.2),  # 0.5 + 0.3 + 0.1
        Entry("b", "0", "cool", "candidate", -0.4),  # 1.0 + 0.0 - 0.2
        Entry("c", "90", "", "audited"),  # 0.0 + 0.15 + 0.0
    ]
    index = LevelIndex(3, entries, Places())
    best, second, third = index.search(Places().embed(["0"])[0], "heat", 5, WEIGHTS)
    assert best.model_dump() == {
        "item": "a",
        "level": 3,
        "status": "validated",
        "similarity": pytest.approx(0.5),
        "task_type": 0.3,
        "utility": 0.1,
        "score": pytest.approx(0.9),
    }
    assert (second.item, second.score, second.utility) == ("b", pytest.approx(0.8), -0.2)
    assert (third.item, third.task_type) == ("c", 0.15)


def test_equal_scores_go_by_id_whatever_the_order_of_writing() -> None:
    entries = [Entry(name, "45") for name in "dbca"]
    assert [name for name, _ in search(entries)] == ["a", "b", "c"]
    assert [name for name, _ in search(entries[::-1])] == ["a", "b", "c"]


def test_nothing_to_find() -> None:
    assert search([]) == []
    assert search([Entry("a", "0")], k=0) == []
    assert [name for name, _ in search([Entry("a", "0")], k=9)] == ["a"]


def test_a_graph_finds_what_the_exact_search_finds() -> None:
    words = np.random.default_rng(0).integers(0, 60, size=(600, 5))
    entries = [Entry(f"{i:03d}", " ".join(f"word{w}" for w in row)) for i, row in enumerate(words)]
    embedder = HashingEmbedder()
    exact, graph = (LevelIndex(1, entries, embedder, exact_up_to=limit) for limit in (600, 0))
    queries = embedder.embed([entry.text for entry in entries[::40]])
    found = [[{i.item for i in index.search(q, "", 10, WEIGHTS)} for q in queries] for index in (exact, graph)]
    recall = np.mean([len(a & b) / 10 for a, b in zip(*found, strict=True)])
    assert recall > 0.9


def test_utility_shrinks_what_few_episodes_say() -> None:
    def ledger(with_: tuple[int, float], without: tuple[int, float]) -> Ledger:
        return Ledger(
            episodes_with=with_[0], outcome_with=with_[1], episodes_without=without[0], outcome_without=without[1]
        )

    assert utility(ledger((4, 1.0), (12, 0.5))) == 0.25  # 0.5 * 4 / 8
    assert utility(ledger((12, 0.25), (4, 0.75))) == -0.25
    assert utility(ledger((0, 0.0), (9, 0.9))) == 0.0  # nothing to compare with
    assert utility(Ledger()) == 0.0


@given(st.integers(0, 99), st.floats(0, 1), st.integers(0, 99), st.floats(0, 1))
def test_utility_is_bounded(n_with: int, with_: float, n_without: int, without: float) -> None:
    ledger = Ledger(episodes_with=n_with, outcome_with=with_, episodes_without=n_without, outcome_without=without)
    assert -1 <= utility(ledger) <= 1


def test_a_type_matches_fully_half_or_not() -> None:
    assert [type_match(own, "heat") for own in ("heat", "", "cool")] == [1.0, 0.5, 0.0]
