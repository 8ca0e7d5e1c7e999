"""What an optimizer steps in place of parameters that it could not step as this rank holds them.

Adafactor, Muon, LARS and many of a user's own read a tensor as a whole, while a rank holds a slice of it (tp, ZeRO).
Then every cut tensor is stepped by one of the ranks that hold its slices: before a step, gradient and value are
gathered there; after it, the new value is scattered. State stays on that rank, so it is divided over the ranks as
before, by whole tensors instead of slices. The idea is that of distributed Shampoo (Shi et al. 2023, arXiv:2309.06497).

An optimizer that works element by element but calls an op that DTensor cannot run (Rprop, fused SGD) steps the plain
tensors inside them: no communication.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import SpecError
from autopar.ir import ParameterShard
from autopar.placement import Placement, Shard
from autopar.runtime.sharding import filled_up, join_shards, local_part, local_shape, split_shards
from autopar.runtime.state import LocalState
from autopar.runtime.world import World

__all__ = ["LocalTensors", "StandIns", "WholeTensors"]


class StandIns(ABC):
    """Parameters for an optimizer, made from those of `state`. `attach` it to the optimizer that was given them."""

    @abstractmethod
    def of(self, name: str) -> nn.Parameter | None:
        """What this rank's optimizer gets for a parameter; None if another rank steps it."""

    @abstractmethod
    def fill(self) -> None:
        """Value and gradient of every stand-in, before a step. Collective."""

    @abstractmethod
    def hand_back(self) -> None:
        """The values after a step, where they belong. Collective."""

    @abstractmethod
    def originals(self) -> Sequence[nn.Parameter]:
        """The parameters stood in for, which `zero_grad` is to reach."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Surround the steps of `optimizer`, and let its `zero_grad` reach the parameters themselves."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(lambda *_: self.hand_back())
        optimizer.zero_grad = partial(self._zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(closure) for closure in (*args[1:], *kwargs.values())):
            raise SpecError(
                f"{type(optimizer).__name__} gets its gradients before its step here, so a closure is too late",
                where="optimizer.step",
                try_="pm.step(batch) first, then optimizer.step() without a closure",
            )
        self.fill()

    def _zero_grad(self, own: Any, set_to_none: bool = True) -> None:
        own(set_to_none=set_to_none)
        for parameter in self.originals():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()


class LocalTensors(StandIns):
    """The plain tensors inside of DTensors, sharing their storage."""

    def __init__(self, state: LocalState, names: Sequence[str]) -> None:
        self._parameters = {n: state.parameters[n] for n in names if isinstance(state.parameters[n], DTensor)}
        self._plain = {n: nn.Parameter(local_part(p.detach())) for n, p in self._parameters.items()}
        self._others = {n: state.parameters[n] for n in names if n not in self._parameters}

    def of(self, name: str) -> nn.Parameter | None:
        return self._plain.get(name, self._others.get(name))

    def fill(self) -> None:
        for name, parameter in self._parameters.items():
            plain = self._plain[name]
            plain.data = local_part(parameter.detach())
            plain.grad = None if parameter.grad is None else local_part(parameter.grad)

    def hand_back(self) -> None:
        for plain in self._plain.values():
            plain.grad = None

    def originals(self) -> Sequence[nn.Parameter]:
        return list(self._parameters.values())


@dataclass(frozen=True)
class _Cut:
    """One way a tensor of `shape` is cut over the ranks of `group`, and which of them is to have it whole."""

    group: dist.ProcessGroup
    placement: Placement
    shape: tuple[int, ...]
    owner: int

    @property
    def here(self) -> bool:
        return self.group.rank() == self.owner

    def collect(self, piece: Tensor) -> Tensor | None:
        """The whole tensor on the owner, None elsewhere. Collective."""
        n = self.group.size()
        padded = piece.new_zeros(local_shape(self.shape, self.placement, n))
        padded[tuple(slice(size) for size in piece.shape)] = piece
        pieces = [torch.empty_like(padded) for _ in range(n)] if self.here else None
        dist.gather(padded, pieces, group=self.group, group_dst=self.owner)
        if pieces is None:
            return None
        dim = self.placement.dim
        return join_shards(torch.stack(pieces), self.placement).narrow(dim, 0, self.shape[dim])

    def spread(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """This rank's piece of what the owner has, filled up at the end of the dim. Collective."""
        n = self.group.size()
        piece = like.new_empty(local_shape(self.shape, self.placement, n))
        pieces = None
        if whole is not None:
            pieces = list(split_shards(filled_up(whole, self.placement, n), self.placement, n))
        dist.scatter(piece, pieces, group=self.group, group_src=self.owner)
        return piece


class _Whole:
    """A cut parameter; `tensor` is the stand-in where this rank steps it. `cuts`: the finest first.

    Between steps the stand-in holds no values: those of the parameter are the ones that count, whoever writes them.
    """

    def __init__(self, parameter: nn.Parameter, shard: ParameterShard, cuts: tuple[_Cut, ...]) -> None:
        self.parameter, self._cuts = parameter, cuts
        self.tensor: nn.Parameter | None = None
        if all(cut.here for cut in cuts):
            local = local_part(parameter.detach())
            self.tensor = nn.Parameter(torch.empty(shard.shape, dtype=local.dtype, device=local.device))

    def fill(self, has_gradient: bool) -> None:
        local = local_part(self.parameter.detach())
        value = self._collect(local)
        gradient = None
        if has_gradient:
            own = self.parameter.grad
            gradient = self._collect(torch.zeros_like(local) if own is None else local_part(own))
        if self.tensor is not None:
            assert value is not None
            self.tensor.data = value.contiguous()
            self.tensor.grad = None if gradient is None else gradient.contiguous()

    @torch.no_grad()
    def hand_back(self) -> None:
        value = None if self.tensor is None else self.tensor.detach()
        local = local_part(self.parameter.detach())
        for i in reversed(range(len(self._cuts))):
            if all(finer.here for finer in self._cuts[:i]):
                value = self._cuts[i].spread(value, local)
        assert value is not None
        local.copy_(value[tuple(slice(size) for size in local.shape)])
        self.release()

    def release(self) -> None:
        """Give up the values, not the identity, under which the optimizer keeps state."""
        if self.tensor is not None:
            self.tensor.grad = None
            self.tensor.data = self.tensor.data.new_empty(0)

    def _collect(self, piece: Tensor) -> Tensor | None:
        value: Tensor | None = piece
        for cut in self._cuts:
            if value is not None:
                value = cut.collect(value)
        return value


class WholeTensors(StandIns):
    """Whole tensors in place of cut ones, each on one of the ranks that hold its slices; others as they are."""

    def __init__(self, state: LocalState, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._device = world.device
        self._data: dist.ProcessGroup | None = None
        self._others: dict[str, nn.Parameter] = {}
        self._wholes: dict[str, _Whole] = {}
        load: Counter[tuple[int, ...]] = Counter()
        # The largest first, so that the ranks have about the same to step.
        for name in sorted(names, key=lambda n: -math.prod(state.shards[n].shape)):
            parameter, shard = state.parameters[name], state.shards[name]
            ways = self._ways(parameter, shard)
            if not ways:
                self._others[name] = parameter
                continue
            owner = min(itertools.product(*(range(group.size()) for group, _, _ in ways)), key=lambda p: (load[p], p))
            load[owner] += math.prod(shard.shape)
            cuts = tuple(_Cut(*way, index) for way, index in zip(ways, owner, strict=True))
            self._wholes[name] = _Whole(parameter, shard, cuts)

    def _ways(
        self, parameter: nn.Parameter, shard: ParameterShard
    ) -> list[tuple[dist.ProcessGroup, Placement, tuple[int, ...]]]:
        ways: list[tuple[dist.ProcessGroup, Placement, tuple[int, ...]]] = []
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            self._data = mesh.get_group(mesh.ndim - 1)  # FSDP cuts dim 0 over it, as in _Cut
            ways.append((self._data, Shard(0), tuple(parameter.shape)))
        tp = self._world.group("tp")
        if tp is not None and shard.placement.is_shard:
            ways.append((tp, shard.placement, shard.shape))
        return ways

    def of(self, name: str) -> nn.Parameter | None:
        return self._wholes[name].tensor if name in self._wholes else self._others[name]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        super().attach(optimizer)
        for whole in self._wholes.values():
            whole.release()

    def fill(self) -> None:
        wholes = list(self._wholes.values())
        if not wholes:
            return  # nor has any of the ranks that share this stage
        has = torch.tensor([w.parameter.grad is not None for w in wholes], dtype=torch.int32, device=self._device)
        for group in (self._data, self._world.group("tp")):
            if group is not None:
                dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
        for whole, gradient in zip(wholes, has.tolist(), strict=True):
            whole.fill(bool(gradient))

    def hand_back(self) -> None:
        for whole in self._wholes.values():
            whole.hand_back()

    def originals(self) -> Sequence[nn.Parameter]:
        return [whole.parameter for whole in self._wholes.values()]
