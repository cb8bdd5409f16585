"""Returns and advantages of episodes: pure functions, one per formula."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from train.trajectory import Episode

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group (the value that TRL uses)."""


def penalised_return(episode: Episode, invalid_penalty: float) -> float:
    """Sum of environment rewards less ``invalid_penalty`` for each invalid (or malformed) action."""
    return episode.episode_return - invalid_penalty * episode.invalid_actions


def group_advantages(returns: Sequence[float], *, normalise_std: bool) -> list[float]:
    """Advantage of each episode of a group: its return less the group's mean, in units of the group's spread.

    A_i = (R_i - mean R) / (std R + 1e-4) with the sample standard deviation, as in GRPO (arXiv 2402.03300);
    ``normalise_std=False`` leaves the division out, as in Dr. GRPO (arXiv 2503.20783). Equal returns give exact zeros
    (the floating-point mean of equal numbers need not equal them, and the division would blow that up).
    """
    if not returns or min(returns) == max(returns):
        return [0.0] * len(returns)
    mean = fmean(returns)
    scale = stdev(returns) + STD_EPSILON if normalise_std else 1.0
    return [(value - mean) / scale for value in returns]


def has_signal(advantages: Sequence[float]) -> bool:
    """Whether any advantage differs from zero; a group without signal moves no weight."""
    return any(advantage != 0.0 for advantage in advantages)
