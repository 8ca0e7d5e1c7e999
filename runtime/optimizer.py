"""Optimizers over what a rank holds: groups by original name, and refusal of what could not be exact."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, SpecError, nearest
from autopar.runtime.optimizer_probe import reads_across, unable_on_shards

__all__ = ["check_patterns", "new_optimizer", "refuse_stale_optimizers"]


def new_optimizer(
    cls: Callable[..., torch.optim.Optimizer],
    parameters: Iterable[tuple[str, nn.Parameter]],
    groups: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    sliced: bool,
    staged: bool,
    device: torch.device,
) -> torch.optim.Optimizer:
    """`cls` over the trainable `parameters`; `groups` maps name patterns (`*.bias`) to a group's own options.

    The first pattern that matches holds. Groups come in the order of `groups`, with what matches none last. A rank
    whose slice of the model has no parameter of a group gets the group empty, so that all ranks have the same groups.
    `sliced`: parameters may be parts of tensors; `staged`: some of them are on other ranks. Raises SpecError for an
    optimizer that could not be exact then, or that cannot step the kind of tensor FSDP makes.
    """
    _refuse_inexact(cls, options, sliced, staged, device)
    trained = [(n, p) for n, p in parameters if p.requires_grad]
    _refuse_on_shards(cls, options, [p for _, p in trained])
    members: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in groups}
    members[None] = []
    for parameter_name, p in trained:
        members[next((g for g in groups if fnmatchcase(parameter_name, g)), None)].append(p)
    listed: list[dict[str, Any]] = []
    for pattern, own in members.items():
        chosen = {} if pattern is None else dict(groups[pattern])
        listed += [{"params": part, **chosen} for part in _by_kind(own)]
    return cls(listed, **options)


def _refuse_inexact(
    cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    sliced: bool,
    staged: bool,
    device: torch.device,
) -> None:
    across = reads_across(cls, options, device) if sliced or staged else None
    name = getattr(cls, "__name__", "this optimizer")
    if across == "tensors" and sliced:
        raise SpecError(
            f"{name} reads whole tensors, and this plan cuts them",
            where="optimizer",
            try_="one that works element by element (AdamW, SGD), or a plan with tp 1 and zero 0",
        )
    if across == "parameters":
        raise SpecError(
            f"{name} reads all parameters together, and ranks hold some of them",
            where="optimizer",
            try_="one that works element by element (AdamW, SGD), or a plan with tp 1, pp 1 and zero 0",
        )


def _refuse_on_shards(
    cls: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], trained: list[nn.Parameter]
) -> None:
    sharded = next((p for p in trained if isinstance(p, DTensor)), None)
    reason = None if sharded is None else unable_on_shards(cls, options, sharded)
    if reason is not None:
        raise SpecError(
            f"{getattr(cls, '__name__', 'this optimizer')} cannot step sharded parameters: {reason}",
            where="optimizer",
            try_="without fused=True, another implementation (foreach=True) or optimizer, or a plan with zero 0",
        )


def check_patterns(groups: Mapping[str, Any], names: list[str]) -> None:
    """Raise SpecError for a pattern that no parameter of the whole model has."""
    for pattern in groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(
                f"no parameter matches {pattern!r}", where="optimizer groups", try_=nearest(pattern, names[:50])
            )


def _by_kind(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Fused and foreach steps of torch take one kind of tensor at a time."""
    is_sharded = [isinstance(p, DTensor) for p in parameters]
    if all(is_sharded) or not any(is_sharded):
        return [parameters]
    return [[p for p, s in zip(parameters, is_sharded, strict=True) if s is kind] for kind in (True, False)]


def refuse_stale_optimizers(model: nn.Module) -> None:
    """Raise AutoparError if an optimizer already holds the parameters of `model`, of which ranks now train copies.

    Its steps would change nothing, without a word.
    """
    ids = {id(p) for p in model.parameters()}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.optim.Optimizer):
            continue
        groups = getattr(candidate, "param_groups", [])
        if any(id(p) in ids for group in groups for p in group["params"]):
            raise AutoparError(
                f"an optimizer ({type(candidate).__name__}) already holds this model's parameters; it would train "
                "nothing, since each rank trains its own slices",
                where="parallelize",
                try_="build it after: pm.optimizer(torch.optim.AdamW, lr=...)",
            )
