"""Bytes of a graph's tensors in the step of a plan: whole over an axis, on one rank, as they are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy
from torch import fx

from autopar.cost_model.propagation import Propagation
from autopar.ir import TracedModel
from autopar.placement import REPLICATE, Placement
from autopar.plan import Plan

__all__ = ["TensorSizes"]


class TensorSizes:
    """`layouts`: placements over "cp" and "tp", where those are more than 1."""

    def __init__(self, traced: TracedModel, plan: Plan, layouts: Mapping[str, Propagation]) -> None:
        self._traced, self._plan, self._layouts = traced, plan, layouts
        self._sizes = {traced.batch: plan.micro_batch, traced.seq: plan.seq_len // plan.degrees.cp}

    def elements(self, node: fx.Node, *, whole_sequence: bool = False) -> int:
        """Of a micro-batch, of one cp rank unless `whole_sequence`."""
        sizes = self._sizes | ({self._traced.seq: self._plan.seq_len} if whole_sequence else {})
        total = sympy.Mul(*(sympy.sympify(d) for d in node.meta["shape"]))
        return int(total.subs(sizes))

    def whole_bytes(self, node: fx.Node, axis: str) -> int:
        """Of the whole tensor over `axis`: over tp that of one cp rank, which has all of what cp does not cut (routed
        tokens, sorted by their expert)."""
        layout = self._layouts.get("cp")
        placement = layout.placement.get(node) if layout is not None else None
        whole = axis == "cp" or (placement is not None and not placement.is_shard)
        return self.elements(node, whole_sequence=whole) * int(node.meta["dtype"].itemsize)

    def sent_bytes(self, node: fx.Node, have: Placement, wanted: Placement, axis: str) -> int:
        """Of the whole tensor as a change of placement sends it: a dim that the ranks do not divide (a vocabulary) is
        filled up."""
        nbytes, ranks = self.whole_bytes(node, axis), getattr(self._plan.degrees, axis)
        for placement in (have, wanted):
            size = node.meta["shape"][placement.dim] if placement.is_shard and placement.left == 1 else None
            if isinstance(size, int) and size % ranks:
                nbytes = nbytes // size * (size + -size % ranks)
        return nbytes

    def local_bytes(self, node: fx.Node) -> int:
        """On one rank."""
        layout = self._layouts.get("tp")
        sharded = layout is not None and layout.placement[node].is_shard
        return self.whole_bytes(node, "tp") // (self._plan.degrees.tp if sharded else 1)

    def stored_elements(self, parameter: fx.Node) -> int:
        """On one rank; the last shard of a vocabulary that does not divide is filled up."""
        layout, shape = self._layouts.get("tp"), list(self._traced.parameters[str(parameter.target)].shape)
        placement = layout.placement[parameter] if layout is not None else REPLICATE
        if placement.is_shard:
            shape[placement.dim] = -(-shape[placement.dim] // self._plan.degrees.tp)
        return math.prod(shape)
