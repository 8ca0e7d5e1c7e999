"""Whether the ranks that should see one batch do.

A loader that shuffles by a seed of its own on every rank feeds tensor-parallel peers different tokens: every number
looks right, and the model trains on nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import SpecError
from autopar.mesh import AXES
from autopar.runtime.world import World

__all__ = ["BatchAgreement"]

_MODULUS = 2**31 - 1


class BatchAgreement:
    """Looks at batches 1, 2, 4, 8, ...: first batches show what is fed wrongly, and it costs next to nothing later."""

    def __init__(self, world: World) -> None:
        self._world, self._batches = world, 0

    def check(self, batch: Mapping[str, Tensor], *, local: bool) -> None:
        """Raise SpecError, on every rank, if the ranks of one dp position (all ranks, unless they bring their `local`
        rows) were given different tensors. Collective."""
        world = self._world
        self._batches += 1
        if world.alone or self._batches & (self._batches - 1):
            return
        mine = torch.stack([_digest(x) for x in batch.values()]).to(world.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        told = torch.stack(everyone).cpu()
        first: dict[int, int] = {}
        for rank, digests in enumerate(told):
            other = first.setdefault(world.degrees.coordinates(rank)["dp"] if local else 0, rank)
            for name, differs in zip(batch, (digests != told[other]).tolist(), strict=True):
                if differs:
                    self._refuse(name, other, rank, local)

    def _refuse(self, name: str, one: int, other: int, local: bool) -> None:
        peers = [axis for axis in AXES if axis != "dp" and self._world.size(axis) > 1]
        who = f"ranks of one dp position ({', '.join(peers)} peers)" if local else "all ranks"
        raise SpecError(
            f"batch {self._batches}: ranks {one} and {other} were given different {name}, and {who} take the same",
            where="batch",
            try_="the same seed for shuffling and augmentation on these ranks"
            + ("" if local else ", or local=True where each dp rank brings its own rows"),
        )


def _digest(x: Tensor) -> Tensor:
    """0-d int64 of a tensor's size and bits, and their order. 0 for what is no plain tensor, which is refused later."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta or x.is_nested or x.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    flat = x.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    weights = torch.arange(1, bits.numel() + 1, device=x.device) % _MODULUS * 2 + 1
    digest = (bits.to(torch.int64) * weights).sum()
    for size in x.shape:
        digest = digest * _MODULUS + size
    return digest.cpu()
