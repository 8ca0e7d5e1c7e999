"""One rank of a plan, built and run on tensors without data: its stage, its schedule, its gradient sums.

The graph is what the passes make, the gradient reduction is the runtime's own; the pipeline follows the order torch
executes (cost_model/schedule_orders.py) with the receive buffers torch allocates. Micro-batches are all alike, so as
many run as it takes to reach the peak of memory; that those were alike is checked, and their collectives multiplied.
The optimizer's state is there, its step is not part of the peak: a fused one needs no memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from autopar import passes
from autopar.cost_model.schedule_orders import BACKWARD, FORWARD, rank_orders
from autopar.dryrun.fake_world import FakeWorld, fake_process_group
from autopar.dryrun.recorder import Issued, Recorder
from autopar.errors import AutoparError
from autopar.ir import StageGraph, TracedModel
from autopar.placement import REPLICATE
from autopar.plan import Plan
from autopar.runtime.reducer import GradientReducer, GroupSum
from autopar.runtime.sharding import local_shape
from autopar.runtime.stage import localize
from autopar.runtime.tokens import TokenCounter

__all__ = ["MeasuredRank", "measure_rank"]

_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
}  # fmt: skip


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank held and sent in a step. Bytes by category at the peak; `collectives` maps (purpose, kind, axis,
    whole-tensor bytes) to times a step; `boundary` are the shapes received and sent by the stage."""

    rank: int
    stage: int
    parameters: int
    peak: Mapping[str, int]
    collectives: Mapping[tuple[str, str, str, int], int]
    micro_batches_run: int
    receives: tuple[tuple[int, ...], ...]
    sends: tuple[tuple[int, ...], ...]


def measure_rank(
    traced: TracedModel, plan: Plan, stages: tuple[StageGraph, ...], rank: int, optimizer: str = "adamw"
) -> MeasuredRank:
    """Forward and backward of a step's micro-batches on `rank`, after one optimizer step has made its state.

    `stages` are those of `passes.apply`. Raises AutoparError if micro-batches are not alike.
    """
    with _world(plan, rank) as world, FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        return _Rank(traced, plan, stages, world, recorder).run(optimizer)


@contextmanager
def _world(plan: Plan, rank: int) -> Iterator[FakeWorld]:
    if plan.degrees.world_size == 1:
        yield FakeWorld(plan.degrees, rank)
        return
    with fake_process_group(rank, plan.degrees.world_size):
        yield FakeWorld(plan.degrees, rank)


class _Rank:
    def __init__(
        self, traced: TracedModel, plan: Plan, stages: tuple[StageGraph, ...], world: FakeWorld, recorder: Recorder
    ) -> None:
        self.traced, self.plan, self.stages, self.world, self.recorder = traced, plan, stages, world, recorder
        self.stage = stages[world.position["pp"]]
        self.last = self.stage.index == len(stages) - 1
        if world.group("dp") is not None:
            recorder.group_category[world.group_names()["dp"]] = "communication"
        with recorder.category("parameters"):
            self.parameters = self._parameters()
        with recorder.category("inputs"):
            buffers = {path: self._buffer(name) for path, name in self.stage.buffers.items()}
            tensors: dict[str, Tensor] = {p: self.parameters[s.name] for p, s in self.stage.parameters.items()}
            self.graph = localize(self.stage.graph_module, tensors | buffers, world.group_names(), world.device)
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self.saved: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.received: dict[int, list[Tensor]] = {}
        self.received_gradients: dict[int, list[Tensor]] = {}
        self.kept_gradients: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.sent_shapes: tuple[tuple[int, ...], ...] = ()

    def run(self, optimizer: str) -> MeasuredRank:
        reducer = self._reducer()
        self._optimizer_state(optimizer)
        micro_batches = self.plan.micro_batches
        alike = self._enough(micro_batches)
        with self.recorder.category("inputs"):
            batch = self._batch(self.plan.micro_batch * micro_batches)
        self._communication_buffers(micro_batches, alike)
        per_micro_batch: dict[tuple[str, int], list[Issued]] = {}
        once = self._issued_by(lambda: self._count_tokens(batch))
        reducer.begin(alike)
        order = rank_orders(self.plan.schedule, len(self.stages), alike)[self.stage.index]
        gradient_sums: list[Issued] = []
        for action in order:
            step = self._forward if action.kind == FORWARD else self._backward
            issued = self._issued_by(partial(step, action.micro_batch, batch))
            gradient_sums += [c for c in issued if self.world.axis_of(c.group) == "dp"]
            per_micro_batch[action.kind, action.micro_batch] = [
                c for c in issued if self.world.axis_of(c.group) != "dp"
            ]
        gradient_sums += self._issued_by(reducer.finish)
        once += self._issued_by(self._agree_on_loss)
        one = self._one_micro_batch(per_micro_batch, alike)
        return MeasuredRank(
            rank=self.world.rank,
            stage=self.stage.index,
            parameters=sum(p.numel() for p in self.parameters.values()),
            peak={k: v for k, v in self.recorder.peak.items() if v},
            collectives=self._tally(one, micro_batches, gradient_sums, once),
            micro_batches_run=alike,
            receives=tuple(tuple(t.shape) for t in self.received[0]),
            sends=self.sent_shapes,
        )

    # --- what the rank holds ------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, nn.Parameter]:
        tp = self.world.size("tp")
        return {
            s.name: nn.Parameter(torch.empty(local_shape(s.shape, s.placement, tp), dtype=s.dtype), s.requires_grad)
            for s in self.stage.parameters.values()
        }

    def _buffer(self, name: str) -> Tensor:
        spec = self.traced.buffers[name]
        return torch.empty(spec.shape, dtype=spec.dtype)

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.recorder.claim(parameter.grad, "gradients")

    def _optimizer_state(self, optimizer: str) -> None:
        """One step on zero gradients leaves the state that every later step finds. Mixed precision updates fp32
        copies."""
        with self.recorder.category("optimizer"):
            own = [p for p in self.parameters.values() if p.requires_grad]
            mixed = self.plan.precision == "bf16-mixed"
            self.updated = [nn.Parameter(p.detach().float()) for p in own] if mixed else own
            for p in self.updated:
                p.grad = torch.zeros_like(p)
            self.optimizer = _OPTIMIZERS[optimizer](self.updated, lr=1e-3, foreach=False)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.recorder.peak_bytes, self.recorder.peak = 0, {}

    def _batch(self, rows: int) -> dict[str, Tensor]:
        sizes = {self.traced.batch: rows, self.traced.seq: self.plan.seq_len}
        return {
            s.name: torch.zeros([d if isinstance(d, int) else int(d.subs(sizes)) for d in s.shape], dtype=s.dtype)
            for s in self.traced.inputs
        }

    def _communication_buffers(self, micro_batches: int, alike: int) -> None:
        """torch's stages hold a receive buffer for every micro-batch of a step, for activations and for gradients, and
        the gradients of what they received, here those of the micro-batches that are not run."""
        with self.recorder.category("communication"):
            for i in range(micro_batches):
                self.received[i] = [
                    t.requires_grad_(t.is_floating_point()) for t in self._boundary(self.stage.receives)
                ]
            for i in range(alike, micro_batches):
                self.kept_gradients += [torch.empty_like(t) for t in self.received[i] if t.requires_grad]
            if not self.last:
                placeholders = self.stages[self.stage.index + 1].receives
                after = self._boundary(placeholders, self.stages[self.stage.index + 1])
                for i in range(micro_batches):
                    self.received_gradients[i] = [torch.empty_like(t) for t in after if t.is_floating_point()]

    def _boundary(self, names: tuple[str, ...], stage: StageGraph | None = None) -> list[Tensor]:
        """Tensors of the shapes a stage receives, on one rank."""
        graph = (stage or self.stage).graph_module.graph
        nodes = {n.name: n for n in graph.nodes if n.op == "placeholder"}
        cp, tp = self.world.size("cp"), self.world.size("tp")
        sizes = {self.traced.batch: self.plan.micro_batch, self.traced.seq: self.plan.seq_len // cp}
        tensors = []
        for name in names:
            meta = nodes[name].meta
            shape = tuple(d if isinstance(d, int) else int(d.subs(sizes)) for d in meta["shape"])
            placement = meta.get("placement", REPLICATE)
            tensors.append(torch.empty(local_shape(shape, placement, tp), dtype=meta["dtype"]))
        return tensors

    def _reducer(self) -> GradientReducer:
        """As the engine builds it: over dp and cp in buckets, then what is partial over tp, then tied weights."""
        shards = {s.name: s for s in self.stage.parameters.values()}
        sums = []
        group = self.world.group("tp")
        partial = [self.parameters[name] for name, s in shards.items() if "tp" in s.grad_partial]
        if group is not None and partial:
            sums.append(GroupSum(tuple(partial), group, tuple(dist.get_process_group_ranks(group))))
        pipeline = self.world.group("pp")
        tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            holders = [s.index for s in self.stages if any(shard.name == name for shard in s.parameters.values())]
            if len(holders) > 1 and parameter.requires_grad:
                tied.setdefault(tuple(holders), []).append(parameter)
        for stages, parameters in sorted(tied.items()):
            assert pipeline is not None
            ranks = tuple(self.world.global_rank("pp", stage) for stage in stages)
            sums.append(GroupSum(tuple(parameters), pipeline, ranks))
        groups = {p: self.world.data_group("cp" in shards[name].grad_partial) for name, p in self.parameters.items()}
        # Over cp all at the end: there they would be taken for the collectives of a micro-batch.
        return GradientReducer(groups, sums, overlap=self.world.size("cp") == 1)

    # --- what it does -------------------------------------------------------------------------------------------------

    def _enough(self, micro_batches: int) -> int:
        """Micro-batches after which nothing new happens: GPipe holds all of them, 1F1B as many as there are stages, and
        one more shows the steady state."""
        gpipe = self.plan.schedule == "gpipe" or micro_batches < len(self.stages)
        held = micro_batches if gpipe and len(self.stages) > 1 else len(self.stages)
        return min(micro_batches, held + 1)

    def _issued_by(self, action: Callable[[], None]) -> list[Issued]:
        before = len(self.recorder.issued)
        action()
        return self.recorder.issued[before:]

    def _count_tokens(self, batch: Mapping[str, Tensor]) -> None:
        counter = passes.token_count(self.traced)
        graph = None if counter is None else localize(counter, {}, {}, self.world.device)
        self.tokens = TokenCounter(graph, self.world).total(batch)

    def _forward(self, i: int, batch: Mapping[str, Tensor]) -> None:
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
            outputs = [outputs[0].sum() / self.tokens]
            self.losses.append(outputs[0].detach())
        else:
            outputs = [t.contiguous() for t in outputs]
            self.sent_shapes = tuple(tuple(t.shape) for t in outputs)
            self._exchange(dist.isend, [t.detach() for t in outputs], +1)
        self.saved[i] = (received, outputs)

    def _backward(self, i: int, batch: Mapping[str, Tensor]) -> None:
        received, outputs = self.saved.pop(i)
        if self.last:
            outputs[0].backward()
        else:
            arrived = self.received_gradients[i]
            self._exchange(dist.irecv, arrived, +1)
            torch.autograd.backward([t for t in outputs if t.requires_grad], arrived)
        del outputs
        gradients = [t.grad for t in received if t.grad is not None]  # torch keeps them until the next step
        for gradient in gradients:
            self.recorder.claim(gradient, "communication")
        self._exchange(dist.isend, gradients, -1)

    def _exchange(self, operation: Callable[..., Any], tensors: list[Tensor], direction: int) -> None:
        group = self.world.group("pp")
        if group is None or not tensors:
            return
        peer = self.world.global_rank("pp", self.stage.index + direction)
        operations = [dist.P2POp(operation, t.detach(), peer, group) for t in tensors]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _agree_on_loss(self) -> None:
        output = next(n for n in self.traced.graph_module.graph.nodes if n.op == "output").args[0][self.traced.loss]
        loss = torch.zeros((), dtype=torch.float64 if output.meta["dtype"] == torch.float64 else torch.float32)
        if self.last:
            loss = self.world.sum(torch.stack(self.losses).sum(), "dp").to(loss.dtype)
        self.world.broadcast(loss, "pp", len(self.stages) - 1)

    # --- what is reported ---------------------------------------------------------------------------------------------

    def _one_micro_batch(self, issued: Mapping[tuple[str, int], list[Issued]], alike: int) -> list[Issued]:
        one: list[Issued] = []
        for kind in (FORWARD, BACKWARD):
            first = Counter(issued[kind, 0])
            for i in range(1, alike):
                if Counter(issued[kind, i]) != first:
                    raise AutoparError(f"micro-batches 0 and {i} issue different collectives", where="dry run")
            one += issued[kind, 0]
        return one

    def _tally(
        self, one: list[Issued], micro_batches: int, gradient_sums: list[Issued], once: list[Issued]
    ) -> dict[tuple[str, str, str, int], int]:
        """Gradient sums are one row an axis: how they are cut into buckets is no property of a plan."""
        tally: Counter[tuple[str, str, str, int]] = Counter()
        for c in one:
            axis = self.world.axis_of(c.group)
            if c.kind != "receive":
                tally["boundary" if axis == "pp" else "activations", c.kind, axis, c.nbytes] += micro_batches
        whole: Counter[tuple[str, str]] = Counter()
        for c in gradient_sums:
            if c.kind != "receive":
                whole[c.kind, self.world.axis_of(c.group)] += c.nbytes
        for (kind, axis), nbytes in whole.items():
            tally["gradients", kind, axis, nbytes] += 1
        for c in once:
            tally["control", c.kind, self.world.axis_of(c.group), c.nbytes] += 1
        return dict(tally)
