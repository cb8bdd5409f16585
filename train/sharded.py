"""Whole tensors of what FSDP2 or ZeRO-3 spread over the processes. Every process must call these together.

FSDP2's part is tested on CPU; neither has been run on GPUs yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """``tensor`` on CPU, put together from its shards where it has some."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, whole and on CPU."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with _gathered(list(trained.values())):
        return {name: whole(parameter) for name, parameter in trained.items()}


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimiser.state_dict()`` with whole tensors."""
    state: dict[str, Any] = optimiser.state_dict()
    moments = {
        index: {key: whole(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {"state": moments, "param_groups": state["param_groups"]}


def load_optimiser_state(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The reverse of :func:`optimiser_state`: each process keeps its shard of what its parameters are sharded by."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    moments = {
        index: {key: _like(value, parameters[index]) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    optimiser.load_state_dict({"state": moments, "param_groups": state["param_groups"]})


def _like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value  # a step counter is not sharded
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


@contextmanager
def _gathered(parameters: list[Tensor]) -> Iterator[None]:
    """ZeRO-3 keeps parameters away; within the block they are whole."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield
