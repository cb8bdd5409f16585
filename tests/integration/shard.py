"""A script for ``torchrun``: FSDP2 shards a tiny policy on CPU; what is saved is whole, what is restored equal.

torchrun --nproc_per_node 2 -m tests.integration.shard OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.tiny_policy import tiny_base
from train.adapters import new_adapter, save_adapter
from train.config import LoraConfig
from train.sharded import load_optimiser_state, optimiser_state, trained_state

IDS = torch.tensor([[1, 5, 9, 4, 7, 11, 3, 8]])


def policy() -> Any:
    return new_adapter(tiny_base(), LoraConfig(rank=8, alpha=16), 0)


def sharded() -> Any:
    model = policy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def step(model: Any, optimiser: torch.optim.Optimizer) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    whole_model, parts = policy(), sharded()
    optimisers = optimiser_of(whole_model), optimiser_of(parts)
    for _ in range(2):
        step(whole_model, optimisers[0])
        step(parts, optimisers[1])
    # Saved from shards, restored into new shards, and gone on with.
    state, weights = optimiser_state(optimisers[1]), trained_state(parts)
    again = sharded()
    with torch.no_grad():
        for source, target in zip(parts.parameters(), again.parameters(), strict=True):
            target.copy_(source)
    optimiser = optimiser_of(again)
    load_optimiser_state(optimiser, state)
    step(again, optimiser)
    step(whole_model, optimisers[0])
    gone_on, expected = trained_state(again), trained_state(whole_model)
    if dist.get_rank() == 0:
        save_adapter(parts, out / "adapter", "tiny", weights)
        figures = {
            "sharded": sum(isinstance(p, DTensor) for p in parts.parameters() if p.requires_grad),
            "moments": sum(isinstance(v, DTensor) for s in state["state"].values() for v in s.values()),
            "error": max(float((gone_on[name] - expected[name]).abs().max()) for name in expected),
            "moved": max(float((expected[name] - weights[name]).abs().max()) for name in expected),
        }
        (out / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
