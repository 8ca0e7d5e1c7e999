"""A graph over parameters that ZeRO keeps in shards, run without FSDP: all of them whole at once.

FSDP holds the parameters for the graph of the training step, where layers are gathered one by one. Every other graph
over them (the model called as a function, a call of another kind) gathers what it reads together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Partial

from autopar.plan import Plan
from autopar.runtime.precision import compute_dtype
from autopar.runtime.recompute import CheckpointedBlock

__all__ = ["GatheredGraph", "gathered"]


def gathered(graph: fx.GraphModule, plan: Plan) -> nn.Module:
    """`graph`, changed in place to gather its parameters; itself if none of them is sharded over data ranks."""
    sharded = any(isinstance(p, DTensor) for p in graph.parameters())
    return GatheredGraph(graph, plan) if sharded else graph


class GatheredGraph(nn.Module):
    """Called alone it gathers at every call, and backward sums gradients and cuts them again. Between `begin` and
    `finish` it gathers once for all micro-batches, and gradients are summed and cut once.

    Whole tensors lie where the graph reads them until the next call if layers run again in backward, else until the
    call returns.
    """

    def __init__(self, graph: fx.GraphModule, plan: Plan) -> None:
        super().__init__()
        self.graph, self._plan = graph, plan
        self._places: list[tuple[nn.Module, str, DTensor]] = []
        for module in graph.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    del module._parameters[name]
                    self._places.append((module, name, parameter))
        self._runs_again = any(isinstance(m, CheckpointedBlock) for m in graph.modules())
        self._leaves: dict[DTensor, Tensor] = {}

    def begin(self) -> None:
        """A step starts. Collective over data ranks, as `finish`."""
        for _, _, parameter in self._places:
            if parameter not in self._leaves:
                whole = _full(parameter).detach()
                self._leaves[parameter] = whole.requires_grad_(parameter.requires_grad)

    def finish(self) -> None:
        """The backward of every micro-batch has run: gradients go where the parameters are."""
        for parameter, leaf in self._leaves.items():
            if parameter.requires_grad and leaf.grad is not None:
                mesh = parameter.device_mesh
                summand = DTensor.from_local(leaf.grad, mesh, [Partial()] * mesh.ndim, run_check=False)
                total = summand.redistribute(mesh, parameter.placements)
                parameter.grad = total if parameter.grad is None else parameter.grad + total
        self._leaves.clear()
        self._put({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = {p: self._leaves.get(p) for _, _, p in self._places}
        computing = {
            p: (_full(p) if leaf is None else leaf).to(compute_dtype(self._plan, p.dtype)) for p, leaf in whole.items()
        }
        self._put(computing)
        outputs = self.graph(*args, **kwargs)
        if not (self._runs_again and torch.is_grad_enabled()):
            self._put({})
        return outputs

    def _put(self, tensors: dict[DTensor, Tensor]) -> None:
        for module, name, parameter in self._places:
            setattr(module, name, tensors.get(parameter))


def _full(parameter: DTensor) -> Tensor:
    whole: Tensor = parameter.full_tensor(grad_placements=[Partial()] * parameter.device_mesh.ndim)
    return whole
