"""The processes of one job (``torchrun``, ``accelerate launch``): rank 0 leads, the others do what it announces."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

_PATIENCE = timedelta(days=7)
"""Other ranks wait through whole rollout phases; a launcher ends them when rank 0 dies."""


class Processes:
    """Rank and number of the job's processes, and a channel from rank 0 to the others (on CPU, apart from NCCL)."""

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            state = PartialState(cpu=not torch.cuda.is_available(), timeout=_PATIENCE)
            self.rank, self.count = state.process_index, state.num_processes
            self._channel = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def tell(self, message: Any) -> None:
        """Send ``message`` from rank 0 to all others."""
        if self.count > 1:
            dist.broadcast_object_list([message], src=0, group=self._channel)

    def hear(self) -> Any:
        """The next message of rank 0."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._channel)
        return received[0]
