"""What ZeRO moves in a step: gathers of parameters and scatters of gradients, unit by unit (docs/zero.md).

A unit is a layer whose parameters nothing else reads, or the stage's root. FSDP cuts every tensor along its first dim,
padded to equal parts, gathers in the dtype that computes and reduces in that of the masters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import fx

from autopar.cost_model.schedule_orders import BACKWARD, FORWARD, rank_orders
from autopar.ir import ParameterSpec, TracedModel
from autopar.placement import Placement
from autopar.plan import Plan

__all__ = ["ShardedUnits"]

_ROOT = -1
_MIXED = {"bf16-mixed": torch.bfloat16, "fp16": torch.float16}


class ShardedUnits:
    """Collects a stage's sharded parameters; `moved` gives the whole-tensor bytes of a step by collective."""

    def __init__(self, traced: TracedModel, plan: Plan) -> None:
        self.traced, self.plan = traced, plan
        data = plan.degrees.dp * plan.degrees.cp
        self.ranks = (plan.zero_group or plan.degrees.dp) * plan.degrees.cp
        self.copies = data // self.ranks
        self.level = plan.zero if data > 1 else 0
        self.axis = " and ".join(axis for axis in ("dp", "cp") if getattr(plan.degrees, axis) > 1)
        if self.copies > 1:
            self.axis = "shards"
        self._units: dict[int, list[tuple[int, int]]] = defaultdict(list)  # unit -> (gathered, reduced) bytes

    def takes(self, spec: ParameterSpec, summed_over_cp: bool) -> bool:
        """Whether the plan's level divides a parameter: not one whose gradient is no summand on every data rank."""
        if not spec.requires_grad:
            return self.level == 3
        return self.level > 0 and summed_over_cp

    def add(self, node: fx.Node, spec: ParameterSpec, placement: Placement) -> None:
        elements = self._padded(spec, placement)
        used = _MIXED.get(self.plan.precision, spec.dtype) if spec.dtype == torch.float32 else spec.dtype
        reduced = elements * spec.dtype.itemsize if spec.requires_grad else 0
        self._units[self._unit(node)].append((elements * used.itemsize, reduced))

    def shard_bytes(self, spec: ParameterSpec, placement: Placement) -> int:
        """Of one rank's part without padding where there is none."""
        return self._padded(spec, placement) // self.ranks * spec.dtype.itemsize

    def moved(self, stage: int) -> Iterator[tuple[str, str, str, int]]:
        """(purpose, kind, axis, bytes). Between copies of hybrid sharding the shards' gradients are summed once."""
        for unit, parts in self._units.items():
            gathers, scatters = self._times(unit, stage)
            reduced = sum(part for _, part in parts)
            yield "parameters", "all_gather", self.axis, gathers * sum(gathered for gathered, _ in parts)
            yield "gradients", "reduce_scatter", self.axis, scatters * reduced
            if self.copies > 1:
                yield "gradients", "all_reduce", "copies", reduced // self.ranks

    def _padded(self, spec: ParameterSpec, placement: Placement) -> int:
        shape = list(spec.shape)
        if placement.is_shard:
            shape[placement.dim] = -(-shape[placement.dim] // self.plan.degrees.tp)  # the last shard is filled up
        rows = math.ceil(shape[0] / self.ranks) * self.ranks if shape else self.ranks
        return rows * math.prod(shape[1:])

    def _unit(self, node: fx.Node) -> int:
        readers = {user.meta["segment"] for user in node.users if user.op == "call_function"}
        layers = {s.index for s in self.traced.layers}
        return next(iter(readers)) if len(readers) == 1 and readers <= layers else _ROOT

    def _times(self, unit: int, stage: int) -> tuple[int, int]:
        m = self.plan.micro_batches
        if self.level < 3:
            return 1, 1 if self.level == 1 else m
        return (self._root_gathers(stage) if unit == _ROOT else 2 * m), m

    def _root_gathers(self, stage: int) -> int:
        """The root stays gathered from a forward to the next backward."""
        pp, m = self.plan.degrees.pp, self.plan.micro_batches
        if pp == 1:
            return m
        order = rank_orders(self.plan.schedule, pp, m, self.plan.virtual_stages)[stage % pp]
        gathers, there = 0, False
        for action in order:
            if action.stage == stage and action.kind in (FORWARD, BACKWARD):
                gathers += not there
                there = action.kind == FORWARD
        return gathers
