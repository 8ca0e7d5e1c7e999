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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import sympy
from torch import fx

from autopar.cost_model.strategy_table import Strategy, StrategyTable, strategy_table
from autopar.errors import PlanMismatchError
from autopar.ir import Shape, TracedModel
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
        if source in self.leaving and source.meta["segment"] != user.meta["segment"]:
            return self.leaving[source]
        return self.placement[source]


def propagate(traced: TracedModel, plan: Plan, table: StrategyTable | None = None, axis: str = "tp") -> Propagation:
    """Placements over an axis of every tensor node of `traced` under `plan`.

    Over cp there is nothing to choose: parameters are whole, the residual stream is S(1), and what is computed from the
    inputs alone (masks, positions, shifted labels) is computed whole and cut where it meets the stream. The tp walk
    comes after: `seq` then is the length that cp left. A table of some segments walks these alone, since a tensor lies
    between segments as the border says.
    Raises PlanMismatchError for a parameter placement or an op strategy that the rules do not allow.
    """
    ranks = plan.degrees.tp if axis == "tp" else plan.degrees.cp
    tokens = plan.seq_len // plan.degrees.cp if axis == "tp" else plan.seq_len
    table = table or strategy_table(traced, ranks, tokens, axis)
    result = Propagation()
    walk = _Walk(plan, table, axis, ranks, {"batch": plan.micro_batch, "seq": tokens})
    for node in traced.graph_module.graph.nodes:
        if _leaves(node):
            result.leaving[node] = border_placement(node, axis == "cp" or plan.shards_sequence)
        if node not in table:
            continue
        if node.op == "placeholder":
            result.placement[node] = REPLICATE
        elif node.op == "get_attr":
            result.placement[node] = _stored(node, plan, table) if axis == "tp" else REPLICATE
        else:
            chosen = _named(node, plan, table) if axis == "tp" else None
            chosen = chosen or _default(node, walk, result)
            result.strategy[node] = chosen
            result.placement[node] = chosen.output
            if axis == "cp" and node in result.leaving and chosen.output.kind == "R|P":
                # Made of parameters alone: its gradient is partial, as theirs are, and nothing converts that.
                result.leaving[node] = chosen.output
    return result


@dataclass(frozen=True)
class _Walk:
    """What stays the same from op to op."""

    plan: Plan
    table: StrategyTable
    axis: str
    ranks: int
    sizes: Mapping[str, int]


def _leaves(node: fx.Node) -> bool:
    """Whether an op of another segment reads what this op makes."""
    ops = (u for u in (node, *node.users) if u.op == "call_function")
    return node.op == "call_function" and any(u.meta["segment"] != node.meta["segment"] for u in ops)


def border_placement(node: fx.Node, sequence_sharding: bool) -> Placement:
    """How a tensor lies where it leaves its segment: the residual stream [batch, seq, hidden] sharded if so wanted, the
    rest replicated."""
    shape: Shape = node.meta.get("shape") or ()
    stream = len(shape) == 3 and str(shape[1]) == "seq" and bool(node.meta.get("grad"))
    return Shard(1) if stream and sequence_sharding else REPLICATE


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


def _default(node: fx.Node, walk: _Walk, result: Propagation) -> Strategy:
    options = _using_weights_as_stored(node, walk.table[node], result)
    if walk.axis == "cp" and node.all_input_nodes and all(n.op == "get_attr" for n in node.all_input_nodes):
        # A transposed weight: its gradient may be partial as the weight's own may, summed once a step.
        partial = [s for s in options if s.output.kind == "R|P" and all(p is None or p.kind == "R|P" for p in s.inputs)]
        options = tuple(partial) or options
    # Over cp a gradient that is partial costs nothing more: parameters are summed over dp once a step in any case.
    free = walk.axis == "cp"
    inputs = node.all_input_nodes

    def moved(strategy: Strategy) -> tuple[float, bool]:
        bytes_ = sum(
            conversion_bytes(source, result.seen_by(source, node), wanted, walk.ranks, walk.sizes)
            for source, wanted in zip(inputs, strategy.inputs, strict=True)
            if wanted is not None and not (free and source.op == "get_attr" and wanted.is_replicated)
        )
        return bytes_, free and node.meta["grad"] and not strategy.output.is_shard

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
