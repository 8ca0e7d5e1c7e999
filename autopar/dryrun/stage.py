"""A stage's forward and backward on tensors without data, with the buffers and messages of the pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from autopar.dryrun.fake_world import FakeWorld
from autopar.dryrun.recorder import Recorder
from autopar.ir import StageGraph, TracedModel
from autopar.placement import REPLICATE
from autopar.plan import Plan
from autopar.runtime.sharding import local_shape
from autopar.runtime.tokens import divided

__all__ = ["Chunk"]

Shapes = tuple[tuple[int, ...], ...]


class Chunk:
    """One stage of a rank."""

    def __init__(
        self, traced: TracedModel, plan: Plan, stage: StageGraph, stages: tuple[StageGraph, ...], graph: nn.Module,
        world: FakeWorld, recorder: Recorder,
    ) -> None:  # fmt: skip
        self.traced, self.plan, self.stage, self.stages = traced, plan, stage, stages
        self.graph, self.world, self.recorder = graph, world, recorder
        self.last = stage.index == len(stages) - 1
        self.saved: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.put_off: dict[int, Callable[[], Any]] = {}
        self.losses: list[Tensor] = []
        self.received_shapes: Shapes = ()
        self.sent_shapes: Shapes = ()

    def forward(self, i: int, batch: Mapping[str, Tensor], divisors: Tensor) -> None:
        received = self._receive(self.stage, -1, "activations")
        for t in received:
            t.requires_grad_(t.is_floating_point())
        self.received_shapes = tuple(tuple(t.shape) for t in received)
        rows = slice(i * self.plan.micro_batch, (i + 1) * self.plan.micro_batch)
        inputs = {
            s.name: batch[s.name] if s.batch_dim is None else batch[s.name][(slice(None),) * s.batch_dim + (rows,)]
            for s in self.traced.inputs
            if s.name in self.stage.inputs
        }
        outputs = list(self.graph(*received, **inputs))
        if self.last:
            outputs = [divided(outputs[0], divisors)]
            self.losses.append(outputs[0].detach())
        else:
            outputs = [t.contiguous() for t in outputs]
            for t in outputs:  # held until their backward
                self.recorder.claim(t, "communication")
            self.sent_shapes = tuple(tuple(t.shape) for t in outputs)
            self._exchange(dist.isend, [t.detach() for t in outputs], +1)
        self.saved[i] = (received, outputs)

    def backward(self, i: int) -> None:
        received, outputs = self.saved.pop(i)
        self._whole_backward(outputs, self._arrived())
        del outputs
        self._send_back(received)

    def backward_input(self, i: int) -> None:
        """The half that the stage before waits for. The first stage puts off all of it, as torch does."""
        received, outputs = self.saved.pop(i)
        arrived = self._arrived()
        if not any(t.requires_grad for t in received):
            self.put_off[i] = lambda: self._whole_backward(outputs, arrived)
            return
        weights = [p for p in self.graph.parameters() if p.requires_grad]
        _, groups = stage_backward_input(outputs, arrived, list(received), iter(weights))
        self.put_off[i] = lambda: stage_backward_weight(iter(weights), groups)
        self._send_back(received)

    def backward_weight(self, i: int) -> None:
        self.put_off.pop(i)()

    def _whole_backward(self, outputs: list[Tensor], arrived: list[Tensor] | None) -> None:
        if arrived is None:
            outputs[0].backward()
        else:
            torch.autograd.backward([t for t in outputs if t.requires_grad], arrived)

    def _arrived(self) -> list[Tensor] | None:
        """Gradients of the outputs, from the next stage; None at the loss."""
        if self.last:
            return None
        return self._receive(self.stages[self.stage.index + 1], +1, "communication")

    def _send_back(self, received: list[Tensor]) -> None:
        gradients = [t.grad for t in received if t.grad is not None]
        for gradient in gradients:
            self.recorder.claim(gradient, "communication")
        self._exchange(dist.isend, gradients, -1)

    def _receive(self, stage: StageGraph, direction: int, category: str) -> list[Tensor]:
        """What `stage` receives, from a neighbour: all of it from the one before, its gradients from the next."""
        with self.recorder.category(category):
            made = [t for t in self._boundary(stage.receives, stage) if direction < 0 or t.is_floating_point()]
        self._exchange(dist.irecv, made, direction)
        return made

    def _exchange(self, operation: Callable[..., Any], tensors: list[Tensor], direction: int) -> None:
        group = self.world.group("pp")
        if group is None or not tensors:
            return
        peer = self.world.global_rank("pp", (self.stage.index + direction) % self.world.size("pp"))
        operations = [dist.P2POp(operation, t.detach(), peer, group) for t in tensors]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _boundary(self, names: tuple[str, ...], stage: StageGraph) -> list[Tensor]:
        """Tensors of the shapes a stage receives, on one rank."""
        nodes = {n.name: n for n in stage.graph_module.graph.nodes if n.op == "placeholder"}
        cp, tp = self.world.size("cp"), self.world.size("tp")
        sizes = {self.traced.batch: self.plan.micro_batch, self.traced.seq: self.plan.seq_len // cp}
        tensors = []
        for name in names:
            meta = nodes[name].meta
            shape = tuple(d if isinstance(d, int) else int(d.subs(sizes)) for d in meta["shape"])
            placement = meta.get("placement", REPLICATE)
            tensors.append(torch.empty(local_shape(shape, placement, tp), dtype=meta["dtype"]))
        return tensors
