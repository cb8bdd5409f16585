"""Online clustering of vectors around their founding members: what makes states of summaries, and one of thoughts.

A vector whose cosine with the nearest founder is at least the threshold joins that cluster, else it founds a new one
(leader clustering; Hartigan 1975). A cluster's vector never changes, so clusters do not drift, the search index stays
valid, and which cluster a vector joins depends only on the founders before it.
"""

from __future__ import annotations

import threading
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from memory.embedding import Vectors
from memory.retrieve import EXACT_UP_TO, POOL, make_index

Ids = NDArray[np.int64]

_ROUNDING = 1e-5
"""A cosine of float32 vectors is that uncertain: a text always joins the cluster that an equal text founded."""


class Clusters:
    """Clusters in the order of their founding: number 0, 1, ….

    Args:
        threshold: least cosine that joins.
        exact_up_to: clusters from which on the search is approximate (HNSW).
    """

    def __init__(self, threshold: float, *, exact_up_to: int = EXACT_UP_TO) -> None:
        self.threshold = threshold
        self._exact_up_to = exact_up_to
        self._index: faiss.Index | None = None
        self._exact = True
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def found(self, vectors: Vectors) -> None:
        """Add clusters with these founders, shape (n, d), as they are."""
        if not len(vectors):
            return
        total = self._count + len(vectors)
        if self._index is None:
            self._exact = total <= self._exact_up_to
            self._index = make_index(vectors, exact=self._exact)
        elif self._exact and total > self._exact_up_to:
            known = self._index.reconstruct_n(0, self._count)
            self._index = make_index(np.concatenate([known, vectors]), exact=False)
            self._exact = False
        else:
            self._index.add(np.ascontiguousarray(vectors))
        self._count = total

    def founder(self, number: int) -> Vectors:
        """The vector of a cluster's founder, shape (d,)."""
        if self._index is None:
            raise IndexError(f"no cluster {number}")
        return np.asarray(self._index.reconstruct(number), dtype=np.float32)

    def nearest(self, vectors: Vectors, first: int | None = None) -> tuple[Ids, Vectors]:
        """Of each vector the nearest cluster, -1 where none is near enough, and the cosine with it. Shapes (n,).

        Args:
            vectors: of length one, shape (n, d).
            first: only the ``first`` oldest clusters count (a snapshot); None: all.
        """
        count = self._count if first is None else first
        if self._index is None or count == 0 or not len(vectors):
            return np.full(len(vectors), -1, dtype=np.int64), np.zeros(len(vectors), dtype=np.float32)
        vectors = np.ascontiguousarray(vectors)
        if count == self._count:
            cosines, places = self._index.search(vectors, 1)
        else:
            oldest = faiss.IDSelectorRange(0, count)
            parameters: Any = faiss.SearchParameters() if self._exact else faiss.SearchParametersHNSW()  # type: ignore[attr-defined]
            parameters.sel = oldest
            if not self._exact:
                parameters.efSearch = POOL
            cosines, places = self._index.search(vectors, 1, params=parameters)
        near = cosines[:, 0] >= self.threshold - _ROUNDING
        return np.where(near, places[:, 0], -1), np.where(places[:, 0] >= 0, cosines[:, 0], 0.0)

    def assign(self, vectors: Vectors) -> tuple[Ids, list[int]]:
        """The cluster of each vector, in order: an earlier one of the same call may have founded it.

        Returns:
            numbers, shape (n,), and the rows that founded new clusters.
        """
        numbers, cosines = self.nearest(vectors)
        before = self._count
        founders: list[int] = []
        new = np.empty((16, vectors.shape[1] if vectors.ndim == 2 else 0), dtype=np.float32)
        for row in range(len(vectors)):
            if founders:
                among = new[: len(founders)] @ vectors[row]
                nearest = int(among.argmax())
                # An older cluster is kept unless a new one is nearer.
                if among[nearest] >= self.threshold - _ROUNDING and (
                    numbers[row] < 0 or among[nearest] > cosines[row] + _ROUNDING
                ):
                    numbers[row] = before + nearest
            if numbers[row] < 0:
                numbers[row] = before + len(founders)
                if len(founders) == len(new):
                    new = np.concatenate([new, np.empty_like(new)])
                new[len(founders)] = vectors[row]
                founders.append(row)
        self.found(vectors[founders])
        return numbers, founders
