"""Made-up rows and episodes for a vocabulary of 32, the same for the same generator state."""

from __future__ import annotations

import math
import random

from train.rows import Row
from train.trajectory import Context, Episode, Span, Step

VOCABULARY = 30


def made_up_rows(generator: random.Random, count: int) -> list[Row]:
    rows = []
    for length in [generator.randint(4, 150) for _ in range(count)]:
        ids = [generator.randrange(3, VOCABULARY) for _ in range(length)]
        trained = [i > length // 2 for i in range(length)]
        rows.append(Row(ids, trained, [math.nan] * length, [0] * length))
    return rows


def made_up_groups(generator: random.Random, sizes: list[int]) -> list[list[Episode]]:
    return [[_episode(generator, f"{group}-{i}") for i in range(size)] for group, size in enumerate(sizes)]


def _episode(generator: random.Random, name: str) -> Episode:
    steps, contexts = [], []
    for index in range(generator.randint(1, 4)):
        ids = [generator.randrange(3, VOCABULARY) for _ in range(generator.randint(8, 120))]
        start = len(ids) - generator.randint(2, 6)
        logprobs = [-3.4 + generator.uniform(-0.2, 0.2) for _ in ids[start:]]
        contexts.append(Context(ids=ids, spans=[Span(start=start, end=len(ids), step=index, logprobs=logprobs)]))
        steps.append(Step(index=index, observation="", text="", action="x", reward=generator.random()))
    return Episode(
        id=name, phase="p", env="household", task="t", task_type="pick", seed=0, steps=steps, contexts=contexts
    )
