"""How many terms the loss of a batch averages over, counted from its inputs before the model runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from autopar.runtime.world import World

__all__ = ["TokenCounter"]


class TokenCounter:
    """Counts by a graph from model inputs to the number of loss terms. Without it the loss is a sum: count 1."""

    def __init__(self, graph: fx.GraphModule | None, world: World) -> None:
        self._graph, self._world = graph, world
        nodes = () if graph is None else graph.graph.nodes
        self.inputs = tuple(str(node.target) for node in nodes if node.op == "placeholder")
        # Only where targets are compared with the index to ignore can a row be made to count nothing.
        self.hides_rows = any(node.target is torch.ops.aten.ne.Scalar for node in nodes)
        # What to pad the inputs that hold targets with, so that the padding is not counted.
        self.fill = dict.fromkeys(self.inputs, 0 if graph is None else graph.meta.get("ignore_index", -100))

    def total(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Terms in the rows of all dp ranks, 0-d; `inputs` are this rank's rows. Collective over dp."""
        if self._graph is None:
            return torch.ones((), device=self._world.device)
        return self._world.sum(self._local(self._graph, inputs), "dp")

    def share(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What this rank's loss weighs in that of all dp ranks, 0-d fp64: a mean by its terms, a sum fully."""
        if self._graph is None:
            return torch.ones((), dtype=torch.float64, device=self._world.device)
        mine = self._local(self._graph, inputs)
        return mine.double() / self._world.sum(mine, "dp")

    def _local(self, graph: fx.GraphModule, inputs: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            count = graph(**{name: inputs[name] for name in self.inputs})
        return torch.as_tensor(count[0] if isinstance(count, tuple) else count, device=self._world.device)
