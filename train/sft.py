"""Supervised fine-tuning on demonstrations with TRL, in optimiser steps of a token budget."""

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

from train.config import ConfigError, WarmStartConfig
from train.logprobs import trained_logprobs
from train.rows import LENGTH_MULTIPLE, Row, pack, padded_length, padded_tokens

IGNORED = -100
WARMUP_SHARE = 0.1
MAX_GRAD_NORM = 1.0

Log = Callable[[int, dict[str, float]], None]


def train_sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    config: WarmStartConfig,
    *,
    seed: int,
    out_dir: Path,
    log: Log,
) -> dict[str, float]:
    """Fine-tune ``model`` (its trainable parameters) on the trained tokens of ``rows``; it comes back in eval mode.

    Each optimiser step takes about ``tokens_per_batch`` padded tokens and minimises the mean negative log-likelihood
    over all their trained tokens, so that the cut into micro-batches changes no gradient. AdamW, cosine schedule after
    a linear warm-up over a tenth of the steps. Seeds the global random state.

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
            f"warm_start: {len(rows)} demonstration rows with trained tokens; raise warm_start.episodes or check that "
            "the expert wins on warm_start.tasks"
        )
    trainer = _RowTrainer(
        model=model,
        args=_arguments(config, len(batches), seed, out_dir),
        train_dataset=_dataset(rows),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.plan(batches, config.tokens_per_micro_batch, log)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    model.eval()  # type: ignore[no-untyped-call]
    lengths = [len(row) for row in rows]
    tokens = sum(lengths[i] for batch in batches for i in batch)
    padded = sum(
        padded_tokens([lengths[i] for i in batch], pack([lengths[i] for i in batch], config.tokens_per_micro_batch))
        for batch in batches
    )
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


def _arguments(config: WarmStartConfig, steps: int, seed: int, out_dir: Path) -> SFTConfig:
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
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


class _RowTrainer(SFTTrainer):
    """SFTTrainer whose steps are given lists of rows, cut into micro-batches by tokens instead of by rows."""

    def plan(self, batches: list[list[int]], tokens_per_micro_batch: int, log: Log) -> None:
        self.batches = batches
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.on_log = log
        self.losses: list[float] = []
        self._step_start = time.perf_counter()

    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator)  # type: ignore[arg-type]
        return self.accelerator.prepare(loader)

    def training_step(self, model: Any, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """One optimiser step's backward passes; ``num_items_in_batch`` counts all its trained tokens."""
        lengths = inputs["attention_mask"].sum(1).tolist()
        micro_batches = pack(lengths, self.tokens_per_micro_batch)
        self._entropy, self._tokens = 0.0, sum(lengths)
        loss = torch.zeros((), device=self.args.device)
        for number, members in enumerate(micro_batches, start=1):
            width = padded_length(max(lengths[i] for i in members))
            part = {name: tensor[members, :width] for name, tensor in inputs.items()}
            with nullcontext() if number == len(micro_batches) else self.accelerator.no_sync(model):
                loss += super().training_step(model, part, num_items_in_batch)  # type: ignore[no-untyped-call]
        self._entropy /= float(num_items_in_batch)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Sum of the negative log-likelihoods of the trained tokens over ``num_items_in_batch``."""
        trained = inputs["labels"] != IGNORED
        logprobs, entropy = trained_logprobs(model, inputs["input_ids"], inputs["attention_mask"], trained)
        self._entropy += float(entropy.sum())
        # The gradients of several processes are averaged, while the count spans them all.
        return -logprobs.sum() / num_items_in_batch * self.accelerator.num_processes

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" not in logs:  # the Trainer's closing summary
            return
        now = time.perf_counter()
        self.losses.append(logs["loss"])
        metrics = {name: float(logs[name]) for name in ("loss", "grad_norm", "learning_rate")}
        metrics |= {"entropy": self._entropy, "tokens_per_second": self._tokens / (now - self._step_start)}
        self._step_start = now
        self.on_log(self.state.global_step, metrics)
