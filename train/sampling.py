"""From logits to tokens: the distribution that a call samples from, and one draw from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from train.chat import Sampling


def sampling_logprobs(logits: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Log-probabilities that each row samples from, -inf where top-k or top-p cut a token off.

    The order is that of vLLM and Hugging Face: temperature, then top-k, then top-p (nucleus sampling, Holtzman et al.
    2020: the smallest set of likeliest tokens that holds at least ``top_p``), renormalised. Greedy rows
    (temperature 0) get the whole distribution at temperature 1.

    Args:
        logits: shape (rows, vocabulary), any float type; computed with in float32.
        sampling: one per row.

    Returns:
        Shape (rows, vocabulary), float32.
    """
    temperatures = torch.tensor([row.temperature or 1.0 for row in sampling], device=logits.device)
    scaled = logits.float() / temperatures[:, None]
    for row, how in enumerate(sampling):
        if how.temperature == 0:
            continue
        if 0 < how.top_k < scaled.shape[1]:
            kept = scaled[row].topk(how.top_k)
            scaled[row] = torch.full_like(scaled[row], -torch.inf).scatter_(0, kept.indices, kept.values)
        if how.top_p < 1:
            ordered, index = scaled[row].sort(descending=True, stable=True)
            probabilities = ordered.softmax(0)
            before = probabilities.cumsum(0) - probabilities
            scaled[row, index[before >= how.top_p]] = -torch.inf
    return scaled.log_softmax(1)


def draw(logprobs: torch.Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float]) -> torch.Tensor:
    """One token per row, shape (rows,): the likeliest where greedy, else by inversion of the cumulative distribution.

    Args:
        logprobs: shape (rows, vocabulary), as ``sampling_logprobs`` gives them.
        uniforms: one number in [0, 1) per row. One draw takes one number, so rows do not influence each other.
    """
    greedy = [how.temperature == 0 for how in sampling]
    if all(greedy):
        return logprobs.argmax(1)
    cumulative = logprobs.exp().cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    wanted = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device)[:, None] * total
    # Strictly below the total, or the search would run past the last token that has a probability.
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    if not any(greedy):
        return drawn
    return torch.where(torch.tensor(greedy, device=logprobs.device), logprobs.argmax(1), drawn)
