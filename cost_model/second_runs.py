"""What the backward of a recomputed layer runs again, and which conversions of placements it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.cost_model.activations import kept_tensors
from autopar.cost_model.op_facts import ElementSizes
from autopar.ir import TracedModel
from autopar.plan import Plan
from autopar.recomputation import kept_products, recomputed_together

__all__ = ["SecondRun", "second_runs"]


@dataclass(frozen=True)
class SecondRun:
    """The second run of a layer: up to `stop` (an index of execution), without the outputs it `keeps`; or of its
    attention core alone."""

    stop: int
    keeps: frozenset[fx.Node] = frozenset()
    core: bool = False

    def repeats(self, source: fx.Node, position: int) -> bool:
        """True for the conversion of `source` for a reader at `position`."""
        return position < self.stop and source not in self.keeps


def second_runs(
    traced: TracedModel, plan: Plan, nodes: Sequence[fx.Node], position: Mapping[fx.Node, int]
) -> dict[int, SecondRun]:
    """By segment, of the layers that `nodes` (of one stage) are in; `position`: index of execution."""
    found: dict[int, SecondRun] = {}
    for segment in traced.layers:
        mode = plan.checkpoint_mode(segment.path)
        own = [n for n in nodes if n.meta["segment"] == segment.index]
        if not own or mode == "none":
            continue
        keeps = frozenset().union(*kept_products(own)) if mode == "selective-ops" else frozenset()
        stop = -1 if mode == "selective" else _last_saving(own, position) + 1
        found[segment.index] = SecondRun(stop, keeps, core=mode == "selective")
    for group in recomputed_together(traced.segments, plan):
        for segment in group[:-1]:  # what follows in the group needs all of it
            if segment.index in found:
                found[segment.index] = SecondRun(len(position))
    return found


def _last_saving(nodes: list[fx.Node], position: Mapping[fx.Node, int]) -> int:
    kept = kept_tensors(nodes, ElementSizes(torch.float32, torch.float32))
    return max((position[k.keeper] for k in kept), default=-1)
