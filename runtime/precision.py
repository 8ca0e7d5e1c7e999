"""Mixed precision: 16-bit copies compute, the parameters that are trained and their gradients stay in fp32.

The copies are what the graph reads. When autograd has the gradient of a copy, it is added to the master's in fp32, so
that micro-batches accumulate in fp32, and the copy's is dropped. Before a step the copies follow their masters.

fp16 has few exponents: its losses are scaled up before backward and the gradients scaled down after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.plan import Plan

__all__ = ["ComputeCopies", "LossScale", "compute_dtype", "in_dtype"]


def compute_dtype(plan: Plan, own: torch.dtype) -> torch.dtype:
    """What parameters of dtype `own` compute in: 16 bits if they are fp32 and the plan's precision says so."""
    if own != torch.float32:
        return own
    return {"bf16-mixed": torch.bfloat16, "fp16": torch.float16}.get(plan.precision, own)


def in_dtype(leaf: Any, dtype: torch.dtype) -> Any:
    """`leaf` in the floating `dtype`, complex numbers in its complex counterpart: nn.Module.to would drop their
    imaginary part. Anything else is returned as it is."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return leaf.to(dtype.to_complex() if leaf.is_complex() else dtype)


class ComputeCopies:
    """16-bit copies of those `masters` that the plan computes in 16 bits; `of`: what computes for each name.

    Each of `on_gradient` is called with a master when its gradient has grown by that of one backward pass.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], plan: Plan) -> None:
        self.of: dict[str, nn.Parameter] = {}
        self.on_gradient: list[Callable[[nn.Parameter], None]] = []
        self._masters: list[Tensor] = []
        self._copies: list[Tensor] = []
        for name, master in masters.items():
            dtype = compute_dtype(plan, master.dtype)
            self.of[name] = master if dtype == master.dtype else self._new_copy(master, dtype)

    def _new_copy(self, master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
        self._masters.append(master)
        self._copies.append(copy)
        if master.requires_grad:
            copy.register_post_accumulate_grad_hook(lambda p, master=master: self._hand_over(p, master))
        return copy

    def _hand_over(self, copy: Tensor, master: nn.Parameter) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad.add_(copy.grad)
        copy.grad = None
        for told in self.on_gradient:
            told(master)

    def follow(self) -> None:
        """Take over the masters' values, and whether they learn. Always: fused optimizers, and writes through `.data`,
        leave no trace."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._masters)
            for copy, master in zip(self._copies, self._masters, strict=True):
                copy.requires_grad_(master.requires_grad)


class LossScale:
    """The factor of fp16 losses: halved by a step whose gradients overflow, doubled after `patience` that did not.

    The same on every rank as long as every rank is told the same.
    """

    def __init__(self, device: torch.device, initial: float = 2.0**16, patience: int = 2000) -> None:
        self.value = torch.tensor(initial, dtype=torch.float32, device=device)
        self._patience, self._good = patience, 0

    def update(self, finite: bool) -> None:
        """Say how a step went."""
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value = self.value * 0.5
        elif self._good == self._patience:
            self.value, self._good = self.value * 2.0, 0
