"""GRPO over groups of episodes: TRL's trainer with episode rows instead of prompts and completions.

The trainer lives as long as the run: each :meth:`EpisodeGRPOTrainer.update` takes fresh groups and makes one or more
optimiser steps, and Adam's moments carry over.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from train.advantages import group_advantages, has_signal, penalised_return
from train.config import ConfigError, GrpoConfig
from train.logprobs import batch_tensors, trained_logprobs
from train.progress import Bar, progress
from train.rows import LENGTH_MULTIPLE, Row, pack, padding_share, rows_of
from train.trajectory import Episode

STATE_FILE = "grpo_state.pt"


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
    once per optimiser step by the number of trained tokens in it, so that padding, micro-batches and the number of
    rows per episode change no gradient.

    Args:
        model: PEFT model whose adapter is trained. It is left in eval mode. Dropout is switched off, because the
            ratio pi / pi_old compares two forward passes.
        out_dir: TRL's output folder; nothing is written to it unless asked.
        seed: seeds the global random state (TRL does).
    """

    model: PeftModel
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
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.model.eval()

    def update(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Improve the policy with ``groups`` of episodes of the same task and start; the model is left in eval mode.

        Episodes that a fault ended are left out. A group whose advantages are all zero is dropped and counted.

        Returns:
            ``loss`` (of the last optimiser step), ``grad_norm`` (before clipping, last step), ``clip_fraction`` (share
            of tokens whose clipped branch is active, last step), ``entropy`` (nats per token), ``sampler_kl``
            (mean of log pi_sampler - log pi_old over sampled tokens), ``sampler_max_difference`` (largest absolute
            difference), ``truncated_share`` (tokens whose importance weight is capped), ``base_kl`` (with kl_coef > 0),
            ``rows``, ``tokens`` (without padding), ``trained_tokens``, ``padding_share``, ``groups``,
            ``zero_signal_groups``, ``fault_episodes``, ``optimiser_steps``, ``old_logprob_seconds``,
            ``update_seconds``. Without any signal no step is made and only counts are returned.

        Raises:
            ValueError: a trained token without a sampling log-probability.
        """
        rows, advantages, metrics = self._rows(groups)
        if not rows:
            return metrics | {"optimiser_steps": 0}
        lengths = [len(row) for row in rows]
        batches = pack(lengths, self.settings.tokens_per_micro_batch)
        trained_tokens = sum(row.trained_tokens for row in rows)
        metrics |= {
            "rows": len(rows),
            "tokens": sum(lengths),
            "trained_tokens": trained_tokens,
            "padding_share": padding_share(lengths, batches),
        }
        parts = [self._tensors([rows[i] for i in b], [advantages[i] for i in b], trained_tokens) for b in batches]
        start = time.perf_counter()
        self._reference_passes(parts)
        metrics["old_logprob_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        with progress(len(parts) * self.settings.passes, "update, micro-batches") as bar:
            for _ in range(self.settings.passes):
                step_metrics = self._optimiser_step(parts, bar)
        self.model.eval()
        metrics |= step_metrics | {
            "optimiser_steps": self.settings.passes,
            "update_seconds": time.perf_counter() - start,
        }
        old, sampler = (torch.cat([part[name] for part in parts]) for name in ("old", "sampler"))
        difference = sampler - old
        return metrics | {
            "sampler_kl": float(difference.mean()),
            "sampler_max_difference": float(difference.abs().max()),
            "truncated_share": float((-difference > math.log(self.settings.importance_cap)).float().mean()),
        }

    def save(self, folder: Path) -> None:
        """Write optimiser, random state and counters (not the adapter) so that the next update is bit-equal."""
        folder.mkdir(parents=True, exist_ok=True)
        numpy = np.random.get_state(legacy=False)
        numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].astype(np.int64))  # an array would be a pickle
        state = {
            "updates": self.updates,
            "optimizer": self.optimizer.state_dict(),
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        torch.set_rng_state(state["torch"].cpu())
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
        random.setstate(state["python"])
        state["numpy"]["state"]["key"] = state["numpy"]["state"]["key"].cpu().numpy().astype(np.uint32)
        np.random.set_state(state["numpy"])

    def _rows(self, groups: Sequence[Sequence[Episode]]) -> tuple[list[Row], list[float], dict[str, float]]:
        """Rows of all groups with signal, the advantage of each, and the counts."""
        rows: list[Row] = []
        advantages: list[float] = []
        silent = faults = 0
        for group in groups:
            episodes = [episode for episode in group if episode.status == "ok"]
            faults += len(group) - len(episodes)
            returns = [penalised_return(episode, self.settings.invalid_penalty) for episode in episodes]
            of_group = group_advantages(returns, normalise_std=self.settings.normalise_std)
            if not has_signal(of_group):
                silent += 1
                continue
            for episode, advantage in zip(episodes, of_group, strict=True):
                of_episode = rows_of(episode)
                if any(
                    t and math.isnan(p) for row in of_episode for t, p in zip(row.trained, row.logprobs, strict=True)
                ):
                    raise ValueError(
                        f"episode {episode.id}: trained tokens without sampling log-probabilities; GRPO takes episodes "
                        "that the policy sampled, not demonstrations"
                    )
                rows += of_episode
                advantages += [advantage] * len(of_episode)
        counts = {"groups": len(groups), "zero_signal_groups": silent, "fault_episodes": faults}
        return rows, advantages, {name: float(value) for name, value in counts.items()}

    def _tensors(self, rows: list[Row], advantages: list[float], trained_tokens: int) -> dict[str, Any]:
        """One micro-batch: (rows, width) inputs and (trained tokens,) columns in row-major order."""
        part = batch_tensors(rows, self._tokenizer.pad_token_id)
        counts = torch.tensor([row.trained_tokens for row in rows])
        part["advantages"] = torch.tensor(advantages).repeat_interleave(counts)
        part["sampler"] = torch.tensor([p for row in rows for t, p in zip(row.trained, row.logprobs, strict=True) if t])
        on_device: dict[str, Any] = {name: tensor.to(self.args.device) for name, tensor in part.items()}
        return on_device | {"trained_tokens": trained_tokens}

    def _reference_passes(self, parts: list[dict[str, Any]]) -> None:
        """Add log-probabilities that stay fixed during the update: pi_old and, with a KL term, the base's.

        For a single optimiser step the pi_old pass is left out: the step's own forward pass gives the same numbers.
        """
        self.model.eval()
        with torch.no_grad():
            for part in parts:
                if self.settings.passes > 1:
                    part["old"] = self._logprobs(self.model, part)[0]
                if self.settings.kl_coef:
                    with self.model.disable_adapter():
                        part["base"] = self._logprobs(self.model, part)[0]

    def _logprobs(self, model: Any, part: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            return trained_logprobs(
                model,
                part["input_ids"],
                part["attention_mask"],
                part["trained"],
                temperature=self.settings.temperature,
            )

    def _optimiser_step(self, parts: list[dict[str, Any]], bar: Bar) -> dict[str, float]:
        self._sums = dict.fromkeys(("clip_fraction", "entropy", "base_kl"), 0.0)
        loss = 0.0
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else self.accelerator.no_sync(self.model_wrapped):
                loss += float(self.training_step(self.model_wrapped, part, None))  # type: ignore[no-untyped-call]
            bar.advance()
        grad_norm = self._clip_grad_norm(self.model_wrapped)  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        means = {name: value / parts[0]["trained_tokens"] for name, value in self._sums.items()}
        if not self.settings.kl_coef:
            del means["base_kl"]
        return {"loss": loss, "grad_norm": float(grad_norm)} | means

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs come ready; TRL's method would generate completions."""
        return generation_batch

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This micro-batch's part of the loss: summed over its tokens, divided by those of the whole step."""
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
        return losses.sum() / inputs["trained_tokens"]


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
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
