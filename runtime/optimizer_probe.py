"""Does an optimizer train a slice as it would train the whole tensor? Found out by trying it.

A rank holds slices of tensors (over tp, under ZeRO) and some of the tensors (over pp). An optimizer that works element
by element cannot tell; one that takes norms, means or products of a tensor, or of all of them, trains another model
without a word. The user may pass any factory, so names do not help: a few steps on tiny tensors do, whole against cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["reads_across", "unable_on_shards"]

Factory = Callable[..., torch.optim.Optimizer]
_STEPS, _TOLERANCE = 3, 1e-6


def reads_across(cls: Factory, options: Mapping[str, Any], device: torch.device) -> str | None:
    """ "tensors" if a slice is not trained as in the whole tensor, "parameters" if one parameter changes what another
    gets, None if neither. Raises what the factory raises."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device)

    weights = [random(8, 6), 3.0 * random(4, 6)]
    gradients = [[random(8, 6), random(4, 6)] for _ in range(_STEPS)]
    whole = _trained(cls, options, weights, gradients)
    alone = [_trained(cls, options, [w], [[g[i]] for g in gradients])[0] for i, w in enumerate(weights)]
    if not _same(whole, alone):
        return "parameters"
    cut = [_trained(cls, options, weights, gradients, cut=dim) for dim in (0, 1)]
    return None if all(_same(whole, parts) for parts in cut) else "tensors"


def unable_on_shards(cls: Factory, options: Mapping[str, Any], like: DTensor) -> str | None:
    """Why `cls` cannot step parameters that are sharded as `like` is, in torch's words; None if it can."""
    placed = like.device_mesh, like.placements
    zeros = torch.zeros(2, 3, dtype=like.dtype, device=like.device)
    parameter = nn.Parameter(DTensor.from_local(zeros, *placed, run_check=False))
    optimizer = cls([{"params": [parameter]}], **options)
    for _ in range(_STEPS):
        parameter.grad = DTensor.from_local(torch.ones_like(zeros), *placed, run_check=False)
        try:
            _step(optimizer)
        except RuntimeError as error:  # DTensor: ops without a sharding rule, writes that would change a placement
            return str(error).strip().split("\n")[0]
    return None


def _trained(
    cls: Factory,
    options: Mapping[str, Any],
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    cut: int | None = None,
) -> list[Tensor]:
    """What the weights become, whole, or cut in two along a dim before and joined after."""
    parts, dim = (1, 0) if cut is None else (2, cut)
    parameters = [[nn.Parameter(piece.clone()) for piece in w.chunk(parts, dim)] for w in weights]
    optimizer = cls([{"params": [p for pieces in parameters for p in pieces]}], **options)
    for step in gradients:
        for pieces, gradient in zip(parameters, step, strict=True):
            for p, g in zip(pieces, gradient.chunk(parts, dim), strict=True):
                p.grad = g.clone()
        _step(optimizer)
    return [torch.cat([p.detach() for p in pieces], dim) for pieces in parameters]


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except TypeError:  # it evaluates the loss itself
        optimizer.step(lambda: 0.0)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in zip(one, other, strict=True))
