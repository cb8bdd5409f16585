"""Intervals and tests: pure functions over counts and outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NORMAL = NormalDist()


def wilson_interval(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927). ``n`` 0 gives (0, 1)."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe_interval(successes_a: float, a: int, successes_b: float, b: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of the difference of two independent proportions, a - b (Newcombe 1998, method 10: hybrid of Wilson's).

    For means of values within [0, 1] in place of proportions it is conservative: no such values vary more than 0 and 1.
    """
    if a == 0 or b == 0:
        return -1.0, 1.0
    p, q = successes_a / a, successes_b / b
    low_a, high_a = wilson_interval(successes_a, a, z)
    low_b, high_b = wilson_interval(successes_b, b, z)
    return p - q - math.hypot(p - low_a, high_b - q), p - q + math.hypot(high_a - p, q - low_b)


def paired_bootstrap(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], samples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference ``after`` - ``before``, paired by item, and its 95 % interval (percentile bootstrap over items).

    Args:
        before, after: of each item (the same ones) the values of its repetitions, which are averaged first.

    Raises:
        ValueError: the items differ, or there are none.
    """
    differences = paired_differences(before, after)
    low, high = np.quantile(_resampled_means(differences, samples, seed), [0.025, 0.975])
    return float(differences.mean()), float(low), float(high)


@dataclass(frozen=True)
class Effect:
    """A mean difference with its 95 % interval; ``p``: of no difference, two-sided; ``n``: pairs."""

    difference: float
    low: float
    high: float
    p: float
    n: int


def paired_effect(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    samples: int = 50_000,
    seed: int = 0,
    *,
    pseudo: float = 0.0,
) -> Effect:
    """Mean difference ``after`` - ``before``, paired by item, for few items: expanded percentile bootstrap.

    ``p`` is the level at which the interval would end at zero.

    Args:
        pseudo: above 0, two made-up items that differ by plus and minus so much are resampled along (``difference`` and
            ``n`` are without them). Where few items differ, resamples of these alone know nothing of rarer differences:
            24 items that all came out equal would have the interval 0 to 0. For single samples that are 0 or 1 and
            ``pseudo`` 1 this is Bonett and Price's (2012) remedy; with k samples an item, 1 / k is one sample more won
            and one more lost.

    Raises:
        ValueError: the items differ, or there are fewer than two.
    """
    differences = paired_differences(before, after)
    n = len(differences)
    if n < 2:
        raise ValueError("one item; a paired effect needs two at least")
    mean = float(differences.mean())
    if pseudo:
        differences = np.append(differences, [pseudo, -pseudo])
    units = len(differences)
    means = np.sort(_resampled_means(differences, samples, seed))
    tail = expanded_tail(units)
    low, high = np.quantile(means, [tail, 1 - tail])
    # Means equal to zero count on both sides, and the observed one among the resampled ones.
    below = (1 + np.searchsorted(means, 1e-12, side="right")) / (samples + 1)
    above = (1 + samples - np.searchsorted(means, -1e-12, side="left")) / (samples + 1)
    share = min(below, above, 0.5)
    p = 2 * student_tail(-_NORMAL.inv_cdf(share) / math.sqrt(units / (units - 1)), units - 1)
    return Effect(mean, min(mean, float(low)), max(mean, float(high)), p, n)


def expanded_tail(n: int) -> float:
    """Which quantile of bootstrap resamples of ``n`` >= 2 units is the lower end of a 95 % interval.

    The plain percentile interval (0.025) is too narrow for few units, by sqrt((n - 1) / n) and for want of Student's t;
    the expanded one reads further out (Hesterberg 2015, "What teachers should know about the bootstrap").
    """
    return _NORMAL.cdf(-math.sqrt(n / (n - 1)) * student_quantile(0.975, n - 1))


def paired_differences(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Floats:
    """Of each item, in sorted order, the mean of ``after`` minus the mean of ``before``. Shape (items,).

    Raises:
        ValueError: the items differ, or there are none.
    """
    if before.keys() != after.keys() or not before:
        raise ValueError(f"{len(before)} and {len(after)} items that are not the same; compare equal task sets")
    return np.array([np.mean(after[item]) - np.mean(before[item]) for item in sorted(before)])


def _resampled_means(values: Floats, samples: int, seed: int) -> Floats:
    draws = np.random.default_rng(seed).integers(len(values), size=(samples, len(values)))
    return values[draws].mean(axis=1)


def cluster_weights(clusters: int, samples: int = 2000, seed: int = 0) -> Floats:
    """How often each cluster is drawn in each bootstrap resample of clusters. Shape (samples, clusters).

    A statistic of sums over clusters is resampled by weighting its sums (cluster bootstrap; Field and Welsh 2007).
    """
    generator = np.random.default_rng(seed)
    return generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=samples).astype(np.float64)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979), in the given order.

    Rejecting those at or below a level keeps the chance of one false rejection or more at or below that level.
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = highest
    return corrected


def student_tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's t with ``freedom`` >= 1 degrees (finite series; Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(freedom))
    cosine = math.cos(theta)
    even = freedom % 2 == 0
    term = total = 1.0 if even else cosine
    for k in range(2 if even else 3, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if even:
        inside = math.sin(theta) * total
    else:
        inside = 2 / math.pi * (theta + (math.sin(theta) * total if freedom > 1 else 0.0))
    upper = (1 - inside) / 2
    return max(0.0, upper if t >= 0 else 1 - upper)


def student_quantile(probability: float, freedom: int) -> float:
    """The t with P(T <= t) = ``probability``, for 0.5 <= ``probability`` < 1, by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > 1 - probability else (low, middle)
    return high
