"""What the loss of a batch is divided by, computed from its inputs before the model runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.errors import SpecError
from autopar.graph_walks import outputs_of
from autopar.ir import TracedModel
from autopar.mesh import AXES
from autopar.runtime.collectives import resolve_group
from autopar.runtime.stage import localize
from autopar.runtime.world import World

__all__ = ["TokenCounter", "divided", "loss_dtype", "over_replicas"]


def over_replicas(rows: Tensor, *, group: str) -> Tensor:
    """The sum of `rows` over the ranks of `group`; an axis of size one stays unbound and has nothing to add."""
    if group in AXES:
        return rows
    total = rows.clone()
    dist.all_reduce(total, group=resolve_group(group))
    return total


def divided(loss_sums: Tensor, divisors: Tensor) -> Tensor:
    """The loss: each of `loss_sums` [terms] by its divisor [terms], added up; 0-d, in fp32 at least."""
    wide = loss_sums.to(torch.promote_types(loss_sums.dtype, torch.float32))
    return (wide / divisors.to(wide.dtype)).sum()


def loss_dtype(traced: TracedModel) -> torch.dtype:
    """Of the loss that ranks agree on: fp64 if the model's own is, else fp32."""
    assert traced.loss is not None
    own = outputs_of(traced.graph_module.graph)[traced.loss].meta["dtype"]
    return torch.float64 if own == torch.float64 else torch.float32


class TokenCounter:
    """Runs the graph of `passes.token_count` on the inputs of a step. None: a model without a loss."""

    def __init__(self, graph: fx.GraphModule | None, world: World) -> None:
        self._graph, self._world = graph, world
        nodes = () if graph is None else graph.graph.nodes
        self.inputs = tuple(str(node.target) for node in nodes if node.op == "placeholder")
        ignored = None if graph is None else graph.meta.get("ignored")
        self.seen_ends: tuple[str, str] = ("", "") if graph is None else graph.meta.get("seen_ends", ("", ""))
        self.whole = graph is not None and bool(graph.meta.get("whole"))
        # Only where targets are compared with the index to ignore can a row be made to count nothing.
        self.hides_rows = ignored is not None and graph is not None and bool(graph.meta.get("rows_apart", True))
        # What to pad the inputs that hold targets with, so that the padding is not counted.
        self.fill = dict.fromkeys(self.inputs, -100 if ignored is None else ignored)

    @classmethod
    def on(cls, world: World, token_count: fx.GraphModule | None) -> TokenCounter:
        """Of a graph as passes make it."""
        return cls(token_count and localize(token_count, {}, world.group_names(), world.device), world)

    def divisors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Of each term of the loss, over the rows of all dp ranks: [terms], fp64; `inputs` are this rank's rows.
        Collective over dp."""
        if self._graph is None:
            return torch.ones(1, dtype=torch.float64, device=self._world.device)
        with torch.no_grad():
            found: Tensor = self._graph(**{name: inputs[name] for name in self.inputs})
        return found.to(self._world.device)

    def check(self, micro_batches: int) -> None:
        """Raise SpecError if the loss cannot be cut and the batch would be."""
        if self.whole and micro_batches > 1:
            raise SpecError(
                f"the loss is not a sum over tokens, and this batch would run in {micro_batches} micro-batches",
                where="batch",
                try_="as many rows as one micro-batch of the plan holds",
            )
