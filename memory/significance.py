"""The offline builder's exact test of 2 x 2 tables, whose units are episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

Table = tuple[int, int, int, int]
"""A 2 x 2 table: (breaking, breaking and bad, keeping, keeping and bad)."""


def stratified_test(tables: Iterable[Table]) -> float:
    """One-sided p-value that breaking goes with bad: exact conditional test of several 2 x 2 tables.

    Given the margins of each table, the number of bad ones among the breaking is hypergeometric; the statistic is their
    sum over the tables (Birch 1964; with one table it is Fisher's exact test).
    """
    distribution = np.ones(1)
    observed = 0
    for breaking, breaking_bad, keeping, keeping_bad in tables:
        observed += breaking_bad
        distribution = np.convolve(
            distribution, _hypergeometric(breaking + keeping, breaking_bad + keeping_bad, breaking)
        )
    return float(min(1.0, distribution[observed:].sum()))


def risk_difference(tables: Sequence[Table]) -> float:
    """Mantel-Haenszel risk difference of bad, breaking minus keeping (Greenland and Robins 1985); 0: none compares."""
    above = below = 0.0
    for breaking, breaking_bad, keeping, keeping_bad in tables:
        total = breaking + keeping
        if breaking and keeping:
            above += (breaking_bad * keeping - keeping_bad * breaking) / total
            below += breaking * keeping / total
    return above / below if below else 0.0


def _hypergeometric(total: int, marked: int, drawn: int) -> np.ndarray:
    """Probabilities of 0..drawn marked ones among ``drawn`` of ``total`` that hold ``marked``."""
    probabilities = np.zeros(drawn + 1)
    for hit in range(max(0, drawn + marked - total), min(drawn, marked) + 1):
        probabilities[hit] = math.exp(
            _log_choose(marked, hit) + _log_choose(total - marked, drawn - hit) - _log_choose(total, drawn)
        )
    return probabilities


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
