"""What ZeRO and accumulation add to a micro-batch at least, before any layout over tp is known.

A level of ZeRO that fits nowhere cannot be had for its cheap micro-batches: of the levels whose parameters, gradients
and optimizer fit on the mean rank of a partition, the one that adds least bounds them all.

    ZeRO 0, 1   every gradient is added to the sum of the step in memory
    ZeRO 2, 3   it is reduced to its shard; at 3 parameters are gathered too, forward and backward

Weights are cut over all of tp at best, and what is moved is affine in its bytes, so layers of equal size move least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost_model.candidates import Partition, zero_levels
from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.cost_model.memory import Recipe, frozen_bytes, state_bytes
from autopar.cost_model.own_stack import own_traits
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec, Pins

__all__ = ["ShardingBounds"]


@dataclass(frozen=True)
class _Level:
    """Bytes of state on the mean rank; seconds a micro-batch adds over the whole model: some in any case, and `exposed`
    of those that `behind_s` is longer than all the rest."""

    state_bytes: float
    added_s: float
    behind_s: float = 0.0
    exposed: float = 0.0


class ShardingBounds:
    """`trained` and `frozen` are the parameters of the model, `layers` the number of its layers; `passes`: how often a
    byte that hidden collectives move goes through a memory of `bytes_per_s`."""

    def __init__(
        self, cluster: ClusterSpec, recipe: Recipe, pins: Pins, *, trained: int, frozen: int, layers: int,
        bytes_per_s: float, passes: float,
    ) -> None:  # fmt: skip
        self._cluster, self._recipe, self._pins = cluster, recipe, pins
        self._trained, self._frozen, self._layers = trained, frozen, max(1, layers)
        self._bytes_per_s, self._passes = bytes_per_s, passes
        self._room = cluster.device.memory_bytes - cluster.device.reserved_bytes
        self._spans = tuple(link.span for link in cluster.links)
        self._levels: dict[tuple[Degrees, bool], list[_Level]] = {}

    def whole_s(self, partition: Partition, whole_s: float, kept_bytes: float) -> float:
        """Seconds of a micro-batch through the whole model at least, if it takes `whole_s` without; `kept_bytes` are
        held beside the state on every rank. Infinite if no level fits."""
        least = [
            level.added_s + level.exposed * max(0.0, level.behind_s - whole_s)
            for level in self._levels_of(partition)
            if level.state_bytes + kept_bytes <= self._room
        ]
        return whole_s + min(least, default=math.inf)

    def least_bytes(self, partition: Partition, kept_bytes: float) -> float:
        """State of the mean rank at the level that leaves least of it, and what is held beside."""
        return min(level.state_bytes for level in self._levels_of(partition)) + kept_bytes

    def _levels_of(self, partition: Partition) -> list[_Level]:
        key = (partition.degrees, partition.micro_batches == 1)
        if key not in self._levels:
            choices = zero_levels(partition.degrees, self._spans, self._pins)
            self._levels[key] = [self._level(*key, *choice) for choice in choices]
        return self._levels[key]

    def _level(self, d: Degrees, single: bool, zero: int, group: int) -> _Level:
        shard = (group or d.dp) * d.cp if zero else 1
        own = sum(state_bytes(self._recipe, zero, shard, fully_sharded=True, single=single).values())
        state = self._trained * own + self._frozen * frozen_bytes(self._recipe, zero, shard)
        traits = own_traits(self._cluster.stack, self._recipe, zero, sequence_sharding=False, schedule="1f1b")
        held = state / (d.pp * d.tp)
        if zero < 2:
            accumulated = 0.0 if single else 2 * traits.gradient_bytes + self._recipe.parameter_bytes
            return _Level(held, self._trained / d.tp * accumulated / self._bytes_per_s)
        ranks = group_cost(self._cluster, Degrees(pp=d.pp, tp=d.tp, cp=shard, dp=d.dp * d.cp // shard), "cp")
        moved_s = self._moved_s(d, zero, ranks)
        if "dp" not in traits.overlap:
            return _Level(held, moved_s)
        # `StepPrice._behind_s`: sums of max(0, c - w) + back min(c, w) of equal back are least where all of w is
        # together; where w holds communication that is hidden itself, it is longer than what it adds to a step
        overlaps_tp = d.tp > 1 and not {"tp_ring", "tp_linear"}.isdisjoint(self._cluster.stack.overlap)
        back = ranks.comes_back(self._passes, self._bytes_per_s)
        return _Level(held, back * moved_s, moved_s, 0.0 if overlaps_tp else 1 - back)

    def _moved_s(self, d: Degrees, zero: int, ranks: GroupCost) -> float:
        """Seconds of reductions and gathers of one micro-batch, all layers."""
        recipe, each = self._recipe, self._layers * d.tp
        wide = recipe.master_bytes or recipe.parameter_bytes
        moved_s = ranks.seconds("reduce_scatter", self._trained / each * wide)
        if zero == 3:
            held = self._trained + self._frozen
            moved_s += 2 * ranks.seconds("all_gather", held / each * recipe.parameter_bytes)
        return self._layers * moved_s
