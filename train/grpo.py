"""GRPO and GiGPO over groups of episodes: TRL's trainer with episode rows instead of prompts and completions.

The trainer lives as long as the run: each :meth:`EpisodeGRPOTrainer.update` takes fresh groups and makes one or more
optimiser steps, and Adam's moments carry over. With several processes every one calls ``update`` with the same batch.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from train.advantages import has_signal, token_advantages
from train.config import ConfigError, GrpoConfig
from train.logprobs import batch_tensors, trained_logprobs
from train.progress import Bar, progress
from train.rows import LENGTH_MULTIPLE, Row, padded_tokens, rows_of, shares
from train.sharded import load_optimiser_state, optimiser_state
from train.trajectory import Episode

STATE_FILE = "grpo_state.pt"
DEEPSPEED_FOLDER = "deepspeed"


@dataclass(frozen=True)
class WeightedRow:
    """A row with what the loss needs. ``advantages``: of each trained token. ``scale``: the loss's weight of each."""

    row: Row
    advantages: list[float]
    scale: float


@dataclass(frozen=True)
class Batch:
    """What one update learns from: the rows of each optimiser step of a pass, and what was left out."""

    steps: list[list[WeightedRow]]
    counts: dict[str, float]


def loss_scale(
    aggregation: Literal["token", "episode", "constant"],
    episodes: int,
    episode_tokens: int,
    step_tokens: int,
    constant: int,
) -> float:
    """The weight of a token's loss in an optimiser step over ``episodes`` episodes with ``step_tokens`` trained tokens.

    ``token``: the mean over all tokens of the step (DAPO, arXiv 2503.14476). ``episode``: the mean over episodes of the
    mean over the ``episode_tokens`` of each (GRPO, arXiv 2402.03300). ``constant``: the sum over ``constant`` times the
    number of episodes, which favours no length (Dr.GRPO, arXiv 2503.20783).
    """
    if aggregation == "token":
        return 1 / step_tokens
    return 1 / (episodes * (episode_tokens if aggregation == "episode" else constant))


def make_batch(groups: Sequence[Sequence[Episode]], settings: GrpoConfig, episode_tokens: int) -> Batch:
    """Rows, advantages and loss weights of ``groups`` (episodes of one task and start each).

    Episodes that a fault ended are left out. A group whose advantages are all zero is dropped and counted. Advantages
    and loss weights come before rows: into how many rows an episode falls, and into how many micro-batches or processes
    those, changes no gradient. ``episode_tokens``: most tokens that an episode can generate (aggregation "constant").

    Raises:
        ValueError: a trained token without a sampling log-probability; a damaged trajectory.
    """
    sound = [[episode for episode in group if episode.status == "ok"] for group in groups]
    advantages = [token_advantages(group, settings) for group in sound]
    loud = [(group, values) for group, values in zip(sound, advantages, strict=True) if has_signal(values)]
    size = settings.mini_batch_groups or max(1, len(loud))
    steps = [
        _weighted(
            [pair for group in loud[first : first + size] for pair in zip(*group, strict=True)],
            settings,
            episode_tokens,
        )
        for first in range(0, len(loud), size)
    ]
    counts = {
        "groups": len(groups),
        "zero_signal_groups": len(groups) - len(loud),
        "fault_episodes": sum(map(len, groups)) - sum(map(len, sound)),
    }
    return Batch([step for step in steps if step], {name: float(value) for name, value in counts.items()})


def _weighted(
    episodes: Sequence[tuple[Episode, list[float]]], settings: GrpoConfig, episode_tokens: int
) -> list[WeightedRow]:
    """The rows of one optimiser step, from its episodes with their advantage per step."""
    # An episode may have no token of a trained role, as where no principle was instantiated.
    found = [(pair, rows_of(pair[0], settings.train_roles)) for pair in episodes]
    found = [(pair, rows) for pair, rows in found if any(row.trained_tokens for row in rows)]
    episodes, rows_per_episode = [pair for pair, _ in found], [rows for _, rows in found]
    tokens = [sum(row.trained_tokens for row in rows) for rows in rows_per_episode]
    weighted = []
    for (episode, advantages), rows, count in zip(episodes, rows_per_episode, tokens, strict=True):
        scale = loss_scale(settings.aggregation, len(episodes), count, sum(tokens), episode_tokens)
        for row in rows:
            trained = [t for t, flag in enumerate(row.trained) if flag]
            if any(math.isnan(row.logprobs[t]) for t in trained):
                raise ValueError(
                    f"episode {episode.id}: trained tokens without sampling log-probabilities; GRPO takes episodes "
                    "that the policy sampled, not demonstrations"
                )
            weighted.append(WeightedRow(row, [advantages[row.steps[t]] for t in trained], scale))
    return weighted


def clipped_policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Per-token loss -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old; all shapes (tokens,).

    PPO's clipped surrogate (arXiv 1707.06347) with asymmetric bounds (DAPO, arXiv 2503.14476) and a constant weight w
    for each token.
    """
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weights * torch.minimum(ratio * advantages, clipped * advantages)


def truncated_importance_weights(old: Tensor, sampler: Tensor, cap: float) -> Tensor:
    """min(cap, pi_old / pi_sampler): corrects, with bounded variance, for a sampler whose numerics or weights differ
    from the policy at the start of the update. Shapes (tokens,)."""
    return torch.exp(old - sampler).clamp(max=cap)


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(pi || reference): r - log r - 1 with r = reference / pi (Schulman's k3)."""
    log_ratio = reference - logprobs
    return torch.exp(log_ratio) - log_ratio - 1


class EpisodeGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer, updated with finished episodes.

    Of TRL it keeps the device, precision and process handling, the optimiser and the training step; replaced are
    the inputs (rows with per-token advantages, micro-batches by tokens) and with them the loss, which is normalised
    once per optimiser step (see :func:`loss_scale`), so that padding, micro-batches and the number of rows per episode
    change no gradient.

    Args:
        model: PEFT model whose adapter is trained. It is left in eval mode. Dropout is switched off, because the
            ratio pi / pi_old compares two forward passes.
        out_dir: TRL's output folder; nothing is written to it unless asked.
        seed: seeds the global random state (TRL does).
    """

    model: PeftModel
    model_wrapped: Any
    optimizer: AcceleratedOptimizer

    def __init__(
        self, model: PeftModel, tokenizer: PreTrainedTokenizerBase, config: GrpoConfig, out_dir: Path, seed: int
    ) -> None:
        super().__init__(
            model=model,
            reward_funcs=_returns_come_with_episodes,
            args=_arguments(config, out_dir, seed),
            # TRL wants prompts and a reward function; rows and returns come through ``update``.
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=tokenizer,
        )
        self.settings = config
        self.updates = 0
        """Optimiser steps made so far."""
        self.current_gradient_accumulation_steps = 1  # TRL's training step reads what Trainer.train would set
        self.create_optimizer()
        if self.is_deepspeed_enabled:  # it wants the size of batches that it never makes, and clips by itself
            deepspeed = self.accelerator.state.deepspeed_plugin.deepspeed_config
            deepspeed |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": config.max_grad_norm}
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.model.eval()

    def update(self, batch: Batch, learning_rate: float | None = None) -> dict[str, float]:
        """Improve the policy with ``batch`` (see :func:`make_batch`); the model is left in eval mode.

        Every process gets the whole batch and takes its share of each optimiser step's rows. ``learning_rate``: of its
        optimiser steps; None: as in the settings.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``clip_fraction`` (share of tokens whose clipped branch is
            active) and ``entropy`` (nats per token) of the last optimiser step; over the batch ``sampler_kl`` (mean of
            log pi_sampler - log pi_old), ``sampler_mean_difference`` and ``sampler_max_difference`` (absolute, nats),
            ``truncated_share`` (tokens whose importance weight is capped), ``base_kl`` (with kl_coef > 0); ``rows``,
            ``tokens`` (without padding), ``trained_tokens``, ``padding_share``, ``optimiser_steps``,
            ``old_logprob_seconds``, ``update_seconds``; and the batch's counts. A batch without rows makes no step and
            returns its counts and ``optimiser_steps`` only.
        """
        if not batch.steps:
            return batch.counts | {"optimiser_steps": 0}
        plans = [self._plan(step) for step in batch.steps]
        rows = [row.row for step in batch.steps for row in step]
        tokens, padded = sum(map(len, rows)), sum(plan.padded_tokens for plan in plans)
        metrics = batch.counts | {
            "rows": len(rows),
            "tokens": tokens,
            "trained_tokens": sum(row.trained_tokens for row in rows),
            "padding_share": 1 - tokens / padded,
        }
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate or self.settings.learning_rate
        passes = self.settings.passes
        start = time.perf_counter()
        self._reference_passes(plans)
        metrics["old_logprob_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        with progress(passes * sum(len(plan.parts) for plan in plans), "update, micro-batches") as bar:
            for _ in range(passes):
                for plan in plans:
                    metrics |= self._optimiser_step(plan, bar)
        self.model.eval()
        metrics |= {"optimiser_steps": passes * len(plans), "update_seconds": time.perf_counter() - start}
        return metrics | self._sampler_metrics(plans)

    def _plan(self, step: list[WeightedRow]) -> _Plan:
        """This process's micro-batches of one optimiser step. All processes get equally many."""
        lengths = [len(item.row) for item in step]
        of_ranks = shares(lengths, self.accelerator.num_processes, self.settings.tokens_per_micro_batch)
        shortest = step[lengths.index(min(lengths))].row
        parts = [
            self._tensors([step[i] for i in batch] or [WeightedRow(_silent(shortest), [], 0.0)])
            for batch in of_ranks[self.accelerator.process_index]
        ]
        return _Plan(
            parts=parts,
            trained_tokens=sum(item.row.trained_tokens for item in step),
            padded_tokens=sum(padded_tokens(lengths, [b for b in batches if b]) for batches in of_ranks),
        )

    def _sampler_metrics(self, plans: list[_Plan]) -> dict[str, float]:
        """How the sampler's log-probabilities differ from the trainer's at the start of the update."""
        parts = [part for plan in plans for part in plan.parts]
        difference = torch.cat([part["sampler"] - part["old"] for part in parts])
        capped = (-difference > math.log(self.settings.importance_cap)).sum()
        sums = torch.stack([difference.sum(), difference.abs().sum(), capped.float()])
        count = sum(plan.trained_tokens for plan in plans)
        total, absolute, truncated = (self.accelerator.reduce(sums, "sum") / count).tolist()
        largest = difference.abs().max() if len(difference) else torch.zeros((), device=self.args.device)
        return {
            "sampler_kl": total,
            "sampler_mean_difference": absolute,
            "sampler_max_difference": float(self.accelerator.gather(largest.reshape(1)).max()),
            "truncated_share": truncated,
        }

    def save(self, folder: Path) -> None:
        """Write optimiser, random state and counters (not the adapter) so that the next update is bit-equal.

        Every process must call it; rank 0 writes (under DeepSpeed the engine does, to a folder of its own).
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_deepspeed_enabled:
            self.model_wrapped.save_checkpoint(str(folder / DEEPSPEED_FOLDER), exclude_frozen_parameters=True)
            optimiser: dict[str, Any] = {"state": {}, "param_groups": []}
        else:
            optimiser = optimiser_state(self.optimizer)
        if not self.accelerator.is_main_process:
            return
        numpy = np.random.get_state(legacy=False)
        numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].astype(np.int64))  # an array would be a pickle
        state = {
            "updates": self.updates,
            "optimizer": optimiser,
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
            "python": random.getstate(),
            "numpy": numpy,
        }
        partial = folder / f"{STATE_FILE}.partial"
        torch.save(state, partial)
        partial.replace(folder / STATE_FILE)

    def restore(self, folder: Path) -> None:
        """Go on from :meth:`save`; the model must carry the adapter that was saved at the same time.

        Raises:
            ConfigError: missing or damaged file, or one of another adapter.
        """
        path = folder / STATE_FILE
        try:
            state = torch.load(path, map_location=self.args.device, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"trainer state {path}: cannot be read ({str(error).splitlines()[0]}); resume from an older checkpoint"
            ) from None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = state["optimizer"]["state"]
        if any(i >= len(parameters) or moments[i]["exp_avg"].shape != parameters[i].shape for i in moments):
            raise ConfigError(
                f"trainer state {path}: belongs to another adapter; resume with the run's own lora section"
            )
        if self.is_deepspeed_enabled:
            self.model_wrapped.load_checkpoint(str(folder / DEEPSPEED_FOLDER), load_module_strict=False)
        else:
            load_optimiser_state(self.optimizer, state["optimizer"])
        self.updates = state["updates"]
        torch.set_rng_state(state["torch"].cpu())
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
        random.setstate(state["python"])
        state["numpy"]["state"]["key"] = state["numpy"]["state"]["key"].cpu().numpy().astype(np.uint32)
        np.random.set_state(state["numpy"])

    def _tensors(self, rows: list[WeightedRow]) -> dict[str, Tensor]:
        """One micro-batch: (rows, width) inputs and (trained tokens,) columns in row-major order."""
        part = batch_tensors([item.row for item in rows], self._tokenizer.pad_token_id)
        sampler = [p for item in rows for t, p in zip(item.row.trained, item.row.logprobs, strict=True) if t]
        part["advantages"] = torch.tensor([value for item in rows for value in item.advantages])
        part["scale"] = torch.tensor([item.scale for item in rows for _ in item.advantages])
        part["sampler"] = torch.tensor(sampler)
        return {name: tensor.to(self.args.device) for name, tensor in part.items()}

    def _reference_passes(self, plans: list[_Plan]) -> None:
        """Add log-probabilities that stay fixed during the update: pi_old and, with a KL term, the base's.

        For the first optimiser step the pi_old pass is left out: the step's own forward pass gives the same numbers.
        """
        self.model.eval()
        with torch.no_grad():
            for number, plan in enumerate(plans):
                for part in plan.parts:
                    if number > 0:
                        part["old"] = self._logprobs(self.model_wrapped, part)[0]
                    if self.settings.kl_coef:
                        with self.model.disable_adapter():
                            part["base"] = self._logprobs(self.model_wrapped, part)[0]

    def _logprobs(self, model: Any, part: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            return trained_logprobs(
                model,
                part["input_ids"],
                part["attention_mask"],
                part["trained"],
                temperature=self.settings.temperature,
            )

    def _optimiser_step(self, plan: _Plan, bar: Bar) -> dict[str, float]:
        self._sums = dict.fromkeys(("loss", "clip_fraction", "entropy", "base_kl"), 0.0)
        for number, part in enumerate(plan.parts, start=1):
            last = number == len(plan.parts)
            self.accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed steps in the backward pass that syncs
            with nullcontext() if last else self.accelerator.no_sync(self.model_wrapped):
                self.training_step(self.model_wrapped, part, None)  # type: ignore[no-untyped-call]
            bar.advance()
        grad_norm = self._clip_grad_norm(self.model_wrapped)  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        sums = torch.tensor(list(self._sums.values()), device=self.args.device)
        totals = dict(zip(self._sums, self.accelerator.reduce(sums, "sum").tolist(), strict=True))
        means = {name: totals[name] / plan.trained_tokens for name in ("clip_fraction", "entropy", "base_kl")}
        if not self.settings.kl_coef:
            del means["base_kl"]
        return {"loss": totals["loss"], "grad_norm": float(grad_norm)} | means

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs come ready; TRL's method would generate completions."""
        return generation_batch

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This micro-batch's part of the loss: the sum over its tokens, each by its scale."""
        settings = self.settings
        logprobs, entropy = self._logprobs(model, inputs)
        old = inputs.setdefault("old", logprobs.detach())
        advantages = inputs["advantages"]
        losses = clipped_policy_loss(
            logprobs,
            old,
            advantages,
            truncated_importance_weights(old, inputs["sampler"], settings.importance_cap),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        if settings.kl_coef:
            base_kl = kl_estimate(logprobs, inputs["base"])
            losses = losses + settings.kl_coef * base_kl
            self._sums["base_kl"] += float(base_kl.detach().sum())
        ratio = torch.exp(logprobs.detach() - old)
        clipped = torch.where(advantages > 0, ratio > 1 + settings.clip_high, ratio < 1 - settings.clip_low)
        self._sums["clip_fraction"] += float((clipped & (advantages != 0)).sum())
        self._sums["entropy"] += float(entropy.sum())
        loss = (losses * inputs["scale"]).sum()
        self._sums["loss"] += float(loss.detach())
        return loss * self.accelerator.num_processes  # whose gradients are averaged


@dataclass(frozen=True)
class _Plan:
    """One optimiser step: this process's micro-batches, and tokens over all processes."""

    parts: list[dict[str, Tensor]]
    trained_tokens: int
    padded_tokens: int


def _silent(row: Row) -> Row:
    """``row`` without trained tokens, for a process that has nothing to do but must take part."""
    return Row(row.ids, [False] * len(row), row.logprobs, row.steps)


def _returns_come_with_episodes(**_: Any) -> list[float | None]:
    raise RuntimeError("EpisodeGRPOTrainer generates nothing: call update with finished episodes")


def _arguments(config: GrpoConfig, out_dir: Path, seed: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(out_dir),
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=config.learning_rate,
        max_grad_norm=config.max_grad_norm,
        temperature=config.temperature,
        # Sizes of TRL's own batches, which are never made; they only have to fit each other.
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        beta=0.0,  # ours is the KL to the base; TRL would copy the adapter as the reference
        disable_dropout=True,
        pad_to_multiple_of=LENGTH_MULTIPLE,
        # The weights have the precision they shall have (base as loaded, LoRA fp32), and sampling sees the same.
        bf16=False,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
