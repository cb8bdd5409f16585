"""Tabular Q-learning in formulas: pure functions over numbers (Watkins and Dayan 1992; Sutton and Barto 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal


def q_update(value: float, target: float, alpha: float) -> float:
    """Q <- Q + alpha [target - Q], where target = r + gamma max Q' (see :func:`q_target`)."""
    return value + alpha * (target - value)


def q_target(rewards: Sequence[float], best_next: float | None, gamma: float) -> float:
    """r_0 + gamma r_1 + ... + gamma^n max Q', the n-step target; one reward gives Q-learning's.

    Args:
        rewards: of the step that is updated and those after it, in order.
        best_next: the highest value of the state after the last of them; None: the episode ended there.
    """
    total = 0.0 if best_next is None else best_next
    for reward in reversed(rewards):
        total = reward + gamma * total
    return total


def step_size(kind: Literal["constant", "1/N"], alpha: float, visit: int) -> float:
    """Of the ``visit``-th update (from 1 on) of a value."""
    return alpha if kind == "constant" else 1.0 / visit


def epsilon_at(episode: int, start: float, end: float, over: int) -> float:
    """Chance of exploring in training episode number ``episode`` (from 0): linear from ``start``, ``end`` from ``over``
    on."""
    return start + (end - start) * min(1.0, episode / over)


@dataclass(frozen=True)
class Candidate:
    """A thought that can be chosen. ``visits``: how often its value was updated; ``known``: whether a thought that was
    never tried has its value from other states."""

    text: str
    value: float
    visits: int
    known: bool = False


def untried_value(initial: float, trials: int, led_on: int, visits: int) -> float:
    """Of a thought that was never tried in a state: the initial value times the share of ``trials`` of the same words
    anywhere that ``led_on`` (Laplace's estimate with one trial that did, so that unknown words get all of it), over
    sqrt(1 + ``visits`` of the state / 3): the longer a state is known, the less does what is left in it promise.
    """
    return initial * (led_on + 1) / (trials + 1) / math.sqrt(1 + visits / 3)


def best_tried(candidates: Sequence[Candidate], above: float = -math.inf) -> int | None:
    """The place of the thought to exploit, without exploration; None: nothing to go by.

    Never-tried thoughts only count where other states tell of them: an initial value is no experience. Of equal values
    (to nine decimals) the most tried one is taken, then the first in alphabetical order.

    Args:
        above: only thoughts of a higher value count.
    """
    tried = [
        place
        for place, candidate in enumerate(candidates)
        if (candidate.visits > 0 or candidate.known) and candidate.value > above
    ]

    def rank(place: int) -> tuple[float, int, str]:
        candidate = candidates[place]
        return -round(candidate.value, 9), -candidate.visits, candidate.text

    return min(tried, key=rank, default=None)


def best_in_training(candidates: Sequence[Candidate], bonus: float, random: Random) -> int | None:
    """The place of the thought to exploit in training; None: there is none.

    Never-tried thoughts count with the value that they begin with, and each value gets ``bonus`` / sqrt(visits + 1)
    (MBIE-EB, Strehl and Littman 2008). Equal scores (to nine decimals) go to the least tried, then to chance: a fixed
    order would leave the values of all others as they are for ever.
    """
    if not candidates:
        return None

    def rank(place: int) -> tuple[float, int]:
        candidate = candidates[place]
        score = candidate.value + bonus / math.sqrt(candidate.visits + 1)
        return -round(score, 9), candidate.visits

    lowest = min(map(rank, range(len(candidates))))
    return random.choice([place for place in range(len(candidates)) if rank(place) == lowest])
