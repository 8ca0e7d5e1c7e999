"""What a rank executes: its part of the graph, as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CheckpointedBlock"]


class CheckpointedBlock(nn.Module):
    """Runs a block and keeps only its inputs for backward, which runs the block again.

    The random state is restored for the second run, so dropout drops the same elements; collectives inside the block
    are repeated, by every rank alike.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.block(*args)
        return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=True)
