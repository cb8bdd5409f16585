"""A script for ``torchrun``: warm start and two updates with made-up episodes; writes metrics, adapter and state.

torchrun --nproc_per_node 2 -m tests.integration.learn CONFIG OUT
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tests.made_up import made_up_groups, made_up_rows
from train.config import Config, load_config
from train.grpo import make_batch
from train.learner import Learner
from train.processes import Processes


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
        updates.append(learner.lead("update", batch, config.grpo.learning_rate))
        learner.lead("save_state", out / "state")
    learner.lead("save_adapter", out / "adapter")
    learner.dismiss()
    (out / "figures.json").write_text(json.dumps({"processes": processes.count, "sft": logged, "grpo": updates}))


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1])), Path(sys.argv[2]))
