"""Functions of torch that take what a rank holds for the model, refused where that would train another one.

A norm over slices, or over the parameters of one stage, differs from rank to rank, and so does whether a gradient
overflows: ranks that scale or skip by their own number drift apart without a word. The functions take lists of
parameters or gradients, whoever made them, so they are wrapped, once a process, when the first module cuts a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from autopar.errors import AutoparError
from autopar.runtime.state import LocalState

__all__ = ["guard_torch"]

_cut: WeakSet[LocalState] = WeakSet()
"""What ranks hold of the models that they share, of the modules that are alive."""


def guard_torch(state: LocalState) -> None:
    """Refuse, for the parameters of `state` and their gradients, what torch would do by this rank's part of them."""
    _wrap()
    _cut.add(state)


@cache
def _wrap() -> None:
    total = clip_grad._get_total_norm
    unscale = torch.amp.GradScaler._unscale_grads_

    @wraps(total)
    def get_total_norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        _refuse(
            [p.grad for state in _cut for p in state.parameters.values()],
            listed,
            "clip_grad_norm_ of torch sees this rank's slices only",
            "torch.nn.utils",
            "pm.clip_grad_norm_(max_norm, norm_type), the norm of the whole model",
        )
        return total(listed, *args, **kwargs)

    @wraps(unscale)
    def unscale_grads(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        _refuse(
            [p for state in _cut for p in state.parameters.values()],
            [p for group in optimizer.param_groups for p in group["params"]],
            "GradScaler sees overflows of this rank's slices only, and ranks would skip different steps",
            "torch.amp",
            "no scaler: a plan with precision fp16 scales the loss itself, bf16-mixed needs none",
        )
        return unscale(scaler, optimizer, *args)

    for module, name in ((clip_grad, "_get_total_norm"), (clip_grad, "get_total_norm"), (nn.utils, "get_total_norm")):
        setattr(module, name, get_total_norm)
    setattr(torch.amp.GradScaler, "_unscale_grads_", unscale_grads)  # noqa: B010 - it has another signature


def _refuse(held: Iterable[Tensor | None], given: Iterable[Tensor], what: str, where: str, try_: str) -> None:
    """Raise AutoparError if some of what is `given` is `held`."""
    ids = {id(tensor) for tensor in held if tensor is not None}
    if any(id(tensor) in ids for tensor in given):
        raise AutoparError(what, where=where, try_=try_)
