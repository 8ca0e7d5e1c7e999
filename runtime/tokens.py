"""How many terms the loss of a batch averages over, counted from its inputs before the model runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from autopar.runtime.world import World

__all__ = ["TokenCounter"]


class TokenCounter:
    """Counts by a graph from model inputs to the number of loss terms; without one every batch counts as 1."""

    def __init__(self, graph: fx.GraphModule | None, world: World) -> None:
        self._graph, self._world = graph, world
        nodes = () if graph is None else graph.graph.nodes
        self._inputs = [str(node.target) for node in nodes if node.op == "placeholder"]

    def local(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Terms in the rows given, 0-d."""
        if self._graph is None:
            return torch.ones((), device=self._world.device)
        with torch.no_grad():
            count = self._graph(**{name: inputs[name] for name in self._inputs})
        return torch.as_tensor(count[0] if isinstance(count, tuple) else count, device=self._world.device)

    def total(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Terms in the rows of all dp ranks, 0-d. Collective over dp."""
        return self._world.sum(self.local(inputs), "dp")
