"""Supervised fine-tuning on episodes with TRL, in optimiser steps of a token budget."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from train.config import ConfigError, FineTuneConfig
from train.logprobs import trained_logprobs
from train.rows import LENGTH_MULTIPLE, Row, padded_length, padded_tokens, shares

IGNORED = -100
WARMUP_SHARE = 0.1
MAX_GRAD_NORM = 1.0

Log = Callable[[int, dict[str, float]], None]


def train_sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    config: FineTuneConfig,
    *,
    seed: int,
    out_dir: Path,
    log: Log,
) -> dict[str, float]:
    """Fine-tune ``model`` (its trainable parameters) on the trained tokens of ``rows``; it comes back in eval mode.

    Each optimiser step takes about ``tokens_per_batch`` padded tokens and minimises the mean negative log-likelihood
    over all their trained tokens, so that the cut into micro-batches and processes changes no gradient. AdamW, cosine
    schedule after a linear warm-up over a tenth of the steps. Seeds the global random state.

    Args:
        log: called with (step from 1 on, metrics: loss in nats per trained token, grad_norm, learning_rate, entropy,
            tokens_per_second) after each optimiser step.

    Returns:
        steps, loss (mean over the last tenth of the steps), first_loss, tokens (without padding), trained_tokens,
        padding_share, seconds, tokens_per_second.

    Raises:
        ConfigError: no row with trained tokens.
    """
    batches = optimiser_batches([len(row) for row in rows], config.epochs, config.tokens_per_batch, seed)
    if not batches:
        raise ConfigError(
            f"{len(rows)} rows with trained tokens to fine-tune on; raise episodes or check that they are won"
        )
    trainer = _RowTrainer(
        model=model,
        args=_arguments(config, len(batches), seed, out_dir),
        train_dataset=_dataset(rows),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    lengths = [len(row) for row in rows]
    plan = [_step_plan(lengths, batch, trainer.accelerator.num_processes, config) for batch in batches]
    trainer.plan(rows, plan, log)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    model.eval()  # type: ignore[no-untyped-call]
    tokens = sum(lengths[i] for batch in batches for i in batch)
    padded = sum(padded_tokens(lengths, [part for part in parts if part]) for step in plan for parts in step)
    last = trainer.losses[-max(1, len(batches) // 10) :]
    return {
        "steps": len(batches),
        "loss": sum(last) / len(last),
        "first_loss": trainer.losses[0],
        "tokens": tokens,
        "trained_tokens": sum(rows[i].trained_tokens for batch in batches for i in batch),
        "padding_share": 1 - tokens / padded,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def optimiser_batches(lengths: Sequence[int], epochs: float, budget: int, seed: int) -> list[list[int]]:
    """Row indices of every optimiser step of the whole training.

    Rows come in a new random order each epoch (of a last, broken epoch only that share), cut where the padded lengths
    would exceed ``budget`` tokens; a row that is longer makes a step of its own.
    """
    generator = random.Random(seed)
    batches: list[list[int]] = []
    remaining = epochs
    while remaining > 0:
        order = generator.sample(range(len(lengths)), k=round(min(1.0, remaining) * len(lengths)))
        remaining -= 1
        filled = budget + 1  # an epoch starts a new batch
        for index in order:
            filled += padded_length(lengths[index])
            if filled > budget:
                batches.append([])
                filled = padded_length(lengths[index])
            batches[-1].append(index)
    return batches


def _step_plan(
    lengths: Sequence[int], batch: Sequence[int], processes: int, config: FineTuneConfig
) -> list[list[list[int]]]:
    """The micro-batches of one optimiser step, per process, as indices of rows."""
    parts = shares([lengths[i] for i in batch], processes, config.tokens_per_micro_batch)
    return [[[batch[i] for i in part] for part in own] for own in parts]


def _dataset(rows: Sequence[Row]) -> Dataset:
    """Pre-tokenised rows as TRL takes them; labels hold the trained tokens only."""
    return Dataset.from_dict(
        {
            "input_ids": [row.ids for row in rows],
            "labels": [
                [token if trained else IGNORED for token, trained in zip(row.ids, row.trained, strict=True)]
                for row in rows
            ],
        }
    )


def _arguments(config: FineTuneConfig, steps: int, seed: int, out_dir: Path) -> SFTConfig:
    return SFTConfig(
        output_dir=str(out_dir),
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(WARMUP_SHARE * steps),
        max_grad_norm=MAX_GRAD_NORM,
        num_train_epochs=1,  # the batches of all epochs are one list
        max_length=None,  # TRL would cut rows at 1,024 tokens
        pad_to_multiple_of=LENGTH_MULTIPLE,
        # The weights have the precision they shall have (base as loaded, LoRA fp32), and sampling sees the same.
        bf16=False,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


class _RowTrainer(SFTTrainer):
    """SFTTrainer whose steps are given lists of rows, cut by tokens into micro-batches and processes."""

    def plan(self, rows: Sequence[Row], steps: list[list[list[list[int]]]], log: Log) -> None:
        """``steps``: of each optimiser step, of each process, of each micro-batch, the row indices."""
        self.rows = rows
        self.steps = steps
        self.on_log = log
        self.losses: list[float] = []
        self._step_start = time.perf_counter()

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process's rows; one that has none is given a row, which its steps do not train."""
        own = [step[self.accelerator.process_index] for step in self.steps]
        batches = [[i for part in parts for i in part] or [0] for parts in own]
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """This process's backward passes of one optimiser step."""
        step = self.steps[self.state.global_step]
        own = step[self.accelerator.process_index]
        members = [i for parts in step for part in parts for i in part]
        self._trained_tokens = sum(self.rows[i].trained_tokens for i in members)
        self._entropy, self._tokens = 0.0, sum(len(self.rows[i]) for i in members)
        loss = torch.zeros((), device=self.args.device)
        place = 0
        for number, part in enumerate(own, start=1):
            places = slice(place, place + len(part)) if part else slice(0, 1)
            place += len(part)
            width = padded_length(max(len(self.rows[i]) for i in part)) if part else LENGTH_MULTIPLE
            micro = {name: tensor[places, :width].to(self.args.device) for name, tensor in inputs.items()}
            if not part:
                micro["labels"] = torch.full_like(micro["labels"], IGNORED)
            last = number == len(own)
            self.accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed steps in the backward pass that syncs
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss += super().training_step(model, micro, num_items_in_batch)  # type: ignore[no-untyped-call]
        sums = self.accelerator.reduce(torch.tensor([self._entropy], device=self.args.device), "sum")
        self._entropy = float(sums) / self._trained_tokens
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Sum of the negative log-likelihoods of these trained tokens over the number of all of the step."""
        trained = inputs["labels"] != IGNORED
        logprobs, entropy = trained_logprobs(model, inputs["input_ids"], inputs["attention_mask"], trained)
        self._entropy += float(entropy.sum())
        # The gradients of several processes are averaged, while the count spans them all.
        return -logprobs.sum() / self._trained_tokens * self.accelerator.num_processes

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" not in logs:  # the Trainer's closing summary
            return
        now = time.perf_counter()
        self.losses.append(logs["loss"])
        metrics = {name: float(logs[name]) for name in ("loss", "grad_norm", "learning_rate")}
        metrics |= {"entropy": self._entropy, "tokens_per_second": self._tokens / (now - self._step_start)}
        self._step_start = now
        self.on_log(self.state.global_step, metrics)
