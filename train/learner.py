"""The learning half of a run: warm start and policy optimisation of one set of weights, in one or many processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from train.adapters import load_adapter, new_adapter, save_adapter
from train.config import Config, FineTuneConfig
from train.grpo import Batch, EpisodeGRPOTrainer
from train.load import load_policy, public_name
from train.processes import Processes
from train.rows import Row
from train.sft import Log, train_sft
from train.sharded import trained_state


class Learner:
    """Weights and their optimiser.

    Every public method but ``lead`` and ``follow`` is run by all processes at the same time: rank 0 calls it through
    :meth:`lead`, the others wait for that in :meth:`follow`. Rank 0 may be given the model (it generates with it); the
    others load their own.
    """

    def __init__(self, config: Config, folder: Path, processes: Processes) -> None:
        torch.use_deterministic_algorithms(config.run.deterministic)
        if config.run.deterministic:
            torch.set_num_threads(1)  # with two on busy cores, one run in a dozen differed in its last bits
        self.config = config
        self.folder = folder
        self.processes = processes
        self.model: Any = None
        self.tokenizer: Any = None
        self.on_step: Log = lambda step, metrics: None
        """Called with the metrics of each step of supervised fine-tuning (rank 0 sets it)."""
        self._trainer: EpisodeGRPOTrainer
        self._leading = False

    def lead(self, method: str, *arguments: Any) -> Any:
        """Run ``method`` in all processes; returns what it gives here."""
        self.processes.tell((method, arguments))
        self._leading = True  # stays so after an error: the others may be in a collective call, and hear nothing
        result = getattr(self, method)(*arguments)
        self._leading = False
        return result

    def follow(self) -> None:
        """What every rank but 0 does: run what rank 0 announces until it dismisses them."""
        while (message := self.processes.hear()) is not None:
            method, arguments = message
            getattr(self, method)(*arguments)

    def dismiss(self) -> None:
        """Let the others go; after an error in what all do, leave that to the launcher, which sees this process end."""
        if not self._leading:
            self.processes.tell(None)

    def open(self, adapter: Path | None) -> None:
        """Load base and adapter (None: a fresh one), unless this process has its model already."""
        if self.model is None:
            self.model, self.tokenizer = load_policy(self.config.model)
            if adapter is None:
                self.model = new_adapter(self.model, self.config.lora, self.config.run.seed)
            else:
                self.model = load_adapter(self.model, adapter, trainable=True)

    def fine_tune(self, rows: Sequence[Row], settings: FineTuneConfig) -> dict[str, float]:
        """Supervised fine-tuning on ``rows`` (see :func:`train.sft.train_sft`)."""
        return train_sft(
            self.model,
            self.tokenizer,
            rows,
            settings,
            seed=self.config.run.seed,
            out_dir=self.folder / "sft",
            log=self.on_step,
        )

    def start_optimisation(self, state: Path | None) -> None:
        """Make the GRPO trainer; ``state``: go on from what :meth:`save_state` wrote beside the present adapter."""
        assert self.config.grpo is not None
        self._trainer = EpisodeGRPOTrainer(
            self.model, self.tokenizer, self.config.grpo, out_dir=self.folder / "grpo", seed=self.config.run.seed
        )
        if state is not None:
            self._trainer.restore(state)

    def update(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """One update of the policy (see :meth:`train.grpo.EpisodeGRPOTrainer.update`)."""
        return self._trainer.update(batch, learning_rate)

    def save_state(self, folder: Path) -> None:
        """Write optimiser, random state and counters."""
        self._trainer.save(folder)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as a plain PEFT folder, whole however it is sharded."""
        state = trained_state(self.model)
        if self.processes.rank == 0:
            save_adapter(self.model, folder, public_name(self.config.model.name), state)
