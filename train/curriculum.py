"""What an iteration plays, how long, and at which learning rate: pure functions of what a resumed run knows too."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from envs.base import Task

Signal = Mapping[str, Sequence[int]]
"""Per task type: how many of its groups had signal, and how many were played."""


def step_cap(caps: Sequence[int], iteration: int, iterations: int, otherwise: int) -> int:
    """The step cap of iteration 1, 2, …, ``iterations``: ``caps`` one after the other, each for an equal part of them.

    >>> [step_cap([10, 20, 30], i, 6, 50) for i in range(1, 7)]
    [10, 10, 20, 20, 30, 30]
    """
    return caps[(iteration - 1) * len(caps) // iterations] if caps else otherwise


def rate_share(schedule: Literal["linear", "constant"], iteration: int, iterations: int, warmup: int = 0) -> float:
    """Share of the learning rate in iteration 1, 2, …, ``iterations``; the first ``warmup`` of them lead up to it.

    >>> [rate_share("linear", i, 4) for i in range(1, 5)]
    [1.0, 0.75, 0.5, 0.25]
    >>> [rate_share("constant", i, 4, warmup=2) for i in range(1, 5)]
    [0.5, 1.0, 1.0, 1.0]
    """
    rise = min(1.0, iteration / warmup) if warmup else 1.0
    return rise * ((iterations + 1 - iteration) / iterations if schedule == "linear" else 1.0)


def total_signal(counts: Iterable[Signal]) -> dict[str, list[int]]:
    """The sum of the iterations' counts."""
    total: dict[str, list[int]] = {}
    for signal in counts:
        for kind, (loud, played) in signal.items():
            before = total.setdefault(kind, [0, 0])
            total[kind] = [before[0] + loud, before[1] + played]
    return total


def type_weights(types: Iterable[str], signal: Signal) -> dict[str, float]:
    """How often each task type is drawn, summing to 1: by its share of groups with signal, (loud + 1) / (played + 2).

    The pseudo-counts (Laplace's rule of succession) start every type at one half and let none die out.
    """
    rates = {}
    for kind in sorted(set(types)):
        loud, played = signal.get(kind, (0, 0))
        rates[kind] = (loud + 1) / (played + 2)
    whole = sum(rates.values())
    return {kind: rate / whole for kind, rate in rates.items()}


def iteration_tasks(
    tasks: Sequence[Task],
    count: int,
    iteration: int,
    seed: int,
    *,
    first: int,
    prefer_signal: float = 0.0,
    signal: Signal | None = None,
) -> list[Task]:
    """``count`` tasks for iteration 1, 2, …, before which ``first`` tasks were played.

    They are passes over seeded shuffles of ``tasks``, so none recurs before all came; but with the chance
    ``prefer_signal`` a place goes to a random task of a type drawn by :func:`type_weights` of ``signal``, which earlier
    iterations showed. The result depends on the arguments alone, so a resumed run draws the same tasks.
    """
    draw = random.Random(f"{seed}/types/{iteration}")
    weights = type_weights((task.type for task in tasks), signal or {})
    chosen = []
    for place in range(first, first + count):
        if draw.random() < prefer_signal:
            (kind,) = draw.choices(list(weights), list(weights.values()))
            chosen.append(draw.choice([task for task in tasks if task.type == kind]))
            continue
        epoch, index = divmod(place, len(tasks))
        order = random.Random(f"{seed}/tasks/{epoch}").sample(range(len(tasks)), len(tasks))
        chosen.append(tasks[order[index]])
    return chosen
