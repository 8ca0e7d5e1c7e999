"""From a block of the captured graph to its ILP and back to strategies per node.

A block is one layer class (its first layer stands for all) or the glue (prologue, epilogue and what lies between,
solved together because a tied weight has one placement). Tensors that cross a block's border have a fixed placement:
the residual stream [batch, seq, hidden] is R, or S(1) under sequence sharding; everything else is R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.block_ilp import BlockNode, BlockProblem, BlockSolution, Choice, layout_cost, solve_block
from autopar.cost_model.block_measures import BlockMeasures
from autopar.cost_model.block_reduce import reduce_block
from autopar.cost_model.comm_cost import GroupCost
from autopar.cost_model.compute import Machine, local_kernels
from autopar.cost_model.op_facts import storage_root
from autopar.cost_model.propagation import border_placement
from autopar.cost_model.solver import SolverPolicy
from autopar.ir import TracedModel
from autopar.placement import CONVERSIONS, REPLICATE, Placement

__all__ = [
    "Block",
    "NodeStrategy",
    "inner_reductions",
    "is_weight",
    "leaving_placement",
    "solve_layout",
]

GRADIENT_AMORTISATION = 8
"""Micro-batches over which the ILP spreads a replicated parameter's once-a-step gradient reduction. The final price
uses the real number; the layout hardly depends on it."""

_TIE_US = 0.01
"""On equal cost reduce a partial tensor at once, and copy late: deterministic, and easier to read."""

_REPLICATED_WEIGHT_US = 1e5
"""Weights of two or more dims are stored and used sharded; one that no strategy can use sharded pays this and stays
replicated. Larger than any conversion, so never worth it otherwise."""

NodeStrategy: TypeAlias = tuple[tuple[Placement | None, ...], Placement]
"""Placements of the inputs and of the output."""


@dataclass(frozen=True)
class Block:
    """Nodes of a block in graph order: call_function, get_attr and placeholder nodes."""

    name: str
    nodes: tuple[fx.Node, ...]


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
    policy: SolverPolicy | None = None,
) -> tuple[dict[fx.Node, NodeStrategy], BlockSolution] | None:
    """Best strategies of a block by the block ILP; None if nothing connects.

    `fixed` holds the placements of parameters that another block owns or a pin sets.
    """
    problem, index = _problem(traced, block, strategies, measures, fixed, machine, group, sequence_sharding)
    reduction = reduce_block(problem)
    solution = solve_block(reduction.problem, policy=policy)
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


class _Builder:
    """The ILP of one block under construction: `index[node]` is the problem node that makes a graph node's tensor."""

    def __init__(self, traced: TracedModel, block: Block, fixed: Mapping[fx.Node, Placement], sharding: bool) -> None:
        self.traced, self.fixed, self.sequence_sharding = traced, fixed, sharding
        self.inside = set(block.nodes)
        self.nodes: list[BlockNode] = []
        self.owners: list[fx.Node] = []
        self.index: dict[fx.Node, int] = {}
        self._by_parameter: dict[str, int] = {}

    def add(self, node: fx.Node, choices: tuple[Choice, ...]) -> None:
        """An op, parameter or input of the block; a tied weight that occurs again is the same problem node."""
        name = str(node.target) if node.op == "get_attr" else ""
        if name in self._by_parameter:
            self.index[node] = self._by_parameter[name]
            return
        sources = tuple(self._source_of(n) for n in node.all_input_nodes) if node.op == "call_function" else ()
        self.index[node] = self._append(node, BlockNode(str(node), choices, sources))
        if name:
            self._by_parameter[name] = self.index[node]

    def add_border(self, node: fx.Node) -> None:
        """What the border asks of a tensor that leaves the block."""
        leaving = leaving_placement(node, self.inside, self.traced, self.sequence_sharding)
        if leaving is not None and node.op == "call_function":
            asked = (Choice((leaving,), REPLICATE, 0.0),)
            self._append(node, BlockNode(f"out {node}", asked, (self.index[node],)))

    def _source_of(self, node: fx.Node) -> int | None:
        if node.meta.get("dtype") is None:
            return None
        if node not in self.index:  # enters over the border
            placement = self.fixed.get(node, border_placement(node, self.sequence_sharding))
            self.index[node] = self._append(node, BlockNode(f"in {node}", (Choice((), placement, 0.0),)))
        return self.index[node]

    def _append(self, owner: fx.Node, node: BlockNode) -> int:
        self.nodes.append(node)
        self.owners.append(owner)
        return len(self.nodes) - 1


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
    builder = _Builder(traced, block, fixed, sequence_sharding)
    tensors = [node for node in block.nodes if node.meta.get("dtype") is not None]
    for node in tensors:
        allowed = strategies[node] if sequence_sharding else _without_sequence(node, strategies[node], traced)
        builder.add(node, _choices(node, allowed, measures, fixed, machine, group))
    for node in tensors:
        builder.add_border(node)
    prices: dict[tuple[fx.Node, Placement, Placement], float | None] = {}
    roots: dict[fx.Node, fx.Node] = {}

    def conversion_us(u: int, have: Placement, wanted: Placement) -> float | None:
        key = (builder.owners[u], have, wanted)
        if key not in prices:
            if key[0] not in roots:
                roots[key[0]] = storage_root(key[0])
            prices[key] = _conversion_us(*key, roots[key[0]], measures, group)
        return prices[key]

    return BlockProblem(tuple(builder.nodes), conversion_us), builder.index


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


def leaving_placement(
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
    return border_placement(node, sequence_sharding)


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
    kernels = local_kernels(measures.sizes[node], *strategy, group.size)
    reductions = inner_reductions(node, strategy, measures)
    seconds = sum(machine.kernel_s(kernel) for kernel in kernels)
    return (seconds + sum(group.seconds("all_reduce", whole) for whole in reductions)) * 1e6


def inner_reductions(node: fx.Node, strategy: NodeStrategy, measures: BlockMeasures) -> tuple[float, ...]:
    """Bytes of the all-reduces inside an op: the vocabulary-parallel loss reduces the peak of each token, in fp32, then
    the sum of exponentials and the target's logit together."""
    first = strategy[0][0] if strategy[0] else None
    if "cross_entropy" in op_name(node) and first is not None and first.is_shard and not strategy[1].is_partial:
        return 4 * measures.tokens, 8 * measures.tokens
    return ()


def is_weight(node: fx.Node) -> bool:
    return node.op == "get_attr" and bool(node.meta.get("grad"))


def _conversion_us(
    node: fx.Node, have: Placement, wanted: Placement, root: fx.Node, measures: BlockMeasures, group: GroupCost
) -> float | None:
    kinds = CONVERSIONS.get((have.kind, wanted.kind))
    if kinds is None:
        return None
    if is_weight(root) and len(root.meta["shape"]) >= 2 and have.is_shard:
        return None  # stored sharded, used sharded
    if is_weight(node):
        share = GRADIENT_AMORTISATION if kinds[0] == "none" else 1
        return sum(group.seconds(kind, measures.tensor_bytes[node]) for kind in kinds) / share * 1e6
    counted = kinds if node.meta.get("grad") else kinds[:1]
    return sum(group.seconds(kind, measures.tensor_bytes[node]) for kind in counted) * 1e6
