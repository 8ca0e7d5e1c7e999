"""Time and bytes of a block whose strategies are chosen, on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.activations import KeptTensor, local_storages
from autopar.cost_model.block_measures import BlockMeasures
from autopar.cost_model.block_problem import (
    NodeStrategy,
    inner_reductions,
    is_weight,
    leaving_placement,
)
from autopar.cost_model.comm_cost import LOCAL_KINDS, GroupCost
from autopar.cost_model.compute import Machine, local_kernels
from autopar.cost_model.fusion import fused_bytes
from autopar.cost_model.kernels import MEMORY, Kernel, Kernels
from autopar.cost_model.op_facts import is_view
from autopar.cost_model.propagation import border_placement
from autopar.ir import TracedModel
from autopar.placement import CONVERSIONS, REPLICATE, Placement

__all__ = [
    "BACKWARD",
    "FORWARD",
    "FORWARD_ONLY",
    "ONCE_A_STEP",
    "BlockWork",
    "LayoutPrice",
    "block_work",
    "price_layout",
    "price_work",
    "replicated",
]

FORWARD, BACKWARD, ONCE_A_STEP, FORWARD_ONLY = range(4)
"""When a collective runs: in a forward and again where that is repeated, in a backward, once for a gradient, or in
a forward behind all that its backward reads."""


@dataclass(frozen=True, eq=False)
class BlockWork:
    """What a block does on one rank under a layout, before any rate is known; one micro-batch.

    forward, backward  kernels at local shapes
    collectives        (kind, whole-tensor bytes, FORWARD | BACKWARD | ONCE_A_STEP | FORWARD_ONLY)
    again              kernels of `forward`, from the first, that a second run computes before it has all that
                       backward reads and stops; FORWARD_ONLY collectives come after that
    in_backward_bytes  most that the block holds of its own in its backward beside gradients of weights that are there:
                       if each joins others, and if the block's own stay
    entering_bytes     of saved_bytes, what other blocks made
    """

    forward: Kernels
    backward: Kernels
    collectives: tuple[tuple[str, float, int], ...]
    saved_bytes: float
    working_bytes: float
    strategies: Mapping[fx.Node, NodeStrategy] = field(default_factory=dict, repr=False)
    again: int | None = None
    in_backward_bytes: tuple[float, float] = (0.0, 0.0)
    entering_bytes: float = 0.0


@dataclass(frozen=True)
class LayoutPrice:
    """Time (seconds per micro-batch) and bytes of a block under a layout, on one rank.

    step_communication_s is paid once a step: gradients of replicated parameters of which each rank has a summand.
    repeated_communication_s: the part of forward_communication_s that a second run repeats.
    backward_reduction_s: the part of backward_communication_s that sums input gradients; a stack may compute weight
    gradients meanwhile.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_communication_s: float = 0.0
    backward_communication_s: float = 0.0
    step_communication_s: float = 0.0
    saved_bytes: float = 0.0
    working_bytes: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    repeated_communication_s: float = 0.0
    strategies: Mapping[fx.Node, NodeStrategy] = field(default_factory=dict)
    backward_reduction_s: float = 0.0


def replicated(nodes: Sequence[fx.Node]) -> dict[fx.Node, NodeStrategy]:
    """The only layout over one rank."""
    return {
        node: (tuple(REPLICATE if n.meta.get("dtype") is not None else None for n in node.all_input_nodes), REPLICATE)
        for node in nodes
    }


def price_layout(
    traced: TracedModel,
    nodes: Sequence[fx.Node],
    layout: Mapping[fx.Node, NodeStrategy],
    measures: BlockMeasures,
    *,
    machine: Machine,
    group: GroupCost,
    sequence_sharding: bool,
) -> LayoutPrice:
    """Time and bytes of `nodes` under `layout` (which may cover more nodes: sources in other blocks)."""
    work = block_work(traced, nodes, layout, measures, tp=group.size, sequence_sharding=sequence_sharding)
    return price_work(work, machine, group)


@lru_cache(maxsize=4096)
def price_work(work: BlockWork, machine: Machine, group: GroupCost) -> LayoutPrice:
    """Seconds of a block's work on a machine and a tp group."""
    comm, reduction_s = [0.0, 0.0, 0.0, 0.0], 0.0
    for kind, whole_bytes, when in work.collectives:
        seconds = group.seconds(kind, whole_bytes)
        comm[when] += seconds
        reduction_s += seconds if when == BACKWARD and kind in ("all_reduce", "reduce_scatter") else 0.0
    return LayoutPrice(
        forward_s=float(machine.seconds(work.forward).sum()),
        backward_s=float(machine.seconds(work.backward).sum()),
        forward_communication_s=comm[FORWARD] + comm[FORWARD_ONLY],
        backward_communication_s=comm[BACKWARD],
        step_communication_s=comm[ONCE_A_STEP],
        saved_bytes=work.saved_bytes,
        working_bytes=work.working_bytes,
        forward_flops=work.forward.flops,
        backward_flops=work.backward.flops,
        repeated_communication_s=comm[FORWARD],
        strategies=work.strategies,
        backward_reduction_s=reduction_s,
    )


def block_work(
    traced: TracedModel,
    nodes: Sequence[fx.Node],
    layout: Mapping[fx.Node, NodeStrategy],
    measures: BlockMeasures,
    *,
    tp: int,
    sequence_sharding: bool,
    gathers_again: bool = False,
) -> BlockWork:
    """Kernels, collectives and bytes of `nodes` under `layout` over `tp` ranks."""
    kernels, collectives, working, again = [], [], 0.0, 0
    chosen, position = set(nodes), {node: i for i, node in enumerate(nodes)}
    stop, computes = _second_run(position, measures)
    chains = fused_bytes([n for n in nodes if n in layout], layout, measures, tp)
    for node in nodes:
        if node.op != "call_function" or node not in measures.sizes or node not in layout:
            continue
        strategy = layout[node]
        own = _with_fused(local_kernels(measures.sizes[node], *strategy, tp), chains.get(node))
        kernels += own
        if position[node] < stop or (position[node] == stop and computes):
            again += sum(not kernel.backward for kernel in own)
        kernels += _gradient_sums(node, chosen, strategy, measures, tp)
        collectives += [("all_reduce", whole, FORWARD) for whole in inner_reductions(node, strategy, measures)]
        working = max(working, _touched_bytes(node, strategy, measures, tp))
    for (source, have, wanted), reader in _conversions(traced, nodes, layout, sequence_sharding).items():
        forward, backward = CONVERSIONS[have.kind, wanted.kind]
        found = [(forward, FORWARD if position[reader] + (reader is source) <= stop else FORWARD_ONLY)]
        if source.meta.get("grad"):
            found.append((backward, ONCE_A_STEP if is_weight(source) else BACKWARD))
        collectives += [(kind, measures.tensor_bytes[source], when) for kind, when in found
                        if kind not in LOCAL_KINDS and tp > 1]  # fmt: skip
    kept = local_storages(
        [k for k in measures.kept if k.keeper in chosen], measures.kept_elements, layout, tp,
        frozenset(traced.parameters), gathers_again=gathers_again,
    )  # fmt: skip
    entering = sum(n for (root, key), n in kept.items() if root not in chosen and root.meta.get("grad") and not key)
    return BlockWork(
        Kernels(k for k in kernels if not k.backward), Kernels(k for k in kernels if k.backward), tuple(collectives),
        sum(kept.values()), working, {n: layout[n] for n in nodes if n in layout}, again,
        _in_backward_bytes(nodes, layout, measures, tp, frozenset(traced.parameters)), entering,
    )  # fmt: skip


def _in_backward_bytes(
    nodes: Sequence[fx.Node], layout: Mapping[fx.Node, NodeStrategy], measures: BlockMeasures, tp: int,
    parameters: frozenset[str],
) -> tuple[float, float]:  # fmt: skip
    """Most over the ops: what they and the ops before kept (those behind have given up theirs), gradients of the op's
    activations, and of its weights; in the second figure with those of the weights behind, which are made before."""
    kept_by: dict[fx.Node, list[KeptTensor]] = {}
    for kept in measures.kept:
        kept_by.setdefault(kept.keeper, []).append(kept)
    held: dict[tuple[fx.Node, str], float] = {}
    steps: list[tuple[float, float]] = []  # (what is held beside gradients of weights, those of the op's)
    for node in nodes:
        if node in kept_by:
            held |= local_storages(kept_by[node], measures.kept_elements, layout, tp, parameters)
        if node in layout and node.op == "call_function" and node.meta.get("grad"):
            weights = [n for n in node.all_input_nodes if n.op == "get_attr" and is_weight(n) and n.meta.get("grad")]
            made = sum(measures.tensor_bytes[n] / (tp if layout[n][1].is_shard else 1) for n in weights if n in layout)
            steps.append((sum(held.values()) + _gradient_bytes(node, layout[node], measures, tp), made))
    most, most_staying, staying = 0.0, 0.0, 0.0
    for beside, made in reversed(steps):
        staying += made
        most, most_staying = max(most, beside + made), max(most_staying, beside + staying)
    return most, most_staying


def _gradient_bytes(node: fx.Node, strategy: NodeStrategy, measures: BlockMeasures, tp: int) -> float:
    """Gradients of an op's activations: of the output, and of the inputs where they are not the same."""
    alike = is_view(node) or op_name(node) in _SAME_GRADIENT
    placed = [] if alike else [(n, p) for n, p in zip(node.all_input_nodes, strategy[0], strict=False)
                               if n.op != "get_attr" and n.meta.get("grad")]  # fmt: skip
    return sum(
        measures.tensor_bytes[n] / (tp if placement.is_shard else 1)
        for n, placement in [(node, strategy[1]), *placed]
        if placement is not None and n in measures.tensor_bytes
    )


def _second_run(position: Mapping[fx.Node, int], measures: BlockMeasures) -> tuple[int, bool]:
    """Index of the last node that keeps something for backward, and whether it has to compute for that: torch stops a
    second run as soon as all is kept, inputs before their op runs."""
    stop, computes = -1, False
    for kept in measures.kept:
        if kept.keeper in position and position[kept.keeper] >= stop:
            own = kept.slot is None
            computes = own or (computes and position[kept.keeper] == stop)
            stop = position[kept.keeper]
    return stop, computes


def _with_fused(kernels: Sequence[Kernel], chain: tuple[float, float] | None) -> list[Kernel]:
    if chain is None:
        return list(kernels)
    return [kernel._replace(fused_bytes=chain[kernel.backward]) for kernel in kernels]


def _gradient_sums(
    node: fx.Node, inside: set[fx.Node], strategy: NodeStrategy, measures: BlockMeasures, tp: int
) -> list[Kernel]:
    """Autograd adds up the gradients of an activation that several ops read, a kernel for each but the first; where
    chains are fused, the sum is part of one. The gradient of a split is one copy."""
    users = [u for u in node.users if u.op == "call_function" and u.meta.get("grad")]
    if not node.meta.get("grad") or len(users) < 2:
        return []
    local = measures.tensor_bytes[node] / (tp if strategy[1].is_shard else 1)
    if is_view(node):  # the parts of a split are put together again
        return [Kernel(MEMORY, moved_bytes=2 * local, backward=1, fused_bytes=2 * local)]
    return [Kernel(MEMORY, moved_bytes=3 * local, backward=1, fused_bytes=0.0)] * (len(users) - 1)


def _conversions(
    traced: TracedModel, nodes: Sequence[fx.Node], layout: Mapping[fx.Node, NodeStrategy], sequence_sharding: bool
) -> dict[tuple[fx.Node, Placement, Placement], fx.Node]:
    """Distinct changes of placement in `nodes`, at their inputs and at the border they leave over, each with
    its first reader (at the border the tensor itself)."""
    inside = set(nodes)
    found: dict[tuple[fx.Node, Placement, Placement], fx.Node] = {}
    for node in nodes:
        if node not in layout or node.op != "call_function":
            continue
        for source, wanted in zip(node.all_input_nodes, layout[node][0], strict=False):
            if wanted is None or source.meta.get("dtype") is None:
                continue
            own = source in inside or source.op == "get_attr"
            have = layout[source][1] if own and source in layout else border_placement(
                source, sequence_sharding)  # fmt: skip
            if have != wanted:
                found.setdefault((source, have, wanted), node)
        leaving = leaving_placement(node, inside, traced, sequence_sharding)
        if leaving is not None and layout[node][1] != leaving:
            found.setdefault((node, layout[node][1], leaving), node)
    return found


_SAME_GRADIENT = frozenset({"add", "sub", "to", "_to_copy"})
"""What hands the gradient of its output on."""


def _touched_bytes(node: fx.Node, strategy: NodeStrategy, measures: BlockMeasures, tp: int) -> float:
    """Local bytes of an op's activations in and out: what its backward holds beside the saved tensors."""
    total = 0.0
    for tensor, placement in zip((*node.all_input_nodes, node), (*strategy[0], strategy[1]), strict=False):
        if tensor.op != "get_attr" and placement is not None and tensor in measures.tensor_bytes:
            total += measures.tensor_bytes[tensor] / (tp if placement.is_shard else 1)
    return total
