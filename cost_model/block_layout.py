"""From a block of the captured graph to its ILP and back: strategies chosen, then time and bytes of the chosen layout.

A block is one layer class (its first layer stands for all) or the glue (prologue, epilogue and what lies between, solved
together because a tied weight has one placement). Tensors that cross a block's border have a fixed placement there:
the residual stream [batch, seq, hidden] is R, or S(1) under sequence sharding; everything else is R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.activations import local_bytes
from autopar.cost_model.block_ilp import BlockNode, BlockProblem, BlockSolution, Choice, layout_cost, solve_block
from autopar.cost_model.block_reduce import reduce_block
from autopar.cost_model.comm_cost import GroupCost
from autopar.cost_model.block_measures import BlockMeasures
from autopar.cost_model.compute import Machine
from autopar.cost_model.op_facts import storage_root
from autopar.ir import TracedModel
from autopar.placement import CONVERSIONS, REPLICATE, Placement, Shard

__all__ = ["Block", "LayoutPrice", "NodeStrategy", "price_layout", "replicated", "solve_layout"]

GRADIENT_AMORTISATION = 8
"""Micro-batches over which the ILP spreads a replicated parameter's once-a-step gradient reduction. The final price
uses the real number; the layout hardly depends on it."""

_TIE_US = 0.01
"""On equal cost reduce a partial tensor at once, and copy late: deterministic, and easier to read."""

_REPLICATED_WEIGHT_US = 1e5
"""Weights of two or more dims are stored and used sharded; one that no strategy can use sharded pays this and stays
replicated. Larger than any conversion, so never worth it otherwise."""

NodeStrategy = tuple[tuple[Placement | None, ...], Placement]


@dataclass(frozen=True)
class Block:
    """Nodes of a block in graph order: call_function, get_attr and placeholder nodes."""

    name: str
    nodes: tuple[fx.Node, ...]


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


def border_placement(node: fx.Node, traced: TracedModel, sequence_sharding: bool) -> Placement:
    """Placement of `node`'s output where it leaves its block."""
    shape = node.meta.get("shape") or ()
    residual = len(shape) == 3 and shape[1] == traced.seq and bool(node.meta.get("grad"))
    return Shard(1) if residual and sequence_sharding else REPLICATE


def solve_layout(
    traced: TracedModel,
    block: Block,
    strategies: Mapping[fx.Node, Sequence[NodeStrategy]],
    measures: BlockMeasures,
    fixed: Mapping[fx.Node, Placement],
    *,
    machine: Machine,
    group: GroupCost,
    sequence_sharding: bool,
) -> tuple[dict[fx.Node, NodeStrategy], BlockSolution] | None:
    """Best strategies of a block by the block ILP; None if nothing connects.

    `fixed` holds the placements of parameters that another block owns or a pin sets.
    """
    problem, index = _problem(traced, block, strategies, measures, fixed, machine, group, sequence_sharding)
    reduction = reduce_block(problem)
    solution = solve_block(reduction.problem)
    if solution is None:
        return None
    picks = reduction.expand(solution.picks)
    whole = layout_cost(problem, picks)
    assert whole is not None, "the reduced answer needs a conversion that is not offered"
    assert abs(whole - solution.cost_us) <= 1e-6 * whole, (whole, solution.cost_us)
    chosen = {}
    for node in block.nodes:
        if node in index:
            choice = problem.nodes[index[node]].choices[picks[index[node]]]
            chosen[node] = (choice.inputs, choice.output)
    return chosen, solution


def _problem(
    traced: TracedModel,
    block: Block,
    strategies: Mapping[fx.Node, Sequence[NodeStrategy]],
    measures: BlockMeasures,
    fixed: Mapping[fx.Node, Placement],
    machine: Machine,
    group: GroupCost,
    sequence_sharding: bool,
) -> tuple[BlockProblem, dict[fx.Node, int]]:
    inside = set(block.nodes)
    nodes: list[BlockNode] = []
    index: dict[fx.Node, int] = {}
    by_parameter: dict[str, int] = {}
    owners: list[fx.Node] = []

    def add(owner: fx.Node, node: BlockNode) -> int:
        nodes.append(node)
        owners.append(owner)
        return len(nodes) - 1

    def source_of(node: fx.Node) -> int | None:
        if node.meta.get("dtype") is None:
            return None
        if node not in index:  # enters over the border
            placement = fixed.get(node, border_placement(node, traced, sequence_sharding))
            index[node] = add(node, BlockNode(f"in {node}", (Choice((), placement, 0.0),)))
        return index[node]

    for node in block.nodes:
        if node.meta.get("dtype") is None:
            continue
        if node.op == "get_attr" and str(node.target) in by_parameter:
            index[node] = by_parameter[str(node.target)]  # a tied weight has one placement
            continue
        allowed = strategies[node] if sequence_sharding else _without_sequence(node, strategies[node], traced)
        options = _choices(node, allowed, measures, fixed, machine, group)
        sources = tuple(source_of(n) for n in node.all_input_nodes) if node.op == "call_function" else ()
        index[node] = add(node, BlockNode(str(node), options, sources))
        if node.op == "get_attr":
            by_parameter[str(node.target)] = index[node]
    for node in block.nodes:
        if node in index:
            leaving = _leaving(node, inside, traced, sequence_sharding)
            if leaving is not None and node.op == "call_function":
                add(node, BlockNode(f"out {node}", (Choice((leaving,), REPLICATE, 0.0),), (index[node],)))

    prices: dict[tuple[fx.Node, Placement, Placement], float | None] = {}

    def conversion_us(u: int, have: Placement, wanted: Placement) -> float | None:
        key = (owners[u], have, wanted)
        if key not in prices:
            prices[key] = _conversion_us(*key, measures, group)
        return prices[key]

    return BlockProblem(tuple(nodes), conversion_us), index


def _without_sequence(node: fx.Node, strategies: Sequence[NodeStrategy], traced: TracedModel) -> list[NodeStrategy]:
    """Strategies that shard no sequence dim: without sequence sharding a step may have any sequence length."""

    def is_sequence(tensor: fx.Node, placement: Placement | None) -> bool:
        if placement is None or not placement.is_shard:
            return False
        shape = tensor.meta["shape"]
        shape = shape[0] if shape and isinstance(shape[0], tuple) else shape
        return traced.seq in getattr(shape[placement.dim], "free_symbols", ())

    return [
        (inputs, output)
        for inputs, output in strategies
        if not is_sequence(node, output)
        and not any(is_sequence(n, p) for n, p in zip(node.all_input_nodes, inputs, strict=False))
    ]


def _leaving(
    node: fx.Node, inside: set[fx.Node], traced: TracedModel, sequence_sharding: bool
) -> Placement | None:
    """Placement asked for at the border; None if it is not crossed, or only by a model output beside the loss, which a
    training step drops."""
    users = [user for user in node.users if user not in inside]
    if not users:
        return None
    if all(user.op == "output" for user in users):
        outputs = users[0].args[0]
        flat = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        is_loss = traced.loss is None or flat[traced.loss] is node
        return REPLICATE if is_loss else None
    return border_placement(node, traced, sequence_sharding)


def _choices(
    node: fx.Node,
    strategies: Sequence[NodeStrategy],
    measures: BlockMeasures,
    fixed: Mapping[fx.Node, Placement],
    machine: Machine,
    group: GroupCost,
) -> tuple[Choice, ...]:
    found: dict[NodeStrategy, Choice] = {}
    for inputs, output in strategies:
        seen = _as_seen(node, inputs, output)
        if node in fixed and seen[1] != fixed[node]:
            continue
        cost_us = _own_us(node, seen, measures, machine, group)
        if node.op == "get_attr" and len(node.meta["shape"]) >= 2 and node.meta.get("grad"):
            cost_us = 0.0 if seen[1].is_shard else _REPLICATED_WEIGHT_US
        if seen[1].kind in ("P", "R|P"):
            cost_us += _TIE_US
        found.setdefault(seen, Choice(seen[0], seen[1], cost_us))
    return tuple(found.values())


def _as_seen(node: fx.Node, inputs: Sequence[Placement | None], output: Placement) -> NodeStrategy:
    """R|P means R on a tensor without gradient."""
    seen = tuple(
        REPLICATE if p is not None and p.kind == "R|P" and not source.meta.get("grad") else p
        for p, source in zip(inputs, node.all_input_nodes, strict=False)
    )
    return seen, REPLICATE if output.kind == "R|P" and not node.meta.get("grad") else output


def _own_us(
    node: fx.Node, strategy: NodeStrategy, measures: BlockMeasures, machine: Machine, group: GroupCost
) -> float:
    if node.op != "call_function" or node not in measures.sizes:
        return 0.0
    forward, backward = machine.seconds(measures.sizes[node], *strategy, group.size)
    return (forward + backward + _inner_s(node, strategy, measures, group)) * 1e6


def _inner_s(node: fx.Node, strategy: NodeStrategy, measures: BlockMeasures, group: GroupCost) -> float:
    """Communication inside an op: the vocabulary-parallel loss reduces three fp32 numbers a token."""
    first = strategy[0][0] if strategy[0] else None
    if "cross_entropy" in op_name(node) and first is not None and first.is_shard and not strategy[1].is_partial:
        return 3 * group.seconds("all_reduce", 4 * measures.tokens)
    return 0.0


def _is_weight(node: fx.Node) -> bool:
    return node.op == "get_attr" and bool(node.meta.get("grad"))


def _conversion_us(
    node: fx.Node, have: Placement, wanted: Placement, measures: BlockMeasures, group: GroupCost
) -> float | None:
    kinds = CONVERSIONS.get((have.kind, wanted.kind))
    if kinds is None:
        return None
    root = storage_root(node)
    if _is_weight(root) and len(root.meta["shape"]) >= 2 and have.is_shard:
        return None  # stored sharded, used sharded
    if _is_weight(node):
        share = GRADIENT_AMORTISATION if kinds[0] == "none" else 1
        return sum(group.seconds(kind, measures.tensor_bytes[node]) for kind in kinds) / share * 1e6
    counted = kinds if node.meta.get("grad") else kinds[:1]
    return sum(group.seconds(kind, measures.tensor_bytes[node]) for kind in counted) * 1e6


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
        comm[0] += _inner_s(node, strategy, measures, group)
        share = group.size if any(p is not None and p.is_shard for p in (*strategy[0], strategy[1])) else 1
        flops[0] += op.forward_flops / share
        flops[1] += op.backward_flops / share
        working = max(working, _touched_bytes(node, strategy, measures, group.size))
    collectives = []
    for source, have, wanted in _conversions(traced, nodes, layout, sequence_sharding):
        kinds = CONVERSIONS[have.kind, wanted.kind]
        for i, kind in enumerate(kinds if source.meta.get("grad") else kinds[:1]):
            seconds = group.seconds(kind, measures.tensor_bytes[source])
            if seconds and i == 1 and _is_weight(source):
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
        leaving = _leaving(node, inside, traced, sequence_sharding)
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
