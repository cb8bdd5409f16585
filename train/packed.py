"""Packed attention: the new tokens of many conversations in one row, each attending to its own cached past.

A forward pass gets the new tokens of all conversations one after another, shape (1, tokens): a prompt's delta here, one
decoded token there. No padding and no mask for the linear layers; attention runs per conversation over exactly its own
keys. (The layout of FlashAttention's variable-length kernels and of vLLM's continuous batching, Kwon et al. 2023, with
one contiguous cache region per conversation in place of pages.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel

ATTENTION = "saga_packed"


@dataclass(frozen=True)
class Segment:
    """New tokens ``first:last`` of the packed row; their conversation's keys lie at ``start:end`` of the cache.

    The new tokens are the last ones of that range. ``mask``: which keys each new token may see, shape (new, keys),
    bool; None when all (one new token) or when there is no past (plain causal attention).
    """

    first: int
    last: int
    start: int
    end: int
    mask: torch.Tensor | None


def make_segment(first: int, new: int, start: int, past: int, device: torch.device) -> Segment:
    """The segment of ``new`` tokens at ``first`` that follow ``past`` cached ones of the region at ``start``."""
    mask = None
    if new > 1 and past > 0:
        mask = torch.ones(new, past + new, dtype=torch.bool, device=device).tril_(past)
    return Segment(first, first + new, start, start + past + new, mask)


class PackedCache(Cache):
    """Keys and values of all regions, per layer of shape (1, key-value heads, regions x region length, head size).

    Allocated at the first forward pass, in the type and on the device of the keys. On CPU the memory of a region that
    is never reached is never touched.
    """

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length
        self.positions = torch.empty(0, dtype=torch.long)
        """Where the new tokens of the next forward pass go, shape (tokens,)."""
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' keys and values, shape (1, heads, tokens, head size); give those of all regions."""
        if layer_idx == len(self._keys):
            for store, new in ((self._keys, key_states), (self._values, value_states)):
                store.append(new.new_empty(1, new.shape[1], self.length, new.shape[3]))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(2, self.positions, key_states)
        values.index_copy_(2, self.positions, value_states)
        return keys, values

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy ``count`` positions from ``source`` on to ``target`` on (the ranges must not overlap)."""
        for store in (*self._keys, *self._values):
            store[:, :, target : target + count] = store[:, :, source : source + count]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Sequence[Segment],
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the form of transformers' AttentionInterface.

    Query heads that share a key-value head are folded into the query length, so that keys and values are read where
    they lie instead of being expanded per query head.

    Args:
        query: shape (1, heads, tokens, head size).
        key, value: the whole cache of the layer, as ``PackedCache.update`` gives it.

    Returns:
        Shape (1, tokens, heads, head size), and None for the weights.
    """
    heads, size = query.shape[1], query.shape[3]
    shared = key.shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention
    outputs = []
    for segment in segments:
        new = segment.last - segment.first
        queries = query[:, :, segment.first : segment.last]
        keys = key[:, :, segment.start : segment.end]
        values = value[:, :, segment.start : segment.end]
        if new > 1 and segment.mask is None:
            output = attend(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=heads != shared)
        else:
            groups = heads // shared
            mask = None if segment.mask is None else segment.mask.repeat(groups, 1)
            folded = queries.reshape(1, shared, groups * new, size)
            output = attend(folded, keys, values, attn_mask=mask, scale=scaling).reshape(1, heads, new, size)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(ATTENTION, packed_attention)


@contextmanager
def packed_mode(model: PreTrainedModel) -> Iterator[None]:
    """Within: ``model`` evaluates with packed attention. After: its own attention and training flag, as before."""
    attention, training = model.config._attn_implementation, model.training
    if training:
        model.eval()  # type: ignore[no-untyped-call]
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        if training:
            model.train()
