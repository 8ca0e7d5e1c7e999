"""Block ILP: how every op of one block is sharded over the tp axis.

Sets
    nodes u of the block in order: ops, parameters, and the block's borders (one choice each); choices k of node u, each
    a strategy: a placement per input and one of the output. P_u: distinct output placements, Q_e: distinct placements
    that consumer c of edge e = (u -> c, slot) asks for
Variables
    x[u,k] in {0,1}   node u uses strategy k
    z[e,a,b] >= 0     edge e carries placement a converted to b (only pairs that `CONVERSIONS` offers)
    w[u,a,b] >= 0     the conversion a -> b of u's output is made; shared by all consumers that ask for b
Objective (microseconds)
    sum_{u,k} cost[u,k] x[u,k]  +  sum_{u,a,b} conversion[u,a,b] w[u,a,b]
    cost: forward and backward of the op at local shapes; conversion: value collective and its gradient dual
Constraints
    (1) sum_k x[u,k] = 1                                          for every node          add_one_choice_per_node
    (2) sum_b z[e,a,b] = sum_{k of u: output a} x[u,k]            for every edge and a    add_edges_leave_producers
    (3) sum_a z[e,a,b] = sum_{k of c: slot asks b} x[c,k]         for every edge and b    add_edges_enter_consumers
    (4) w[u,a,b] >= z[e,a,b]                                      for every edge of u     add_shared_conversions

(2) and (3) are the tight edge form: the relaxation is nearly integral, unlike z >= x + x' - 1. Without (4) the gather
before q, k and v would be priced three times. Both border placements of the residual stream are solved as two
problems. The answer is priced again outside the solver by `layout_cost`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from autopar.cost_model.block_beam import beam_search
from autopar.cost_model.solver import Model, Solution, SolverError, SolverPolicy, solve
from autopar.placement import Placement

__all__ = ["BlockNode", "BlockProblem", "BlockSolution", "Choice", "layout_cost", "solve_block"]


ENUMERATED = 64
"""Combinations of strategies that are tried one by one instead of being sent to the solver."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy of a node: placement per input slot (None: not a tensor), of the output, and its own cost in us."""

    inputs: tuple[Placement | None, ...]
    output: Placement
    cost_us: float


@dataclass(frozen=True)
class BlockNode:
    """`sources[slot]` is the index of the node that feeds the slot."""

    name: str
    choices: tuple[Choice, ...]
    sources: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class BlockProblem:
    """`conversion_us(u, a, b)` prices the change of node u's output from a to b; None where none is offered."""

    nodes: tuple[BlockNode, ...]
    conversion_us: Callable[[int, Placement, Placement], float | None]


@dataclass(frozen=True)
class BlockSolution:
    """`picks[u]` is the index of the strategy of node u; `notes` says which solvers gave no answer, and why."""

    picks: tuple[int, ...]
    cost_us: float
    bound_us: float
    variables: int
    constraints: int
    solve_s: float
    solver: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Edge:
    producer: int
    consumer: int
    slot: int


def solve_block(problem: BlockProblem, *, policy: SolverPolicy | None = None) -> BlockSolution | None:
    """Least-cost strategies, or None if no combination of strategies is connected by offered conversions.

    Where no solver answers, a beam search does. Raises SolverError if that finds nothing and proves nothing.
    """
    if math.prod(len(node.choices) for node in problem.nodes) <= ENUMERATED:
        return _enumerate(problem)
    model = Model("block")
    edges = [
        _Edge(source, c, slot)
        for c, node in enumerate(problem.nodes)
        for slot, source in enumerate(node.sources)
        if source is not None
    ]
    x = add_one_choice_per_node(model, problem)
    z = _add_edge_columns(model, problem, edges)
    add_edges_leave_producers(model, problem, edges, x, z)
    add_edges_enter_consumers(model, problem, edges, x, z)
    add_shared_conversions(model, problem, edges, z)
    answer = solve(model, policy=policy)
    if answer.status == "no answer":
        return _without_solver(problem, model, answer)
    if not answer.values:
        return None
    picks = tuple(max(range(len(row)), key=lambda k: answer.values[row[k]]) for row in x)
    actual = layout_cost(problem, picks)
    assert actual is not None, "the solver chose a conversion that is not offered"
    assert abs(actual - answer.objective) <= 1e-6 * max(1.0, actual), (actual, answer.objective)
    return BlockSolution(picks, actual, answer.bound, len(model.costs), len(model.rows), answer.solve_s, answer.solver,
                         answer.notes)  # fmt: skip


def _without_solver(problem: BlockProblem, model: Model, answer: Solution) -> BlockSolution | None:
    started = time.perf_counter()
    try:
        found = beam_search(problem)
    except ValueError as error:
        raise SolverError(f"no solver answers, and the beam search found {error}", where="block ILP",
                          try_="pip install highspy") from error  # fmt: skip
    if found is None:
        return None
    picks, bound_us = found
    cost_us = layout_cost(problem, picks)
    assert cost_us is not None, "the beam search chose a conversion that is not offered"
    spent_s = answer.solve_s + time.perf_counter() - started
    return BlockSolution(picks, cost_us, min(cost_us, bound_us), len(model.costs), len(model.rows), spent_s,
                         "heuristic", answer.notes)  # fmt: skip


def _enumerate(problem: BlockProblem) -> BlockSolution | None:
    """The least of all combinations, where they are few: no programme needs to be built for them."""
    started = time.perf_counter()
    costs = {
        picks: cost
        for picks in itertools.product(*(range(len(node.choices)) for node in problem.nodes))
        if (cost := layout_cost(problem, picks)) is not None
    }
    if not costs:
        return None
    best = min(costs, key=costs.__getitem__)
    return BlockSolution(best, costs[best], costs[best], 0, 0, time.perf_counter() - started)


def layout_cost(problem: BlockProblem, picks: tuple[int, ...]) -> float | None:
    """Cost of given strategies in us, without any solver; None if an edge needs a conversion that is not offered."""
    total = sum(node.choices[k].cost_us for node, k in zip(problem.nodes, picks, strict=True))
    converted: set[tuple[int, Placement, Placement]] = set()
    for c, node in enumerate(problem.nodes):
        for wanted, source in zip(node.choices[picks[c]].inputs, node.sources, strict=True):
            if source is not None and wanted is not None:
                converted.add((source, problem.nodes[source].choices[picks[source]].output, wanted))
    for u, have, wanted in sorted(converted, key=str):
        if have != wanted:
            price = problem.conversion_us(u, have, wanted)
            if price is None:
                return None
            total += price
    return total


def add_one_choice_per_node(model: Model, problem: BlockProblem) -> list[list[int]]:
    """(1)"""
    x = []
    for node in problem.nodes:
        row = [model.add_binary(choice.cost_us) for choice in node.choices]
        model.add_row([(column, 1.0) for column in row], "==", 1.0)
        x.append(row)
    return x


_EdgeColumns = list[dict[tuple[Placement, Placement], int]]


def _add_edge_columns(model: Model, problem: BlockProblem, edges: list[_Edge]) -> _EdgeColumns:
    """z, one column for every pair of placements that is equal or convertible."""
    columns: _EdgeColumns = []
    for edge in edges:
        pairs = {}
        for have in _outputs(problem, edge.producer):
            for wanted in _wanted(problem, edge):
                if have == wanted or problem.conversion_us(edge.producer, have, wanted) is not None:
                    pairs[have, wanted] = model.add_continuous()
        columns.append(pairs)
    return columns


def add_edges_leave_producers(
    model: Model, problem: BlockProblem, edges: list[_Edge], x: list[list[int]], z: _EdgeColumns
) -> None:
    """(2)"""
    for edge, pairs in zip(edges, z, strict=True):
        choices = problem.nodes[edge.producer].choices
        for have in _outputs(problem, edge.producer):
            leaving = [(column, 1.0) for (a, _), column in pairs.items() if a == have]
            made = [(x[edge.producer][k], -1.0) for k, choice in enumerate(choices) if choice.output == have]
            model.add_row(leaving + made, "==", 0.0)


def add_edges_enter_consumers(
    model: Model, problem: BlockProblem, edges: list[_Edge], x: list[list[int]], z: _EdgeColumns
) -> None:
    """(3)"""
    for edge, pairs in zip(edges, z, strict=True):
        choices = problem.nodes[edge.consumer].choices
        for wanted in _wanted(problem, edge):
            entering = [(column, 1.0) for (_, b), column in pairs.items() if b == wanted]
            asked = [(x[edge.consumer][k], -1.0) for k, c in enumerate(choices) if c.inputs[edge.slot] == wanted]
            model.add_row(entering + asked, "==", 0.0)


def add_shared_conversions(model: Model, problem: BlockProblem, edges: list[_Edge], z: _EdgeColumns) -> None:
    """(4); with a single consumer z itself carries the price."""
    shared: dict[tuple[int, Placement, Placement], list[int]] = {}
    for edge, pairs in zip(edges, z, strict=True):
        for (have, wanted), column in pairs.items():
            if have != wanted:
                shared.setdefault((edge.producer, have, wanted), []).append(column)
    for (u, have, wanted), columns in shared.items():
        price = problem.conversion_us(u, have, wanted)
        assert price is not None
        if len(columns) == 1:
            model.costs[columns[0]] = price
        elif price > 0:
            w = model.add_continuous(price)
            for column in columns:
                model.add_row([(w, 1.0), (column, -1.0)], ">=", 0.0)


def _outputs(problem: BlockProblem, node: int) -> list[Placement]:
    return list(dict.fromkeys(choice.output for choice in problem.nodes[node].choices))


def _wanted(problem: BlockProblem, edge: _Edge) -> list[Placement]:
    found = (choice.inputs[edge.slot] for choice in problem.nodes[edge.consumer].choices)
    return list(dict.fromkeys(placement for placement in found if placement is not None))
