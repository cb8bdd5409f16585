"""Log-probabilities of the trained tokens of a micro-batch, with the language-model head on those positions only.

Most tokens of an agent's row are prompts and observations. A vocabulary of 49k to 152k entries makes the head and its
softmax a large part of a small model's cost, so that scoring them all would be waste of time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from train.rows import Row, padded_length


def batch_tensors(rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
    """Right-padded tensors of shape (rows, width): ``input_ids`` and ``attention_mask`` (int64), ``trained`` (bool).

    The width is a multiple of LENGTH_MULTIPLE. The mask comes from the lengths: the pad token may be an ordinary one.
    """
    width = padded_length(max(map(len, rows)))
    input_ids = torch.full((len(rows), width), pad_id)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    trained = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.tensor(row.ids)
        attention_mask[i, : len(row)] = 1
        trained[i, : len(row)] = torch.tensor(row.trained)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "trained": trained}


def trained_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    trained: Tensor,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each trained token given all before it, and the entropy of the distribution it came from.

    Args:
        model: a causal language model, possibly wrapped (PEFT, DDP); its own forward is used, wrappers included.
        trained: bool, shape (rows, width); position t marks the *token* t, which the logits at t - 1 predict.
        temperature: logits are divided by it, as in sampling.

    Returns:
        Two fp32 tensors of shape (trained tokens,), in row-major order; the entropy (nats) carries no gradient.
    """
    predicting = trained[:, 1:]
    targets = input_ids[:, 1:][predicting]
    with _head_on(_unwrap(model), predicting):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _unwrap(model: nn.Module) -> Any:
    return getattr(model, "module", model)  # of DDP and DeepSpeed


@contextmanager
def _head_on(model: Any, predicting: Tensor) -> Iterator[None]:
    """Feed the head only the hidden states at ``predicting`` (bool, (rows, width - 1)): logits become (N, vocabulary).

    A hook, so that the model's forward runs as it is, with whatever scaling or capping it applies to logits.
    """

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][:, :-1][predicting], *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
