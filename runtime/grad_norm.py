"""The global gradient norm, clipping, and the search for gradients that are not finite.

Every element of the model's gradient counts once, however often it is held: of the copies of a parameter (over dp and
cp, over tp if it is not sharded there, on every stage that reads a tied one) only the first counts.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, SpecError
from autopar.runtime.sharding import local_part
from autopar.runtime.state import LocalState
from autopar.runtime.world import World

__all__ = ["GradientNorm"]


class GradientNorm:
    """Norms over the whole model. Every method is collective over all ranks and returns the same on each."""

    def __init__(self, state: LocalState, world: World) -> None:
        self._state, self._world = state, world

    def total(self, norm_type: float = 2.0) -> Tensor:
        """The p-norm of all gradients as one vector, 0-d fp64; p positive or inf. Not finite if any element is not.

        Powers are summed in fp32 at least and in fp64 across tensors: squares of fp16 gradients overflow in fp16.
        """
        norm_type = float(norm_type)  # torch takes "inf"
        if not norm_type > 0:
            raise SpecError(f"must be positive or inf, not {norm_type}", where="norm_type")
        # A rank may hold nothing of a short parameter under ZeRO, and nothing has no largest element.
        counted = [g for name, g in self._gradients().items() if self._state.counts_here(name) and g.numel()]
        highest = math.isinf(norm_type)
        local = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for dtype in sorted({g.dtype for g in counted}, key=str):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            norms = torch._foreach_norm([g for g in counted if g.dtype == dtype], norm_type, dtype=wide)
            stacked = torch.stack(list(norms)).double()
            local = torch.maximum(local, stacked.max()) if highest else local + stacked.pow(norm_type).sum()
        if highest:
            local = local.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may lose a NaN
        if not self._world.alone:
            dist.all_reduce(local, dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM)
        return local if highest else local.pow(1.0 / norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; the norm before, as `total` returns it."""
        norm = self.total(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise AutoparError(f"the gradient norm is {norm.item()}: {self.describe()}", where="clip_grad_norm_")
        self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients of this rank by a 0-d factor."""
        gradients = list(self._gradients().values())
        for dtype in {g.dtype for g in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))

    def describe(self) -> str:
        """Which gradients are not finite, and on which ranks; meant for the rare case that `total` is not."""
        mine = [name for name, g in self._gradients().items() if not bool(torch.isfinite(g).all())]
        everyone: list[list[str]] = [mine]
        if not self._world.alone:
            everyone = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, mine)
        ranks: dict[str, list[int]] = {}
        for rank, names in enumerate(everyone):
            for name in names:
                ranks.setdefault(name, []).append(rank)
        shown = [f"{name} (rank {', '.join(map(str, at))})" for name, at in list(ranks.items())[:3]]
        more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
        return "gradients that are not finite: " + (", ".join(shown) + more if shown else "none, their norm overflows")

    def _gradients(self) -> dict[str, Tensor]:
        return {n: local_part(p.grad) for n, p in self._state.parameters.items() if p.grad is not None}
