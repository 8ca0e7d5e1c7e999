"""Field case ac-03: which layers keep their activations, within a budget of bytes and at the least time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from autopar.cost_model.mode_mixes import LayerClass, LayerMode
from autopar.cost_model.pipeline_problem import PipelineProblem, StageCost, StagePrice
from autopar.cost_model.stage_table import price_stage

Block = tuple[float, float]  # bytes kept, seconds to compute them again


def solved(blocks: Sequence[Block], budget: float) -> StagePrice | None:
    """One stage; every block is a class of its own, keeps everything or is recomputed from nothing kept."""
    classes = tuple(
        LayerClass((LayerMode("none", 1.0, kept), LayerMode("full", 1.0 + again_s, 0.0)), 0.0)
        for kept, again_s in blocks
    )
    problem = PipelineProblem(tuple(range(len(blocks))), classes, (StageCost(),), 1, budget)
    return price_stage(problem, 0, (1,) * len(blocks))


def best(blocks: Sequence[Block], budget: float) -> float:
    """Seconds of the best choice of all."""
    choices = itertools.product((True, False), repeat=len(blocks))
    return min(
        sum(1.0 + (0.0 if keeps else again_s) for keeps, (_, again_s) in zip(choice, blocks, strict=True))
        for choice in choices
        if sum(kept for keeps, (kept, _) in zip(choice, blocks, strict=True) if keeps) <= budget
    )


def test_ac_03_one_of_three_equal_blocks_is_kept() -> None:
    found = solved([(1.0, 1.0)] * 3, 1.0)
    assert found is not None
    assert sum(kept for kept, _ in found.modes) == 1
    assert found.memory_bytes == 1.0


@pytest.mark.parametrize("first_seed", range(0, 500, 100))
def test_ac_03_never_above_the_budget_and_always_the_best(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        rng = random.Random(seed)
        blocks = [(rng.uniform(0.1, 4), rng.uniform(0.01, 1)) for _ in range(8)]
        budget = rng.uniform(0, sum(kept for kept, _ in blocks))
        found = solved(blocks, budget)
        assert found is not None
        held = sum(kept for (keeps, _), (kept, _) in zip(found.modes, blocks, strict=True) if keeps)
        assert held == pytest.approx(found.memory_bytes, abs=1e-9)
        assert held <= budget, f"seed {seed}"
        assert found.time_s == pytest.approx(best(blocks, budget), abs=1e-9), f"seed {seed}"
