"""Search of one level of the memory: cosine over FAISS, then task type and utility; every part of a score is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import faiss
import numpy as np

from memory.embedding import Embedder, Vectors
from memory.settings import RetrievalSettings
from memory.store import Ledger
from memory.usage import Retrieved

EXACT_UP_TO = 100_000
"""Vectors that are searched one by one (5.5 ms on one core for 384 numbers each); larger levels get an HNSW graph."""

POOL = 256
"""The nearest items that task type and utility may reorder. Levels up to this size are ranked as a whole."""

PRIOR_EPISODES = 4.0
"""Episodes on each side at which a measured difference counts half (see :func:`utility`)."""


@dataclass(frozen=True)
class Entry:
    """What search needs to know of an item. ``task_type`` "": of any type; ``utility`` in [-1, 1]."""

    id: str
    text: str
    task_type: str = ""
    status: str = ""
    utility: float = 0.0


def utility(ledger: Ledger, prior: float = PRIOR_EPISODES) -> float:
    """How much better episodes ended with the item than without it, in [-1, 1], shrunk towards 0 while few are known.

    (mean outcome with - mean outcome without) * n / (n + prior), where n is the number of episodes on the side that has
    fewer.
    """
    n = min(ledger.episodes_with, ledger.episodes_without)
    return (ledger.outcome_with - ledger.outcome_without) * n / (n + prior)


def type_match(own: str, wanted: str) -> float:
    """1 for the same task type, 1/2 where the item is for any, 0 for another."""
    if not own:
        return 0.5
    return float(own == wanted)


class LevelIndex:
    """The searchable items of one level. Build it over what may be shown: nothing is filtered afterwards.

    Args:
        entries: the items.
        embedder: makes their vectors, and the queries'.
        exact_up_to: number of items from which on the search is approximate.
    """

    def __init__(
        self, level: int, entries: Sequence[Entry], embedder: Embedder, *, exact_up_to: int = EXACT_UP_TO
    ) -> None:
        self._level = level
        # In the order of ids, so that neither ties nor the graph depend on the order of writing.
        self._entries = sorted(entries, key=lambda entry: entry.id)
        self._index: faiss.Index | None = None
        if self._entries:
            vectors = embedder.embed([entry.text for entry in self._entries])
            self._index = make_index(vectors, exact=len(self._entries) <= exact_up_to)

    def __len__(self) -> int:
        return len(self._entries)

    def search(self, query: Vectors, task_type: str, k: int, weights: RetrievalSettings) -> list[Retrieved]:
        """The ``k`` items of highest score, best first; equal scores (to six decimals) in the order of ids.

        Args:
            query: vector of length one, shape (d,).
        """
        if self._index is None or k == 0:
            return []
        cosines, places = self._index.search(query[None, :], min(len(self._entries), max(POOL, k)))
        found = [
            self._score(self._entries[place], float(cosine), task_type, weights)
            for cosine, place in zip(cosines[0], places[0], strict=True)
            if place >= 0
        ]
        found.sort(key=lambda item: (-item.score, item.item))
        return found[:k]

    def _score(self, entry: Entry, cosine: float, task_type: str, weights: RetrievalSettings) -> Retrieved:
        similarity = round(weights.similarity * cosine, 6)
        kind = round(weights.task_type * type_match(entry.task_type, task_type), 6)
        use = round(weights.utility * entry.utility, 6)
        return Retrieved(
            item=entry.id,
            level=self._level,
            status=entry.status,
            similarity=similarity,
            task_type=kind,
            utility=use,
            score=round(similarity + kind + use, 6),
        )


def make_index(vectors: Vectors, *, exact: bool) -> faiss.Index:
    """Inner products over ``vectors``, shape (n, d): all of them, or an HNSW graph (Malkov & Yashunin 2018)."""
    size = vectors.shape[1]
    if exact:
        index: faiss.Index = faiss.IndexFlatIP(size)
    else:
        index = faiss.IndexHNSWFlat(size, 16, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 64
        index.hnsw.efSearch = POOL
    index.add(np.ascontiguousarray(vectors))
    return index
