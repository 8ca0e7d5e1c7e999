"""Exact reduction of a block problem before the ILP sees it.

Two folds, repeated until neither applies; both keep the optimum, and `expand` gives back a strategy for every node:

- forward: a node with at most one source and one consumer edge (a weight, a border, a slice) becomes part of its
  consumer, which then asks the node's source for what the node wants
- chain: a node with one source whose only consumer it is (linear -> view -> transpose) is folded with it into one node

Of the pairs with the same inputs and the same output the cheapest stays; a choice that another with the same inputs
beats for every set of placements its consumers can ask for is dropped.

Nodes read by several consumers are left alone: their conversions are shared, which only the ILP can decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost_model.block_ilp import BlockNode, BlockProblem, Choice
from autopar.placement import Placement

__all__ = ["Reduction", "reduce_block"]

MAX_CHOICES = 48
"""A fold that would leave a node with more choices than this is not made: it would cost the ILP more than it saves."""


@dataclass(frozen=True)
class _Row:
    """A choice of a reduced node, and what it stands for: (original node, choice) pairs."""

    inputs: tuple[Placement | None, ...]
    output: Placement
    cost_us: float
    picks: tuple[tuple[int, int], ...]


@dataclass
class _Node:
    """A reduced node. `tail` is the original node that makes its output, which prices its conversions."""

    rows: list[_Row]
    sources: list[int | None]
    tail: int


@dataclass(frozen=True)
class Reduction:
    """`problem` is the smaller problem; `expand` turns its answer into one of the original problem."""

    problem: BlockProblem
    rows: tuple[tuple[_Row, ...], ...]
    size: int

    def expand(self, picks: tuple[int, ...]) -> tuple[int, ...]:
        full = [0] * self.size
        for rows, k in zip(self.rows, picks, strict=True):
            for node, choice in rows[k].picks:
                full[node] = choice
        return tuple(full)


def reduce_block(problem: BlockProblem) -> Reduction:
    """The reduced problem; equal in optimum to `problem`."""
    nodes: dict[int, _Node] = {
        u: _Node([_Row(c.inputs, c.output, c.cost_us, ((u, k),)) for k, c in enumerate(node.choices)],
                 list(node.sources), u)
        for u, node in enumerate(problem.nodes)
    }  # fmt: skip
    for u in nodes:
        _drop_dominated(problem, nodes, u)
    changed = True
    while changed:
        changed = False
        for u in sorted(nodes):
            if u in nodes and (_fold_forward(problem, nodes, u) or _fold_chain(problem, nodes, u)):
                changed = True
    return _finish(problem, nodes)


def _drop_dominated(problem: BlockProblem, nodes: dict[int, _Node], u: int) -> None:
    """Drop a choice if another with the same inputs is no dearer, whatever set of placements its consumers ask for."""
    node = nodes[u]
    wanted = sorted({w for c, slot in _edges_from(nodes, u) for row in nodes[c].rows
                     if (w := row.inputs[slot]) is not None}, key=str)  # fmt: skip
    prices = {o: [_convert_us(problem, node.tail, o, w) for w in wanted] for o in {row.output for row in node.rows}}
    by_inputs: dict[tuple[Placement | None, ...], list[_Row]] = {}
    for row in sorted(node.rows, key=lambda row: row.cost_us):
        same = by_inputs.setdefault(row.inputs, [])
        own = prices[row.output]
        if not any(other.cost_us + _excess_us(prices[other.output], own) <= row.cost_us for other in same):
            same.append(row)
    node.rows = [row for same in by_inputs.values() for row in same]


def _excess_us(other: list[float | None], own: list[float | None]) -> float:
    """The most that conversions from one output can cost more than from another, over any set of targets."""
    total = 0.0
    for theirs, ours in zip(other, own, strict=True):
        if ours is None:
            continue
        if theirs is None:
            return math.inf
        total += max(0.0, theirs - ours)
    return total


def _edges_from(nodes: dict[int, _Node], u: int) -> list[tuple[int, int]]:
    return [(c, slot) for c, node in nodes.items() for slot, source in enumerate(node.sources) if source == u]


def _convert_us(problem: BlockProblem, tail: int, have: Placement, wanted: Placement | None) -> float | None:
    if wanted is None or have == wanted:
        return 0.0
    return problem.conversion_us(tail, have, wanted)


def _fold_forward(problem: BlockProblem, nodes: dict[int, _Node], u: int) -> bool:
    node, edges = nodes[u], _edges_from(nodes, u)
    if len(edges) != 1 or len(node.sources) > 1:
        return False
    consumer, slot = nodes[edges[0][0]], edges[0][1]
    rows: dict[tuple[tuple[Placement | None, ...], Placement], _Row] = {}
    for first in node.rows:
        for second in consumer.rows:
            price = _convert_us(problem, node.tail, first.output, second.inputs[slot])
            if price is not None:
                inputs = (*second.inputs[:slot], *first.inputs, *second.inputs[slot + 1 :])
                cost_us = first.cost_us + price + second.cost_us
                _keep(rows, _Row(inputs, second.output, cost_us, first.picks + second.picks))
    if not rows or len(rows) > max(MAX_CHOICES, len(consumer.rows)):
        return False
    consumer.rows = list(rows.values())
    consumer.sources = consumer.sources[:slot] + node.sources + consumer.sources[slot + 1 :]
    del nodes[u]
    _drop_dominated(problem, nodes, edges[0][0])
    return True


def _fold_chain(problem: BlockProblem, nodes: dict[int, _Node], u: int) -> bool:
    node = nodes[u]
    sources = [source for source in node.sources if source is not None]
    if len(sources) != 1 or len(_edges_from(nodes, sources[0])) != 1:
        return False
    producer, slot = nodes[sources[0]], node.sources.index(sources[0])
    rows: dict[tuple[tuple[Placement | None, ...], Placement], _Row] = {}
    for first in producer.rows:
        for second in node.rows:
            price = _convert_us(problem, producer.tail, first.output, second.inputs[slot])
            if price is not None:
                cost_us = first.cost_us + price + second.cost_us
                _keep(rows, _Row(first.inputs, second.output, cost_us, first.picks + second.picks))
    if not rows or len(rows) > MAX_CHOICES:
        return False
    nodes[u] = _Node(list(rows.values()), producer.sources, node.tail)
    del nodes[sources[0]]
    _drop_dominated(problem, nodes, u)
    return True


def _keep(rows: dict[tuple[tuple[Placement | None, ...], Placement], _Row], row: _Row) -> None:
    key = (row.inputs, row.output)
    if key not in rows or row.cost_us < rows[key].cost_us:
        rows[key] = row


def _finish(problem: BlockProblem, nodes: dict[int, _Node]) -> Reduction:
    order = sorted(nodes)
    index = {u: i for i, u in enumerate(order)}
    reduced = tuple(
        BlockNode(
            problem.nodes[u].name,
            tuple(Choice(row.inputs, row.output, row.cost_us) for row in nodes[u].rows),
            tuple(None if source is None else index[source] for source in nodes[u].sources),
        )
        for u in order
    )
    tails = [nodes[u].tail for u in order]
    smaller = BlockProblem(reduced, lambda i, have, wanted: problem.conversion_us(tails[i], have, wanted))
    return Reduction(smaller, tuple(tuple(nodes[u].rows) for u in order), len(problem.nodes))
