"""LoRA adapters folded into the base weights while the model generates, and taken out again without a trace.

PEFT's own ``merge`` and ``unmerge`` add and subtract, which drifts. Here both tensors are kept and swapped. A decode
step is a third cheaper without the adapter's 2 x 7 small matrix products a layer (SmolLM2, rank 32, 16 rows, CPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import Linear


class MergedLora:
    """The merged weights of the LoRA layers that are active in ``model`` now, for as long as no weight changes.

    Float32 only: there, merged and unmerged agree to rounding noise. In bfloat16 the policy that samples would no
    longer be the one that is trained and saved; the adapter's products are then computed as in training. Takes as much
    memory again as the adapted weights.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers: list[tuple[Linear, list[str]]] = []
        self._weights: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []
        try:
            for layer in model.modules():
                if not isinstance(layer, Linear) or layer.disable_adapters or layer.merged:
                    continue
                parameters = list(layer.get_base_layer().parameters())
                if any(parameter.dtype != torch.float32 for parameter in parameters):
                    continue
                plain = [parameter.data for parameter in parameters]
                layer.merge(safe_merge=True)  # puts new tensors in place of the old ones
                self._layers.append((layer, list(layer.merged_adapters)))
                self._weights += [(p, data, p.data) for p, data in zip(parameters, plain, strict=True)]
        finally:
            self._take_out()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within: the model computes with the merged weights. After: with base and adapter, bit for bit as before."""
        for parameter, _, merged in self._weights:
            parameter.data = merged
        for layer, adapters in self._layers:
            layer.merged_adapters[:] = adapters
        try:
            yield
        finally:
            self._take_out()

    def _take_out(self) -> None:
        for parameter, plain, _ in self._weights:
            parameter.data = plain
        for layer, _ in self._layers:
            layer.merged_adapters.clear()
