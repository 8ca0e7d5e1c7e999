"""Time and bytes of a block whose strategies are chosen, on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.cost_model.activations import local_bytes
from autopar.cost_model.block_measures import BlockMeasures
from autopar.cost_model.block_problem import (
    NodeStrategy,
    border_placement,
    inner_communication_s,
    is_weight,
    leaving_placement,
)
from autopar.cost_model.comm_cost import GroupCost
from autopar.cost_model.compute import Machine
from autopar.ir import TracedModel
from autopar.placement import CONVERSIONS, REPLICATE, Placement

__all__ = ["LayoutPrice", "price_layout", "replicated"]


@dataclass(frozen=True)
class LayoutPrice:
    """Time (seconds per micro-batch) and bytes of a block under a layout, on one rank.

    step_communication_s is paid once a step: gradients of replicated parameters of which each rank has a summand.
    collectives: (kind, whole-tensor bytes) per micro-batch.
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
    collectives: tuple[tuple[str, float], ...] = ()
    strategies: Mapping[fx.Node, NodeStrategy] = field(default_factory=dict)


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
    times, comm, step_s = [0.0, 0.0], [0.0, 0.0], 0.0
    flops, working = [0.0, 0.0], 0.0
    chosen = set(nodes)
    for node in nodes:
        if node.op != "call_function" or node not in measures.sizes or node not in layout:
            continue
        op, strategy = measures.sizes[node], layout[node]
        for i, seconds in enumerate(machine.seconds(op, *strategy, group.size)):
            times[i] += seconds
        comm[0] += inner_communication_s(node, strategy, measures, group)
        share = group.size if any(p is not None and p.is_shard for p in (*strategy[0], strategy[1])) else 1
        flops[0] += op.forward_flops / share
        flops[1] += op.backward_flops / share
        working = max(working, _touched_bytes(node, strategy, measures, group.size))
    collectives = []
    for source, have, wanted in _conversions(traced, nodes, layout, sequence_sharding):
        kinds = CONVERSIONS[have.kind, wanted.kind]
        for i, kind in enumerate(kinds if source.meta.get("grad") else kinds[:1]):
            seconds = group.seconds(kind, measures.tensor_bytes[source])
            if seconds and i == 1 and is_weight(source):
                step_s += seconds
            elif seconds:
                comm[i] += seconds
                collectives.append((kind, measures.tensor_bytes[source]))
    saved = local_bytes(
        [k for k in measures.kept if k.keeper in chosen], measures.kept_elements, layout, group.size,
        frozenset(traced.parameters),
    )  # fmt: skip
    return LayoutPrice(times[0], times[1], comm[0], comm[1], step_s, saved, working, flops[0], flops[1],
                       tuple(collectives), {n: layout[n] for n in nodes if n in layout})  # fmt: skip


def _conversions(
    traced: TracedModel, nodes: Sequence[fx.Node], layout: Mapping[fx.Node, NodeStrategy], sequence_sharding: bool
) -> list[tuple[fx.Node, Placement, Placement]]:
    """Distinct changes of placement that happen in `nodes`: at their inputs, and at the border they leave over."""
    inside = set(nodes)
    found: dict[tuple[fx.Node, Placement, Placement], None] = {}
    for node in nodes:
        if node not in layout or node.op != "call_function":
            continue
        for source, wanted in zip(node.all_input_nodes, layout[node][0], strict=False):
            if wanted is None or source.meta.get("dtype") is None:
                continue
            own = source in inside or source.op == "get_attr"
            have = layout[source][1] if own and source in layout else border_placement(
                source, traced, sequence_sharding)  # fmt: skip
            if have != wanted:
                found[source, have, wanted] = None
        leaving = leaving_placement(node, inside, traced, sequence_sharding)
        if leaving is not None and layout[node][1] != leaving:
            found[node, layout[node][1], leaving] = None
    return list(found)


def _touched_bytes(node: fx.Node, strategy: NodeStrategy, measures: BlockMeasures, tp: int) -> float:
    """Local bytes of an op's activations in and out: what its backward holds beside the saved tensors."""
    total = 0.0
    for tensor, placement in zip((*node.all_input_nodes, node), (*strategy[0], strategy[1]), strict=False):
        if tensor.op != "get_attr" and placement is not None and tensor in measures.tensor_bytes:
            total += measures.tensor_bytes[tensor] / (tp if placement.is_shard else 1)
    return total
