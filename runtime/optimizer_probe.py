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

from autopar.errors import SpecError

__all__ = ["Factory", "made", "name_of", "reads_across", "unable_to_step"]

Factory = Callable[..., torch.optim.Optimizer]
_STEPS, _TOLERANCE = 3, 1e-4
_STRENGTH = (None, "tensors", "parameters")


def reads_across(
    cls: Factory, options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], device: torch.device
) -> str | None:
    """ "tensors" if a slice is not trained as in the whole tensor, "parameters" if one parameter changes what another
    gets, None if neither; the strongest answer over `groups`, the own options of parameter groups.

    Three steps are looked at: what begins to read across later is not seen. Raises SpecError where `cls` makes none.
    """
    found = [_reads_across(cls, options, group, device) for group in groups or ({},)]
    return max(found, key=_STRENGTH.index)


def _reads_across(
    cls: Factory, options: Mapping[str, Any], group: Mapping[str, Any], device: torch.device
) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device)

    weights = [random(8, 6), 3.0 * random(4, 6)]
    gradients = [[random(8, 6), random(4, 6)] for _ in range(_STEPS)]
    for tried in (options, {**options, "lr": 1e-2}):
        whole = _updates(cls, tried, group, weights, gradients)
        if any(update.any() for update in whole):
            break
        group = {name: value for name, value in group.items() if name not in ("lr", "initial_lr")}
        if "lr" not in options:
            return "tensors"  # it changes nothing here; whole tensors are right whatever it does later
    alone = [_updates(cls, tried, group, [w], [[g[i]] for g in gradients])[0] for i, w in enumerate(weights)]
    if not _same(whole, alone):
        return "parameters"
    cut = [_updates(cls, tried, group, weights, gradients, cut=dim) for dim in (0, 1)]
    return None if all(_same(whole, parts) for parts in cut) else "tensors"


def name_of(cls: Factory) -> str:
    return getattr(cls, "__name__", "this optimizer")


def made(cls: Factory, groups: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """What `cls` makes. Raises SpecError where it makes none."""
    name = name_of(cls)
    try:
        optimizer = cls(groups, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise SpecError(
            f"{name} cannot be made: {error}", where="optimizer", try_="other options, or only=[...] of the parameters"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(
            f"{name} gives {type(optimizer).__name__}, no torch.optim.Optimizer",
            where="optimizer",
            try_="a class, or a factory that returns what it makes",
        )
    return optimizer


def unable_to_step(
    cls: Factory, options: Mapping[str, Any], device: torch.device, like: DTensor | None = None
) -> str | None:
    """Why `cls` cannot step dense parameters on `device`, or ones that are sharded as `like` is, in torch's words; None
    if it can."""

    def placed(local: Tensor) -> Tensor:
        if like is None:
            return local
        return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)

    dtype = torch.float32 if like is None else like.dtype
    parameter = nn.Parameter(placed(torch.zeros(2, 3, dtype=dtype, device=device)))
    optimizer = made(cls, [{"params": [parameter]}], options)
    for _ in range(_STEPS):
        parameter.grad = placed(torch.ones(2, 3, dtype=dtype, device=device))
        try:
            _step(optimizer)
        # Sparse gradients wanted, flags of another device; DTensor: ops without a sharding rule, changed placements.
        except (RuntimeError, AssertionError) as error:
            return str(error).strip().split("\n")[0]
    return None


def _updates(
    cls: Factory,
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    cut: int | None = None,
) -> list[Tensor]:
    """What is added to the weights, whole, or cut in two along a dim before and joined after."""
    parts, dim = (1, 0) if cut is None else (2, cut)
    parameters = [[nn.Parameter(piece.clone()) for piece in w.chunk(parts, dim)] for w in weights]
    optimizer = made(cls, [{"params": [p for pieces in parameters for p in pieces], **group}], options)
    for step in gradients:
        for pieces, gradient in zip(parameters, step, strict=True):
            for p, g in zip(pieces, gradient.chunk(parts, dim), strict=True):
                p.grad = g.clone()
        _step(optimizer)
    return [torch.cat([p.detach() for p in pieces], dim) - w for pieces, w in zip(parameters, weights, strict=True)]


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except TypeError:  # it evaluates the loss itself
        optimizer.step(lambda: 0.0)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Equal beside the largest update: a small learning rate hides nothing."""
    largest = max(float(update.abs().max()) for update in one)
    return all(bool(((a - b).abs() <= _TOLERANCE * largest).all()) for a, b in zip(one, other, strict=True))
