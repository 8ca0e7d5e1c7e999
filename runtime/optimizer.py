"""Optimizers over what a rank holds: groups by original name, stand-ins where they need them, and refusal of what could
not be exact."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError, SpecError, nearest
from autopar.runtime.optimizer_probe import Factory, made, name_of, reads_across, unable_to_step
from autopar.runtime.stand_ins import LocalTensors, StandIns, WholeTensors
from autopar.runtime.state import LocalState
from autopar.runtime.world import World

__all__ = ["OptimizerGuard", "check_patterns", "new_optimizer", "refuse_stale_optimizers"]


class NewOptimizer(NamedTuple):
    """An optimizer, and what is to be said about it."""

    optimizer: torch.optim.Optimizer
    notices: list[str]


def new_optimizer(
    cls: Factory,
    state: LocalState,
    world: World,
    groups: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    only: Collection[str] | None = None,
) -> NewOptimizer:
    """`cls` over the trainable parameters of `state`, of those that a pattern of `only` matches if it is given.

    `groups` maps name patterns (`*.bias`) to a group's own options. The first pattern that matches holds. Groups come
    in the order of `groups`, with what matches none last. A rank whose slice of the model has no parameter of a group
    gets the group empty, so that all ranks have the same groups. One that cannot step what ranks hold of the parameters
    gets stand-ins. Raises SpecError for an optimizer that reads all parameters together, where ranks hold some of them.
    Collective.
    """
    wanted = ("*",) if only is None else tuple(only)
    if not wanted:
        raise SpecError(
            "only=[] leaves it nothing to train", where="pm.optimizer", try_="names, patterns, or no `only`"
        )
    trained = {n: p for n, p in state.named_parameters() if p.requires_grad and any(fnmatchcase(n, w) for w in wanted)}
    stand_ins = _stand_ins(cls, options, list(groups.values()), state, world, trained)
    members: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in groups}
    members[None] = []
    for name, parameter in trained.items():
        stepped = parameter if stand_ins is None else stand_ins.of(name)
        if stepped is not None:
            members[next((g for g in groups if fnmatchcase(name, g)), None)].append(stepped)
    listed = [{"params": own, **({} if g is None else groups[g])} for g, own in members.items()]
    optimizer = made(cls, listed, options)
    given = {id(p) for own in members.values() for p in own}
    if any(id(p) not in given for group in optimizer.param_groups for p in group["params"]):
        raise SpecError(
            f"{name_of(cls)} holds other parameters than it was given, which nothing trains",
            where="optimizer",
            try_="a factory that passes its first argument on",
        )
    if stand_ins is not None:
        stand_ins.attach(optimizer)
    return NewOptimizer(optimizer, [] if stand_ins is None else [f"{name_of(cls)} {stand_ins.reason}"])


def _stand_ins(
    cls: Factory,
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    state: LocalState,
    world: World,
    trained: Mapping[str, nn.Parameter],
) -> StandIns | None:
    """What `cls` is to step in place of parameters that it cannot step as they lie; None if it can."""
    reason = None if world.alone else unable_to_step(cls, options, world.device)
    if reason is not None:
        raise SpecError(
            f"{name_of(cls)} cannot step what a rank holds: {reason}",
            where="optimizer",
            try_="other options of it, or AdamW or SGD",
        )
    cut = state.cuts_tensors
    parted = cut or world.size("pp") > 1
    across = reads_across(cls, options, [*groups, {}], world.device) if parted else None
    if across == "parameters":
        raise SpecError(
            f"{name_of(cls)} reads all parameters together, and ranks hold some of them",
            where="optimizer",
            try_="one that works tensor by tensor (AdamW, SGD, Adafactor), or a plan with tp 1, pp 1 and zero 0",
        )
    if across == "tensors" and cut:
        return WholeTensors(state, world, list(trained))
    shard = next((p for p in trained.values() if isinstance(p, DTensor)), None)
    if shard is None:
        return None
    if not all(isinstance(p, DTensor) for p in trained.values()):
        return LocalTensors(state, list(trained), "fused and foreach steps take one kind of tensor at a time")
    reason = unable_to_step(cls, options, world.device, like=shard)
    return None if reason is None else LocalTensors(state, list(trained), reason)


class OptimizerGuard:
    """Looks at optimizers that users make by hand over the parameters of a rank, at their first step.

    pm.optimizer gives what could not step slices something else to step; by hand, it would train another model without
    a word.
    """

    def __init__(self, state: LocalState, world: World, model: nn.Module) -> None:
        self._passed: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # with so many groups
        self._device = world.device
        self._cut, self._is_part = state.cuts_tensors, state.is_part
        self._held = {id(p) for p in state.parameters.values()}
        self._copied = {id(p): ref(p) for p in model.parameters()}
        self._handle = None if world.alone else register_optimizer_step_pre_hook(partial(_look, ref(self)))

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def allow(self, optimizer: torch.optim.Optimizer) -> None:
        self._passed[optimizer] = len(optimizer.param_groups)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise SpecError for one that has to come from pm.optimizer."""
        if self._passed.get(optimizer) == len(optimizer.param_groups):
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if self._is_part and any(id(p) in self._held for p in stepped):
            self._check(optimizer)
        self._refuse_users_own(optimizer, stepped)
        self.allow(optimizer)

    def _refuse_users_own(self, optimizer: torch.optim.Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        copied = [p for p in stepped if id(p) in self._copied and self._copied[id(p)]() is p]
        if copied and all(p.grad is None for p in copied):
            raise AutoparError(
                f"this {type(optimizer).__name__} holds the parameters of the model that was given to parallelize; it "
                "trains nothing, since each rank trains its own copies or slices",
                where="optimizer.step",
                try_=f"pm.optimizer({type(optimizer).__name__}, ...), or pm.parameters()",
            )

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        cls = type(optimizer)
        taken = inspect.signature(cls).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in taken}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        try:
            across = reads_across(cls, options, groups, self._device)
        except SpecError as error:
            raise SpecError(
                f"whether {cls.__name__} can step parts of a model cannot be tried: {error.what}",
                where="optimizer.step",
                try_="pm.optimizer(factory), where factory(groups) makes it",
            ) from error
        if across == "parameters" or (across == "tensors" and self._cut):
            raise SpecError(
                f"{cls.__name__} reads more than single elements, and this rank holds parts",
                where="optimizer.step",
                try_=f"pm.optimizer({cls.__name__}, ...), which gives it whole tensors where it can",
            )


def _look(guard: ref[OptimizerGuard], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The hook, which keeps no module alive."""
    alive = guard()
    if alive is not None:
        alive.look(optimizer)


def check_patterns(patterns: Iterable[str], names: list[str]) -> None:
    """Raise SpecError for a pattern that no parameter of the whole model has."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SpecError(
                f"{pattern!r} is no pattern of names",
                where="pm.optimizer",
                try_='groups={"*.bias": {"weight_decay": 0.0}}: options by pattern, not torch\'s list of groups',
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(
                f"no parameter matches {pattern!r}", where="pm.optimizer", try_=nearest(pattern, names[:50])
            )


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
