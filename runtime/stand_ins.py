"""What an optimizer steps in place of parameters that it could not step as this rank holds them.

Adafactor, Muon, LARS and many of a user's own read a tensor as a whole, while a rank holds a slice of it (tp, ZeRO).
Then every cut tensor is stepped by one of the ranks that hold its slices: before a step, gradient and value are
gathered there; after it, the new value is scattered. State stays on that rank, so it is divided over the ranks as
before, by whole tensors instead of slices. The idea is that of distributed Shampoo (Shi et al. 2023, arXiv:2309.06497).

An optimizer that works element by element but calls an op that DTensor cannot run (Rprop, fused SGD) steps the plain
tensors inside them: no communication.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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
    """Parameters for an optimizer in place of others. `attach` it to the optimizer that was given them.

    reason: why the optimizer has them, to follow its name. Between steps they have no gradients: clipping belongs to
    pm.clip_grad_norm_.
    """

    reason: str

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
        optimizer.add_param_group = partial(_refuse_group, optimizer)  # type: ignore[method-assign]

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


def _refuse_group(optimizer: torch.optim.Optimizer, param_group: Any) -> None:
    name = type(optimizer).__name__
    raise SpecError(
        f"{name} steps other tensors in place of this rank's slices, and would step slices of this group",
        where="add_param_group",
        try_=f"pm.optimizer({name}, groups=...) with all it is ever to train, frozen so far or not; or another "
        "pm.optimizer with only=[...]",
    )


class LocalTensors(StandIns):
    """The plain tensors inside of DTensors, sharing their storage."""

    def __init__(self, state: LocalState, names: Sequence[str], why: str) -> None:
        self.reason = f"steps the plain tensors inside of sharded ones: {why}"
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
        stacked = padded.new_empty(n, *padded.shape) if self.here else None
        pieces = None if stacked is None else list(stacked.unbind(0))
        dist.gather(padded, pieces, group=self.group, group_dst=self.owner)
        if stacked is None:
            return None
        dim = self.placement.dim
        return join_shards(stacked, self.placement).narrow(dim, 0, self.shape[dim])

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

    def __init__(self, parameter: nn.Parameter, cuts: tuple[_Cut, ...]) -> None:
        self.parameter, self._cuts = parameter, cuts
        value = self._collect(local_part(parameter.detach()))
        self.tensor = None if value is None else nn.Parameter(value.contiguous())

    def fill(self) -> None:
        local, own = local_part(self.parameter.detach()), self.parameter.grad
        value = self._collect(local)
        gradient = self._collect(torch.zeros_like(local) if own is None else local_part(own))
        if self.tensor is not None:
            assert value is not None
            assert gradient is not None
            self.tensor.data, self.tensor.grad = value.contiguous(), gradient.contiguous()

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
    """Whole tensors in place of cut ones, each on one of the ranks that hold its slices; others as they are.

    Collective. During a step a rank holds value and gradient of all that it steps; the largest tensor is held three
    times while it is gathered.
    """

    reason = (
        "reads whole tensors: each is gathered to one of the ranks that share it, stepped there and scattered again"
    )

    def __init__(self, state: LocalState, world: World, names: Sequence[str]) -> None:
        self._device, self._tp = world.device, world.group("tp")
        self._data: dist.ProcessGroup | None = None
        self._others: dict[str, nn.Parameter] = {}
        self._wholes: dict[str, _Whole] = {}
        self._stepped: list[_Whole] = []
        sharded = next((p for p in state.parameters.values() if isinstance(p, DTensor)), None)
        if sharded is not None:
            self._data = sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1)
        load = torch.zeros([1 if group is None else group.size() for group in (self._data, self._tp)])
        # The largest first, so that the ranks have about the same to step.
        for name in sorted(names, key=lambda n: -math.prod(state.shards[n].shape)):
            parameter, shard = state.parameters[name], state.shards[name]
            cuts = self._cuts(parameter, shard, load)
            if cuts:
                self._wholes[name] = _Whole(parameter, cuts)
            else:
                self._others[name] = parameter

    def _cuts(self, parameter: nn.Parameter, shard: ParameterShard, load: Tensor) -> tuple[_Cut, ...]:
        """How a parameter is cut, to be stepped by the rank of least `load` (by position on data and tp)."""
        over_data = isinstance(parameter, DTensor)
        over_tp = self._tp is not None and shard.placement.is_shard
        if not over_data and not over_tp:
            return ()
        # Copies over an axis that does not cut it are stepped by all who hold one.
        most = load if over_data else load.amax(0, keepdim=True)
        most = most if over_tp else most.amax(1, keepdim=True)
        data, tp = divmod(int(most.argmin()), most.shape[1])
        load[data if over_data else slice(None), tp if over_tp else slice(None)] += math.prod(shard.shape)
        cuts = []
        if over_data:
            assert self._data is not None
            cuts.append(_Cut(self._data, Shard(0), tuple(parameter.shape), data))  # FSDP cuts dim 0
        if over_tp:
            assert self._tp is not None
            cuts.append(_Cut(self._tp, shard.placement, shard.shape, tp))
        return tuple(cuts)

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
        for group in (self._data, self._tp):
            if group is not None:
                dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
        # One without a gradient on every rank is not stepped: a step that was skipped moves nothing.
        self._stepped = [whole for whole, gradient in zip(wholes, has.tolist(), strict=True) if gradient]
        for whole in self._stepped:
            whole.fill()

    def hand_back(self) -> None:
        for whole in self._stepped:
            whole.hand_back()

    def originals(self) -> Sequence[nn.Parameter]:
        return [whole.parameter for whole in self._wholes.values()]
