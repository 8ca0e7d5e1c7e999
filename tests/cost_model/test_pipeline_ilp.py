"""The pipeline ILP against brute force, and the field cases on its level."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.cost_model.pipeline_ilp import MOST_CUTS, PipelineSolution, solve_pipeline, step_time
from autopar.cost_model.stage_table import (
    LayerClass,
    LayerMode,
    PipelineProblem,
    StageCost,
    StagePrice,
    StageTable,
    stage_memory,
)


def equal_layers(layers: int, stages: int, head_s: float = 0.0, micro_batches: int = 8) -> PipelineProblem:
    mode = LayerMode("none", 1.0, 0.0)
    costs = [StageCost() for _ in range(stages - 1)] + [StageCost(time_s=head_s)]
    return PipelineProblem((0,) * layers, (LayerClass((mode,), 0.0),), tuple(costs), micro_batches, 1e9)


def sizes(solution: PipelineSolution | None) -> list[int]:
    assert solution is not None
    return [j - i for i, j in solution.runs]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(26, 4, [7, 7, 6, 6]), (9, 2, [5, 4]), (11, 3, [4, 4, 3]), (5, 4, [2, 1, 1, 1]), (4, 3, [2, 1, 1])],
)
def test_layers_that_do_not_divide_are_all_kept(layers: int, stages: int, expected: list[int]) -> None:
    """Field case ppp-01: every layer exactly once and in order."""
    solution = solve_pipeline(equal_layers(layers, stages))
    assert sorted(sizes(solution), reverse=True) == expected
    assert solution is not None
    assert [i for run in solution.runs for i in range(*run)] == list(range(layers))


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    """Field case ppp-02: slowest stage 3, not 4."""
    solution = solve_pipeline(equal_layers(8, 4, head_s=2.0))
    assert solution is not None
    assert max(s.time_s for s in solution.stages) == 3.0
    assert sizes(solution)[-1] == 1


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="5 stages for 4 layers"):
        solve_pipeline(equal_layers(4, 5))


def random_problem(seed: int) -> PipelineProblem:
    rng = random.Random(seed)
    classes = rng.randint(1, 2)
    layers = tuple(rng.randrange(classes) for _ in range(rng.randint(3, 7)))
    stages = rng.randint(1, min(4, len(layers)))
    rates = []
    for _ in range(classes):
        t, w = rng.uniform(0.5, 2), rng.uniform(1, 4)
        none = LayerMode("none", t, w, rng.uniform(0, 1))
        full = LayerMode("full", t * rng.uniform(1.1, 1.4), w * rng.uniform(0.0, 0.3), w + rng.uniform(0, 1))
        rates.append(LayerClass(rng.choice([(none, full), (none, full), (none,), (full,)]), rng.uniform(0, 2)))
    m = rng.choice([1, 2, 5, 16])
    costs = tuple(
        StageCost(rng.uniform(0, 1), rng.uniform(0, 2), rng.uniform(0, 1), rng.uniform(0, 2), min(m, stages - s))
        for s in range(stages)
    )
    weights = [rng.uniform(0, 1) for _ in rates]
    return PipelineProblem(
        layers, tuple(rates), costs, m, rng.uniform(8, 40),
        lambda s, counts: 0.3 * s + sum(w * n for w, n in zip(weights, counts, strict=True)),
    )  # fmt: skip


def brute_force(problem: PipelineProblem) -> float | None:
    """Every cut and every number of recomputed layers per class and stage."""
    total, p = len(problem.layers), len(problem.stages)
    best = None
    for cuts in itertools.combinations(range(1, total), p - 1):
        borders = [0, *cuts, total]
        priced = [_brute_stage(problem, s, problem.layers[borders[s] : borders[s + 1]]) for s in range(p)]
        if all(priced):
            value = step_time([x for x in priced if x], problem.micro_batches)
            best = value if best is None else min(best, value)
    return best


def _brute_stage(problem: PipelineProblem, s: int, layers: tuple[int, ...]) -> StagePrice | None:
    counts = tuple(layers.count(c) for c in range(len(problem.classes)))
    options = [range(n + 1) if len(c.modes) == 2 else [0] for n, c in zip(counts, problem.classes, strict=True)]
    best = None
    for again in itertools.product(*options):
        memory = stage_memory(problem, s, counts, again)
        time_s = problem.stages[s].time_s + sum(
            (n - k) * c.modes[0].time_s + k * c.modes[-1].time_s
            for n, k, c in zip(counts, again, problem.classes, strict=True)
        )
        if memory <= problem.memory_bytes and (best is None or time_s < best.time_s):
            best = StagePrice(time_s, memory, problem.tail_s(s, counts), counts, again)
    return best


@pytest.mark.parametrize("most_cuts", [1, MOST_CUTS], ids=["by the ILP", "by the sweep"])
def test_optimal_on_random_instances(most_cuts: int) -> None:
    feasible = with_ilp = 0
    for seed in range(150):
        problem = random_problem(seed)
        expected, found = brute_force(problem), solve_pipeline(problem, most_cuts=most_cuts)
        if expected is None:
            assert found is None
            needed, _ = StageTable(problem).memory_needed()
            assert needed > problem.memory_bytes
            continue
        assert found is not None
        assert found.step_s == pytest.approx(expected, rel=1e-9)
        assert found.bound_s == pytest.approx(expected, rel=1e-9)
        feasible += 1
        with_ilp += found.variables > 0
    assert feasible >= 60
    assert with_ilp >= 20 if most_cuts == 1 else with_ilp == 0


def test_memory_needed_is_the_border_of_feasibility() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        needed, _ = StageTable(problem).memory_needed()
        for scale, fits in ((1 + 1e-9, True), (1 - 1e-6, False)):
            limited = PipelineProblem(
                problem.layers, problem.classes, problem.stages, problem.micro_batches, needed * scale, problem.tail_s
            )
            assert (solve_pipeline(limited) is not None) == fits
