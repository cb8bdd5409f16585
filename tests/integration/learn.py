"""A script for ``torchrun``: warm start and two updates with made-up episodes; writes metrics, adapter and state.

torchrun --nproc_per_node 2 -m tests.integration.learn CONFIG OUT
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

from train.config import Config, load_config
from train.grpo import make_batch
from train.learner import Learner
from train.processes import Processes
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


def main(config: Config, out: Path) -> None:
    processes = Processes()
    learner = Learner(config, out, processes)
    if processes.rank > 0:
        learner.follow()
        return
    generator = random.Random(0)
    assert config.warm_start
    assert config.grpo
    logged: list[dict[str, float]] = []
    learner.on_step = lambda step, metrics: logged.append(metrics)
    learner.lead("open", None)
    learner.lead("fine_tune", made_up_rows(generator, 7), config.warm_start)
    learner.lead("start_optimisation", None)
    updates = []
    for sizes in ([3, 2, 4], [2]):
        batch = make_batch(made_up_groups(generator, sizes), config.grpo, 40)
        updates.append(learner.lead("update", batch))
        learner.lead("save_state", out / "state")
    learner.lead("save_adapter", out / "adapter")
    learner.dismiss()
    (out / "figures.json").write_text(json.dumps({"processes": processes.count, "sft": logged, "grpo": updates}))


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1])), Path(sys.argv[2]))
