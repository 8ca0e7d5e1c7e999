"""The block ILP against brute force on random graphs, and the sharing of conversions."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.cost_model.block_ilp import BlockNode, BlockProblem, Choice, layout_cost, solve_block
from autopar.cost_model.block_reduce import reduce_block
from autopar.placement import CONVERSIONS, PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Placement, Shard

STATES = (REPLICATE, REPLICATE_PARTIAL_GRAD, PARTIAL, Shard(0), Shard(1))


def random_problem(seed: int) -> BlockProblem:
    rng = random.Random(seed)
    nodes: list[BlockNode] = []
    for u in range(rng.randint(3, 7)):
        sources = tuple(rng.randrange(u) for _ in range(rng.randint(1, 2))) if u else ()
        choices = tuple(
            Choice(tuple(rng.choice(STATES) for _ in sources), rng.choice(STATES), rng.uniform(0, 10))
            for _ in range(rng.randint(1, 4))
        )
        nodes.append(BlockNode(f"n{u}", choices, sources))
    prices = {(u, a, b): rng.uniform(0, 10) for u in range(len(nodes)) for a in STATES for b in STATES}

    def conversion_us(u: int, have: Placement, wanted: Placement) -> float | None:
        return prices[u, have, wanted] if (have.kind, wanted.kind) in CONVERSIONS else None

    return BlockProblem(tuple(nodes), conversion_us)


def test_optimal_on_random_graphs() -> None:
    feasible = 0
    for seed in range(120):
        problem = random_problem(seed)
        every = itertools.product(*(range(len(node.choices)) for node in problem.nodes))
        costs = [cost for picks in every if (cost := layout_cost(problem, picks)) is not None]
        found = solve_block(problem)
        assert (found is None) == (not costs)
        reduction = reduce_block(problem)
        smaller = solve_block(reduction.problem)
        assert (smaller is None) == (not costs)
        if found is not None and smaller is not None:
            assert found.cost_us == pytest.approx(min(costs), rel=1e-9)
            assert layout_cost(problem, reduction.expand(smaller.picks)) == pytest.approx(min(costs), rel=1e-9)
            feasible += 1
    assert feasible >= 40


def test_a_conversion_shared_by_three_consumers_is_paid_once() -> None:
    """Gathering once for q, k and v (9 us) must win over replicated work that costs 4 us at each."""
    producer = BlockNode("norm", (Choice((), Shard(1), 0.0),))
    gathered = Choice((REPLICATE_PARTIAL_GRAD,), Shard(2), 0.0)
    local = Choice((Shard(1),), Shard(2), 4.0)
    consumers = [BlockNode(name, (gathered, local), (0,)) for name in ("q", "k", "v")]
    found = solve_block(BlockProblem((producer, *consumers), lambda u, have, wanted: 9.0))
    assert found is not None
    assert found.picks == (0, 0, 0, 0)
    assert found.cost_us == pytest.approx(9.0)
