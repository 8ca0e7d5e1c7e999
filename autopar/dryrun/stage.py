"""A stage's forward and backward on tensors without data, with the buffers and messages of torch's pipeline stages."""

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
    """One stage of a rank. Call `make_buffers` before the micro-batches of a step."""

    def __init__(
        self, traced: TracedModel, plan: Plan, stage: StageGraph, stages: tuple[StageGraph, ...], graph: nn.Module,
        world: FakeWorld, recorder: Recorder,
    ) -> None:  # fmt: skip
        self.traced, self.plan, self.stage, self.stages = traced, plan, stage, stages
        self.graph, self.world, self.recorder = graph, world, recorder
        self.last = stage.index == len(stages) - 1
        self.saved: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.put_off: dict[int, Callable[[], Any]] = {}
        self.received: dict[int, list[Tensor]] = {}
        self.received_gradients: dict[int, list[Tensor]] = {}
        self.kept_gradients: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.received_shapes: Shapes = ()
        self.sent_shapes: Shapes = ()

    def make_buffers(self, micro_batches: int, run: int) -> None:
        """torch's stages hold a receive buffer for every micro-batch of a step, for activations and for gradients, and
        the gradients of what they received, here those of the micro-batches that are not run."""
        with self.recorder.category("communication"):
            for i in range(micro_batches):
                self.received[i] = [
                    t.requires_grad_(t.is_floating_point()) for t in self._boundary(self.stage.receives, self.stage)
                ]
            for i in range(run, micro_batches):
                self.kept_gradients += [torch.empty_like(t) for t in self.received[i] if t.requires_grad]
            if not self.last:
                following = self.stages[self.stage.index + 1]
                after = self._boundary(following.receives, following)
                for i in range(micro_batches):
                    self.received_gradients[i] = [torch.empty_like(t) for t in after if t.is_floating_point()]
        self.received_shapes = tuple(tuple(t.shape) for t in self.received[0])

    def forward(self, i: int, batch: Mapping[str, Tensor], divisors: Tensor) -> None:
        received = self.received[i]
        self._exchange(dist.irecv, received, -1)
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
            self.sent_shapes = tuple(tuple(t.shape) for t in outputs)
            self._exchange(dist.isend, [t.detach() for t in outputs], +1)
        self.saved[i] = (received, outputs)

    def backward(self, i: int) -> None:
        received, outputs = self.saved.pop(i)
        self._whole_backward(outputs, self._arrived(i))
        del outputs
        self._send_back(received)

    def backward_input(self, i: int) -> None:
        """The half that the stage before waits for. The first stage puts off all of it, as torch does."""
        received, outputs = self.saved.pop(i)
        arrived = self._arrived(i)
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

    def _arrived(self, i: int) -> list[Tensor] | None:
        """Gradients of the outputs, from the next stage; None at the loss."""
        if self.last:
            return None
        arrived = self.received_gradients[i]
        self._exchange(dist.irecv, arrived, +1)
        return arrived

    def _send_back(self, received: list[Tensor]) -> None:
        gradients = [t.grad for t in received if t.grad is not None]  # torch keeps them until the next step
        for gradient in gradients:
            self.recorder.claim(gradient, "communication")
        self._exchange(dist.isend, gradients, -1)

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
