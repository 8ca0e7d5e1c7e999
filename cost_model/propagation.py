"""What a plan leaves unsaid: the strategy of every op, by one deterministic forward walk.

The placements of the parameters decide most of it. Per op, in order of execution:

1. an op named in the plan takes the plan's strategy;
2. a sharded weight is used as it is stored, never gathered, if any strategy allows it;
3. among the strategies left, the one whose conversions of the arguments move the fewest bytes, forward and backward;
   ties go to the order of the strategy table (replicated first, then partial sums, then shards);
4. a tensor that leaves its segment lies as the border says: S(1) over tp under sequence sharding, else R.

The search emits overrides only where its optimum differs, so that a plan stays short and a hand-written one is
possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import sympy
from torch import fx

from autopar.cost_model.strategy_table import Strategy, StrategyTable, strategy_table
from autopar.errors import PlanMismatchError
from autopar.ir import TracedModel
from autopar.placement import CONVERSIONS, REPLICATE, Placement, Shard, parse_placement
from autopar.plan import Plan

__all__ = ["Propagation", "border_placement", "conversion_bytes", "propagate"]


class Propagation:
    """Placements of a whole graph: `strategy[node]`, `placement[node]` inside its segment, `leaving[node]` outside."""

    def __init__(self) -> None:
        self.strategy: dict[fx.Node, Strategy] = {}
        self.placement: dict[fx.Node, Placement] = {}
        self.leaving: dict[fx.Node, Placement] = {}

    def seen_by(self, source: fx.Node, user: fx.Node) -> Placement:
        """How `source` lies where `user` reads it, before any conversion for `user`."""
        if source.op == "call_function" and source.meta["segment"] != user.meta["segment"]:
            return self.leaving.get(source, self.placement[source])
        return self.placement[source]


Choose = Callable[[fx.Node, Strategy], Strategy]


def propagate(traced: TracedModel, plan: Plan, table: StrategyTable | None = None) -> Propagation:
    """Placements over tp of every tensor node of `traced` under `plan`.

    Raises PlanMismatchError for a parameter placement or an op strategy that the rules do not allow.
    """
    table = table or strategy_table(traced, plan.degrees.tp, plan.seq_len)
    result = Propagation()
    sizes = {"batch": plan.micro_batch, "seq": plan.seq_len}
    for node in traced.graph_module.graph.nodes:
        if node not in table:
            continue
        if node.op == "placeholder":
            result.placement[node] = REPLICATE
        elif node.op == "get_attr":
            result.placement[node] = _stored(node, plan, table)
        else:
            chosen = _named(node, plan, table) or _default(node, table, result, sizes, plan)
            result.strategy[node] = chosen
            result.placement[node] = chosen.output
            if any(u.op == "call_function" and u.meta["segment"] != node.meta["segment"] for u in node.users):
                result.leaving[node] = border_placement(node, plan)
    return result


def border_placement(node: fx.Node, plan: Plan) -> Placement:
    """How a tensor that leaves its segment lies there: the residual stream [batch, seq, hidden] as the plan says, the
    rest replicated."""
    shape = node.meta["shape"]
    stream = node.meta["grad"] and len(shape) == 3 and str(shape[1]) == "seq"
    return Shard(1) if stream and plan.sequence_sharding and plan.seq_len % plan.degrees.tp == 0 else REPLICATE


def conversion_bytes(
    node: fx.Node, source: Placement, target: Placement, ranks: int, sizes: Mapping[str, int], itemsize: int = 1
) -> float:
    """Bytes one rank moves to convert `node` from `source` to `target`, forward and backward; inf if there is no way.

    R -> P is for parameters: a bias that joins a partial sum. A tensor without gradient pays forward only.
    """
    if source == target or (not node.meta["grad"] and source.is_replicated and target.is_replicated):
        return 0.0
    pair = CONVERSIONS.get((source.kind, target.kind))
    if pair is None or (pair[0] == "keep_first" and node.op != "get_attr"):
        return math.inf
    whole = itemsize * math.prod(_numbers(node, sizes))
    moved = {
        "none": 0.0,
        "slice": 0.0,
        "pad": 0.0,
        "keep_first": 0.0,
        "all_gather": whole * (ranks - 1) / ranks,
        "reduce_scatter": whole * (ranks - 1) / ranks,
        "all_reduce": 2 * whole * (ranks - 1) / ranks,
        "all_to_all": whole * (ranks - 1) / ranks**2,
    }
    return moved[pair[0]] + (moved[pair[1]] if node.meta["grad"] else 0.0)


def _numbers(node: fx.Node, sizes: Mapping[str, int]) -> list[int]:
    shape = node.meta["shape"]
    shape = shape[0] if shape and isinstance(shape[0], tuple) else shape
    return [d if isinstance(d, int) else _number(d, *(sizes[s.name] for s in _symbols(d))) for d in shape]


@lru_cache(maxsize=1024)
def _number(dim: sympy.Expr, *values: int) -> int:
    """`dim` at values of its symbols; a graph repeats few distinct dims very often, and sympy's subs is slow."""
    return int(dim.subs(dict(zip(_symbols(dim), values, strict=True))))


@lru_cache(maxsize=1024)
def _symbols(dim: sympy.Expr) -> tuple[sympy.Symbol, ...]:
    return tuple(sorted(dim.free_symbols, key=str))


def _stored(node: fx.Node, plan: Plan, table: StrategyTable) -> Placement:
    placement = parse_placement(plan.parameter_placement(str(node.target)))
    options = [s.output for s in table[node]]
    if placement not in options:
        raise PlanMismatchError(
            f"placement {placement} is not possible for shape {node.meta['shape']} over tp={plan.degrees.tp}",
            where=f"parameters[{node.target}]",
            try_=f"one of {', '.join(map(str, options))}",
        )
    return placement


def _named(node: fx.Node, plan: Plan, table: StrategyTable) -> Strategy | None:
    text = plan.op_strategy(node.meta["key"])
    if text is None:
        return None
    options = {str(s): s for s in table[node]}
    if text not in options:
        raise PlanMismatchError(
            f"strategy {text!r} is not possible", where=f"ops[{node.meta['key']}]", try_=f"one of {'; '.join(options)}"
        )
    return options[text]


def _default(
    node: fx.Node, table: StrategyTable, result: Propagation, sizes: Mapping[str, int], plan: Plan
) -> Strategy:
    options = _using_weights_as_stored(node, table[node], result)

    def moved(strategy: Strategy) -> float:
        return sum(
            conversion_bytes(source, result.seen_by(source, node), wanted, plan.degrees.tp, sizes)
            for source, wanted in zip(node.all_input_nodes, strategy.inputs, strict=True)
            if wanted is not None
        )

    return min(options, key=moved)


def _using_weights_as_stored(node: fx.Node, options: tuple[Strategy, ...], result: Propagation) -> tuple[Strategy, ...]:
    sharded = [i for i, n in enumerate(node.all_input_nodes) if _is_sharded_state(n, result)]
    kept = tuple(s for s in options if all(s.inputs[i] == result.placement[node.all_input_nodes[i]] for i in sharded))
    return kept or options


def _is_sharded_state(node: fx.Node, result: Propagation) -> bool:
    """A sharded parameter, or a transposed view of one."""
    placement = result.placement.get(node)
    if placement is None or not placement.is_shard:
        return False
    if node.op == "get_attr":
        return True
    return node.op == "call_function" and len(node.all_input_nodes) == 1 and node.all_input_nodes[0].op == "get_attr"
