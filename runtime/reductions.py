"""Which gradients are summed over which ranks: the reducer of one rank's parameters, read off their placements."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.reducer import GradientReducer, GroupSum
from autopar.runtime.state import LocalState
from autopar.runtime.world import World

__all__ = ["gradient_reducer"]


def gradient_reducer(
    state: LocalState, world: World, *, bucket_bytes: int, overlap: bool, wide: bool, hooked: bool
) -> GradientReducer:
    """Sums over data-parallel ranks in buckets, then over tp what is partial there, then over the stages of a tie.

    `hooked`: see `GradientReducer`."""
    groups: dict[nn.Parameter, dist.ProcessGroup | None] = {}
    for name, parameter in state.parameters.items():
        if isinstance(parameter, DTensor):  # reduced where it is sharded
            groups[parameter] = None
            continue
        groups[parameter] = world.data_group(over_cp="cp" in state.shards[name].grad_partial)
    sums = [*_partial_sums(state, world), *_tied_sums(state, world)]
    uses = {
        parameter: sum(any(shard.name == name for shard in stage.parameters.values()) for stage in state.own_stages)
        for name, parameter in state.parameters.items()
    }
    reducer = GradientReducer(
        groups, sums, uses=uses, bucket_bytes=bucket_bytes, overlap=overlap, wide=wide, hooked=hooked
    )
    state.copies.on_gradient.append(reducer.arrived)
    return reducer


def _partial_sums(state: LocalState, world: World) -> list[GroupSum]:
    group = world.group("tp")
    partial = [state.parameters[name] for name, shard in state.shards.items() if "tp" in shard.grad_partial]
    if group is None or not partial:
        return []
    return [GroupSum(tuple(partial), group, tuple(world.global_rank("tp", i) for i in range(group.size())))]


def _tied_sums(state: LocalState, world: World) -> list[GroupSum]:
    """One sum over the stages that share a parameter, per set of stages."""
    shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in state.named_parameters():
        holders = state.holders(name)
        if len(holders) > 1 and parameter.requires_grad:
            shared.setdefault(tuple(holders), []).append(parameter)
    group = world.group("pp")
    if group is None:
        return []
    return [
        GroupSum(tuple(parameters), group, tuple(world.global_rank("pp", stage) for stage in stages))
        for stages, parameters in sorted(shared.items())
    ]
