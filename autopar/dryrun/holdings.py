"""What a rank holds between micro-batches: parameters, their 16-bit copies or shards, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from autopar.dryrun.fake_world import FakeWorld
from autopar.dryrun.recorder import Recorder
from autopar.ir import ParameterShard, StageGraph, TracedModel
from autopar.plan import Plan
from autopar.runtime.precision import ComputeCopies
from autopar.runtime.reducer import GradientReducer, GroupSum
from autopar.runtime.sharding import local_part, local_shape
from autopar.runtime.stage import localize
from autopar.runtime.state import LocalState
from autopar.runtime.zero import ShardedStage, shard_stage

__all__ = ["Holdings"]

_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
}  # fmt: skip


class Holdings:
    """`parameters` are what is trained, by original name; `graphs` the modules of the rank's stages over them."""

    def __init__(
        self, traced: TracedModel, plan: Plan, own: Sequence[StageGraph], stages: Sequence[StageGraph],
        world: FakeWorld, recorder: Recorder,
    ) -> None:  # fmt: skip
        self.plan, self.stages, self.world, self.recorder = plan, stages, world, recorder
        self.shards: dict[str, ParameterShard] = {s.name: s for stage in own for s in stage.parameters.values()}
        self.sharded = plan.zero > 0 and world.data_mesh is not None
        with recorder.category("parameters"):
            self.parameters = self._parameters()
            self.count = sum(p.numel() for p in self.parameters.values())
            whole = {n: p for n, p in self.parameters.items() if not self.divides(n)}
            self.copies = ComputeCopies(whole, plan)
        for name, copy in self.copies.of.items():
            if copy is not self.parameters[name]:  # what computes is the parameter, its fp32 master optimizer state
                recorder.claim(self.parameters[name], "optimizer")
        self.graphs: dict[int, nn.Module] = {stage.index: self._graph(traced, stage) for stage in own}
        self.reducer = self._reducer()
        # After the reducer's own hooks: they put gradients into their buckets.
        for parameter in (*self.parameters.values(), *self.copies.of.values()):
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self.copies.on_gradient.append(self._handed_over)

    def divides(self, name: str) -> bool:
        """As `LocalState.divides`: whether the plan's ZeRO level shards a parameter over the data ranks."""
        shard = self.shards[name]
        if not self.sharded or not shard.requires_grad:
            return self.sharded and self.plan.zero == 3
        return self.world.size("cp") == 1 or "cp" in shard.grad_partial

    def make_optimizer_state(self, optimizer: str) -> None:
        """One step on zero gradients leaves the state that every later step finds, and the memory of shared buckets."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self.reducer.begin(1)
        with self.recorder.category("gradients"):
            for p in trained:
                p.grad = torch.zeros_like(p)
                self.reducer.arrived(p)
            self.reducer.finish()
        with self.recorder.category("optimizer"):
            self.optimizer = _OPTIMIZERS[optimizer](trained, lr=1e-3, foreach=False)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.recorder.peak_bytes, self.recorder.peak = 0, {}

    def begin(self, micro_batches: int) -> None:
        self.reducer.begin(micro_batches)
        for graph in self.graphs.values():
            if isinstance(graph, ShardedStage):
                graph.begin(micro_batches)

    def finish(self) -> None:
        self.reducer.finish()

    def name_whole_tensors(self, stage: int) -> None:
        """Call it between micro-batches: whole parameters that FSDP keeps for the step, gradients that it has not
        reduced, and those of backwards in halves, which call no hooks, are no activations."""
        for parameter in self.parameters.values():
            self._on_gradient(parameter)
        for module in self.graphs[stage].modules():
            for unit in _units(module):
                if self.plan.zero < 3:
                    self.recorder.claim(unit._unsharded_param, "parameters")
                gradient = unit.unsharded_accumulated_grad
                gradient = unit._unsharded_param.grad if gradient is None else gradient
                if gradient is not None:
                    self.recorder.claim(gradient, "gradients")

    def _parameters(self) -> dict[str, nn.Parameter]:
        tp = self.world.size("tp")
        return {
            name: nn.Parameter(torch.empty(local_shape(s.shape, s.placement, tp), dtype=s.dtype), s.requires_grad)
            for name, s in self.shards.items()
        }

    def _graph(self, traced: TracedModel, stage: StageGraph) -> nn.Module:
        with self.recorder.category("inputs"):
            buffers = {p: torch.empty(traced.buffers[n].shape, dtype=traced.buffers[n].dtype)
                       for p, n in stage.buffers.items()}  # fmt: skip
            used = self.copies.of
            tensors: dict[str, Tensor] = {
                p: used.get(s.name, self.parameters[s.name]) for p, s in stage.parameters.items()
            }
            graph = localize(stage.graph_module, tensors | buffers, self.world.group_names(), self.world.device)
        if not self.sharded:
            return graph
        with self.recorder.category("parameters"):
            return shard_stage(graph, stage, cast(LocalState, self), self.world, self.plan, wide=False)

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.recorder.claim(local_part(parameter.grad), "gradients")

    def _handed_over(self, master: nn.Parameter) -> None:
        self.reducer.arrived(master)
        self._on_gradient(master)

    def _reducer(self) -> GradientReducer:
        """As the engine builds it: over dp and cp in buckets, then what is partial over tp, then tied weights."""
        sums = []
        group = self.world.group("tp")
        partial = [self.parameters[name] for name, s in self.shards.items() if "tp" in s.grad_partial]
        if group is not None and partial:
            sums.append(GroupSum(tuple(partial), group, tuple(dist.get_process_group_ranks(group))))
        groups = {
            p: None if isinstance(p, DTensor) else self.world.data_group("cp" in self.shards[name].grad_partial)
            for name, p in self.parameters.items()
        }
        # Over cp all at the end: there they would be taken for the collectives of a micro-batch.
        hooked = self.plan.schedule != "zero-bubble"
        return GradientReducer(groups, [*sums, *self._tied_sums()], overlap=self.world.size("cp") == 1, hooked=hooked)

    def _tied_sums(self) -> list[GroupSum]:
        pipeline = self.world.group("pp")
        tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            holders = [s.index for s in self.stages if any(shard.name == name for shard in s.parameters.values())]
            ranks = tuple(dict.fromkeys(stage % self.world.size("pp") for stage in holders))
            if len(ranks) > 1 and parameter.requires_grad:
                tied.setdefault(ranks, []).append(parameter)
        if pipeline is None:
            return []
        return [
            GroupSum(tuple(parameters), pipeline, tuple(self.world.global_rank("pp", rank) for rank in ranks))
            for ranks, parameters in sorted(tied.items())
        ]


def _units(module: nn.Module) -> Sequence[FSDPParam]:
    """Parameters that FSDP gathers for `module`."""
    if not isinstance(module, FSDPModule):
        return ()
    group = module._get_fsdp_state()._fsdp_param_group
    return () if group is None else group.fsdp_params
