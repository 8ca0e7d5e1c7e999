"""ZeRO: optimizer state (1), gradients (2) and parameters (3) cut over the data-parallel ranks, by torch's FSDP2.

Every layer is a unit, what lies between them another; a unit's tensors are gathered and reduced together. The levels
are one mechanism with three switches (docs/zero.md tabulates bytes and collectives):

    level   gradients are reduced        parameters are given up     so a rank keeps whole during a step
    1       after the last micro-batch   after the step's backward   parameters and gradients
    2       after each micro-batch       after the step's backward   parameters
    3       after each micro-batch       after every use             one unit's parameters, and the stage's root

With a `zero_group` that many dp ranks share one copy, and gradients are then summed over the copies once a step.

Reductions are sums: the loss is already divided by the tokens of the whole batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map

from autopar.ir import StageGraph
from autopar.plan import Plan
from autopar.runtime.fsdp_comm import MeasuredAllGather, MeasuredReduceScatter
from autopar.runtime.precision import compute_dtype
from autopar.runtime.recompute import CheckpointedBlock
from autopar.runtime.reducer import mark_backward
from autopar.runtime.state import LocalState
from autopar.runtime.world import World

__all__ = ["ShardedStage", "shard_stage"]


class _Unit(nn.Module):
    """A plain module around a graph: FSDP changes the class of what it wraps, which a GraphModule does not survive.

    Its outputs are no views, since FSDP hangs hooks on them that a view may lose.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(
            lambda t: t.clone() if isinstance(t, Tensor) and t._is_view() else t, self.block(*args, **kwargs)
        )


class ShardedStage(nn.Module):
    """A stage whose parameters are sharded. Call `begin` before the micro-batches of a step, then it as the graph."""

    def __init__(self, root: nn.Module, level: int) -> None:
        super().__init__()
        assert isinstance(root, FSDPModule)
        self.root, self._level = root, level
        self._left = 0

    def begin(self, micro_batches: int) -> None:
        """Expect that many backward passes."""
        self._left = micro_batches
        self._set(last=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.root(*args, **kwargs)
        starts = _Once(self._on_backward)
        return tuple(mark_backward(t, starts) if isinstance(t, Tensor) and t.requires_grad else t for t in outputs)

    def rest(self) -> None:
        """Give up what forward gathered, where no backward will: an optimizer may write before the next step."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def measure(self) -> None:
        """Let the clock see what FSDP waits for."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(MeasuredAllGather())  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(MeasuredReduceScatter())  # type: ignore[arg-type]

    def _on_backward(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._set(last=True)

    def _set(self, last: bool) -> None:
        root = self.root
        assert isinstance(root, FSDPModule)
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or self._level >= 2)
        root.set_requires_all_reduce(last)  # between sharded copies: once a step
        root.set_reshard_after_backward(last or self._level == 3)


class _Once:
    """Calls `function` at the first of several calls: whichever output of a micro-batch gets its gradient first."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        if self._function is not None:
            self._function()
            self._function = None


def shard_stage(
    graph: fx.GraphModule, stage: StageGraph, state: LocalState, world: World, plan: Plan, wide: bool
) -> ShardedStage:
    """Shard a localized stage in place; `state.parameters` then holds the shards (DTensors over the data mesh).

    No other stage of this rank reads them, and they have one dtype (`limits.refuse_unbuilt`).

    `wide`: 16-bit gradients are reduced in fp32, as those of fp32 masters always are.
    """
    level = plan.zero
    mesh = world.shard_mesh(plan.zero_group)
    divided = {path: shard.name for path, shard in stage.parameters.items() if state.divides(shard.name)}
    sharded = {state.parameters[name] for name in divided.values()}
    kept = {p for p in graph.parameters() if p not in sharded}
    places = [_place(graph, path, name) for path, name in divided.items()]
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": _policy(sharded, plan, wide), "ignored_params": kept}
    units: list[FSDPModule] = []
    for name in _unit_names(graph):
        block = getattr(graph, name)
        unit = block if isinstance(block, CheckpointedBlock) else _Unit(block)
        setattr(graph, name, unit)
        units.append(fully_shard(unit, reshard_after_forward=level == 3, **options))
    root = _Unit(graph)
    sharded_root = fully_shard(root, reshard_after_forward=False, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch([sharded_root, *units], "zero3_gather" in plan.overlap, world.device)
    for owner, attribute, name in places:
        state.parameters[name] = getattr(owner, attribute)
    return ShardedStage(root, level)


def _prefetch(units: list[FSDPModule], overlap: bool, device: torch.device) -> None:
    """Gather a unit's parameters under the compute of the unit that runs before it, forward and backward, or when it
    runs itself. `units`: root first, then layers in order.

    In backward too the order is said: FSDP's own takes what ran before in any micro-batch, and so would gather a
    stage's last layer again under the backward of its first.
    """
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following] if overlap else [])
    root, *layers = units
    before = dict(itertools.pairwise([root, *reversed(layers)])) if overlap else {}
    for unit in units:
        unit.set_modules_to_backward_prefetch([before.get(unit, unit)])  # an empty list would be FSDP's own choice
        if overlap and device.type == "cpu":
            unit._set_unshard_async_op(True)  # gloo has no streams of its own


def _unit_names(graph: fx.GraphModule) -> list[str]:
    """The layers whose parameters nothing else reads; a shared one belongs to the root."""
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    readers: Counter[int] = Counter(id(p) for name in called for p in set(getattr(graph, name).parameters()))
    own = {id(p) for name, p in graph.named_parameters(remove_duplicate=False) if name.split(".")[0] not in called}
    return [
        name for name in called
        if all(readers[id(p)] == 1 and id(p) not in own for p in getattr(graph, name).parameters())
    ]  # fmt: skip


def _place(graph: fx.GraphModule, path: str, name: str) -> tuple[nn.Module, str, str]:
    owner, _, attribute = path.rpartition(".")
    return graph.get_submodule(owner), attribute, name


def _policy(parameters: Iterable[nn.Parameter], plan: Plan, wide: bool) -> MixedPrecisionPolicy:
    own = next((p.dtype for p in parameters), torch.float32)
    used = compute_dtype(plan, own)
    narrow = used in (torch.bfloat16, torch.float16)
    return MixedPrecisionPolicy(
        param_dtype=used if used != own else None,
        reduce_dtype=torch.float32 if narrow and (wide or used != own) else None,
        cast_forward_inputs=False,
    )
