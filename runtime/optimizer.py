"""Optimizers over what a rank holds: groups by original name, stand-ins where they
need them, and refusal of what could not be exact."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, SpecError, nearest
from autopar.runtime.optimizer_probe import reads_across, unable_on_shards
from autopar.runtime.stand_ins import LocalTensors, StandIns, WholeTensors
from autopar.runtime.state import LocalState
from autopar.runtime.world import World

__all__ = ["check_patterns", "new_optimizer", "refuse_stale_optimizers"]


def new_optimizer(
    cls: Callable[..., torch.optim.Optimizer],
    state: LocalState,
    world: World,
    groups: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    only: Collection[str] | None = None,
) -> torch.optim.Optimizer:
    """`cls` over the trainable parameters of `state`, of those that a pattern of `only` matches if there are any.

    `groups` maps name patterns (`*.bias`) to a group's own options. The first pattern that matches holds. Groups come
    in the order of `groups`, with what matches none last. A rank whose slice of the model has no parameter of a group
    gets the group empty, so that all ranks have the same groups. One that cannot step what ranks hold of the parameters
    gets stand-ins. Raises SpecError for an optimizer that reads all parameters together, where ranks hold some of them.
    """
    wanted = ("*",) if only is None else tuple(only)
    trained = {n: p for n, p in state.named_parameters() if p.requires_grad and any(fnmatchcase(n, w) for w in wanted)}
    stand_ins = _stand_ins(cls, options, state, world, trained)
    members: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in groups}
    members[None] = []
    for name, parameter in trained.items():
        stepped = parameter if stand_ins is None else stand_ins.of(name)
        if stepped is not None:
            members[next((g for g in groups if fnmatchcase(name, g)), None)].append(stepped)
    listed: list[dict[str, Any]] = []
    for pattern, own in members.items():
        chosen = {} if pattern is None else dict(groups[pattern])
        listed += [{"params": part, **chosen} for part in _by_kind(own)]
    optimizer = cls(listed, **options)
    if stand_ins is not None:
        stand_ins.attach(optimizer)
    return optimizer


def _stand_ins(
    cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    state: LocalState,
    world: World,
    trained: Mapping[str, nn.Parameter],
) -> StandIns | None:
    """What `cls` is to step in place of parameters that it cannot step as they lie; None if it can."""
    cut = world.size("tp") > 1 or state.sharded
    across = reads_across(cls, options, world.device) if cut or world.size("pp") > 1 else None
    if across == "parameters":
        raise SpecError(
            f"{getattr(cls, '__name__', 'this optimizer')} reads all parameters together, and ranks hold some of them",
            where="optimizer",
            try_="one that works tensor by tensor (AdamW, SGD, Adafactor), or a plan with tp 1, pp 1 and zero 0",
        )
    if across == "tensors" and cut:
        return WholeTensors(state, world, list(trained))
    shard = next((p for p in trained.values() if isinstance(p, DTensor)), None)
    if shard is not None and unable_on_shards(cls, options, shard):
        return LocalTensors(state, list(trained))
    return None


def check_patterns(patterns: Iterable[str], names: list[str]) -> None:
    """Raise SpecError for a pattern that no parameter of the whole model has."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(
                f"no parameter matches {pattern!r}", where="pm.optimizer", try_=nearest(pattern, names[:50])
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
