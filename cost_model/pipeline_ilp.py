"""Pipeline ILP: which run of layers goes to which stage, and which layers are recomputed.

Sets
    stages s = 0..p-1; columns k = (s, i, j): stage s holds layers i..j-1, with time T_k per micro-batch (least over
    checkpointing modes within device memory, from `stage_table`) and tail W_k after its last backward
    bottleneck levels B_0 < ... < B_J: the distinct T_k that can still be the slowest stage; likewise for tails
Variables
    x_k in {0,1}   stage s holds run k
    y_j in [0,1]   the slowest stage is at least as slow as level j; v_j the same for tails
Objective (milliseconds), m micro-batches
    (m-1) [B_0 + sum_j (B_j - B_{j-1}) y_j]  +  sum_k T_k x_k  +  W_0 + sum_j (W_j - W_{j-1}) v_j
Constraints
    (1) sum_{k of s} x_k = 1                               for every stage                add_one_run_per_stage
    (2) runs join up: equal layers  sum_k (j - i) x_k = L                                 add_all_layers
        several classes  sum_{k of s ends at b} x_k = sum_{k of s+1 starts at b} x_k      add_runs_join
    (3) sum_{k of s: T_k >= B_j} x_k <= y_j                for every stage and level      add_ladder
    (4) y_j <= y_{j-1}                                                                    add_ladder

The ladder makes the relaxation of the min-max tight; one continuous bottleneck variable does not. Before the ILP, a
sweep of dynamic programmes over bottlenecks and tails (`pipeline_sweep`) finds a cut and a bound, which nearly always
meet; where they do not, columns that cannot beat the cut are dropped, which leaves few, and the ILP decides. The answer
is priced again outside the solver.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model.pipeline_sweep import Array, Sweep, sweep_cuts
from autopar.cost_model.solver import Model, SolverPolicy, solve
from autopar.cost_model.stage_table import PipelineProblem, StagePrice, StageTable

__all__ = ["MOST_CUTS", "PipelineSolution", "solve_pipeline", "step_time"]

_MS = 1e3
_EXACT = 1e-9
"""Relative distance from the bound at which a cut counts as proven."""

MOST_CUTS = 500
"""Shortest paths of the sweep before the ILP takes over; a path takes about a millisecond at 64 stages of 96 layers."""


@dataclass(frozen=True)
class PipelineSolution:
    """The best cut. `runs[s]` are the layers [i, j) of stage s; counts are of the ILP that was solved (0 if the bounds
    alone left one choice)."""

    runs: tuple[tuple[int, int], ...]
    stages: tuple[StagePrice, ...]
    step_s: float
    bound_s: float
    variables: int
    constraints: int
    solve_s: float
    solver: str = ""
    notes: tuple[str, ...] = ()

    @property
    def recomputed_layers(self) -> int:
        return sum(sum(stage.recomputed) for stage in self.stages)


@dataclass(frozen=True)
class _Column:
    stage: int
    i: int
    j: int
    price: StagePrice


def step_time(stages: tuple[StagePrice, ...] | list[StagePrice], micro_batches: int) -> float:
    """Closed form of 1F1B and GPipe alike: the slowest stage m-1 times, every stage once, the longest tail."""
    slowest = max(stage.time_s for stage in stages)
    return (micro_batches - 1) * slowest + sum(s.time_s for s in stages) + max(s.tail_s for s in stages)


def solve_pipeline(
    problem: PipelineProblem, *, policy: SolverPolicy | None = None, most_cuts: int = MOST_CUTS
) -> PipelineSolution | None:
    """Optimal cut into stages, or None if no cut fits in memory (`StageTable.memory_needed` says what is missing).

    `most_cuts` limits the sweep that comes before the ILP. Raises ValueError if there are more stages than layers.
    """
    if len(problem.stages) > len(problem.layers):
        raise ValueError(f"{len(problem.stages)} stages for {len(problem.layers)} layers")
    table = StageTable(problem)
    times, tails = table.arrays()
    sweep = sweep_cuts(times, tails, problem.micro_batches, most_cuts)
    if sweep is None:
        return None
    swept = [_column(table, s, i, j) for s, (i, j) in enumerate(sweep.cut)]
    _check(problem, swept, sweep.step_s)
    nothing_solved = (0, 0, 0.0)
    if sweep.bound_s >= sweep.step_s * (1 - _EXACT):
        return _solution(problem, _evened(problem, table, swept), sweep.bound_s, nothing_solved)
    columns = _useful_columns(problem, table, times, sweep)
    if len(columns) == len(problem.stages):
        return _solution(problem, swept, sweep.step_s, nothing_solved)
    model, picks = _build(problem, columns)
    answer = solve(model, policy=policy)
    counts = (len(model.costs), len(model.rows), answer.solve_s)
    if answer.status == "no answer":
        found = _solution(problem, _evened(problem, table, swept), sweep.bound_s, counts)
        return replace(found, solver="heuristic", notes=answer.notes)
    if not answer.values:
        raise AssertionError("the pipeline ILP lost the cut that proves it feasible")
    chosen = [columns[k] for k, x in enumerate(picks) if answer.values[x] > 0.5]
    chosen.sort(key=lambda c: c.stage)
    _check(problem, chosen, answer.objective / _MS)
    if answer.objective / _MS > sweep.step_s:  # an incumbent of a solver that was stopped
        chosen = swept
    bound_s = max(answer.bound / _MS, sweep.bound_s)
    found = _solution(problem, _evened(problem, table, chosen), bound_s, counts)
    return replace(found, solver=answer.solver, notes=answer.notes)


def _evened(problem: PipelineProblem, table: StageTable, chosen: list[_Column]) -> list[_Column]:
    """Of the cuts that take equally long, one whose stages are most alike: the others only idle, and use more memory.

    Moves single layers between stages of equal layers while that keeps the step time and lowers the sum of squares.
    """
    if len(set(problem.layers)) > 1:
        return chosen
    limit_s = step_time([c.price for c in chosen], problem.micro_batches) * (1 + 1e-12)
    best, improved = list(chosen), True
    while improved:
        improved = False
        for source, target in itertools.permutations(range(len(best)), 2):
            moved = _moved(table, best, source, target)
            if moved is None or not _more_alike(moved, best, source, target):
                continue
            if step_time([c.price for c in moved], problem.micro_batches) <= limit_s:
                best, improved = moved, True
    return best


def _moved(table: StageTable, columns: list[_Column], source: int, target: int) -> list[_Column] | None:
    """One layer moved from stage to stage; None if the source would be empty or the target does not fit."""
    layers = [c.j - c.i for c in columns]
    if source == target or layers[source] == 1:
        return None
    result = list(columns)
    for s, n in ((source, layers[source] - 1), (target, layers[target] + 1)):
        price = table.price(s, 0, n)
        if price is None:
            return None
        result[s] = _Column(s, 0, n, price)
    return result


def _more_alike(moved: list[_Column], before: list[_Column], *stages: int) -> bool:
    """True if the sum of squares of the stage times is lower; only `stages` differ."""
    after, now = (sum(columns[s].price.time_s ** 2 for s in stages) for columns in (moved, before))
    return after < now * (1 - 1e-12)


def _build(problem: PipelineProblem, columns: list[_Column]) -> tuple[Model, list[int]]:
    model = Model("pipeline")
    picks = [model.add_binary(c.price.time_s * _MS) for c in columns]
    add_one_run_per_stage(model, columns, picks, len(problem.stages))
    if len(set(problem.layers)) == 1:
        add_all_layers(model, columns, picks, len(problem.layers))
    else:
        add_runs_join(model, columns, picks, problem)
    add_ladder(model, columns, picks, [c.price.time_s for c in columns], problem.micro_batches - 1)
    add_ladder(model, columns, picks, [c.price.tail_s for c in columns], 1)
    return model, picks


def add_one_run_per_stage(model: Model, columns: list[_Column], picks: list[int], stages: int) -> None:
    """(1)"""
    for s in range(stages):
        model.add_row([(x, 1.0) for c, x in zip(columns, picks, strict=True) if c.stage == s], "==", 1.0)


def add_all_layers(model: Model, columns: list[_Column], picks: list[int], layers: int) -> None:
    """(2) for one class: only the number of layers matters."""
    model.add_row([(x, float(c.j - c.i)) for c, x in zip(columns, picks, strict=True)], "==", float(layers))


def add_runs_join(model: Model, columns: list[_Column], picks: list[int], problem: PipelineProblem) -> None:
    """(2) for several classes: the next stage starts where this one ends."""
    for s in range(len(problem.stages) - 1):
        for border in range(1, len(problem.layers)):
            ends = [(x, 1.0) for c, x in zip(columns, picks, strict=True) if c.stage == s and c.j == border]
            starts = [(x, -1.0) for c, x in zip(columns, picks, strict=True) if c.stage == s + 1 and c.i == border]
            if ends or starts:
                model.add_row(ends + starts, "==", 0.0)


def add_ladder(model: Model, columns: list[_Column], picks: list[int], values: list[float], weight: float) -> None:
    """(3), (4): adds weight * (largest value picked) to the objective."""
    stages = sorted({c.stage for c in columns})
    least = max(min(v for c, v in zip(columns, values, strict=True) if c.stage == s) for s in stages)
    model.constant += weight * least * _MS
    if weight == 0:
        return
    below, previous = least, None
    for level in sorted({v for v in values if v > least}):
        y = model.add_continuous(weight * (level - below) * _MS, 0.0, 1.0)
        for s in stages:
            above = [(x, 1.0) for c, x, v in zip(columns, picks, values, strict=True) if c.stage == s and v >= level]
            if above:
                model.add_row([*above, (y, -1.0)], "<=", 0.0)
        if previous is not None:
            model.add_row([(y, 1.0), (previous, -1.0)], "<=", 0.0)
        below, previous = level, y


def _useful_columns(problem: PipelineProblem, table: StageTable, times: Array, incumbent: Sweep) -> list[_Column]:
    """Columns that some cut no worse than the incumbent may use: bound by its own time as the bottleneck, the least
    sum of a cut through it, and the smallest bottleneck and tail that exist."""
    best, least_bottleneck = incumbent.step_s, incumbent.least_slowest_s
    through = _least_sum_through(times)
    slowest = np.maximum(np.where(np.isfinite(times), times, 0.0), least_bottleneck)  # `through` is inf there anyway
    rest = (problem.micro_batches - 1) * slowest + through + incumbent.least_tail_s
    keep = rest <= best * (1 + 1e-12)
    one_class = len(set(problem.layers)) == 1
    columns: dict[tuple[int, int, int], _Column] = {}
    for s, i, j in zip(*np.nonzero(keep), strict=True):
        column = _column(table, int(s), int(i), int(j))
        columns.setdefault(
            (column.stage, 0, column.j - column.i) if one_class else (column.stage, column.i, column.j), column
        )
    return list(columns.values())


def _least_sum_through(times: Array) -> Array:
    """[s, i, j]: least sum of stage times of a cut in which stage s holds [i, j)."""
    stages, total = times.shape[0], times.shape[1] - 1
    before = np.full((stages + 1, total + 1), np.inf)
    after = np.full((stages + 1, total + 1), np.inf)
    before[0, 0] = after[stages, total] = 0.0
    for s in range(stages):
        before[s + 1] = np.min(before[s][:, None] + times[s], axis=0)
    for s in reversed(range(stages)):
        after[s] = np.min(times[s] + after[s + 1][None, :], axis=1)
    return before[:-1, :, None] + times + after[1:, None, :]


def _column(table: StageTable, stage: int, i: int, j: int) -> _Column:
    found = table.price(stage, i, j)
    assert found is not None, "a run without a price was chosen"
    return _Column(stage, i, j, found)


def _check(problem: PipelineProblem, chosen: list[_Column], claimed_s: float) -> None:
    """Re-check the solver's answer: every stage once, all layers covered, memory kept, objective as claimed."""
    assert [c.stage for c in chosen] == list(range(len(problem.stages))), "not one run per stage"
    assert sum(c.j - c.i for c in chosen) == len(problem.layers), "layers lost or repeated"
    assert all(c.price.memory_bytes <= problem.memory_bytes for c in chosen), "a stage does not fit"
    actual = step_time([c.price for c in chosen], problem.micro_batches)
    assert abs(actual - claimed_s) <= 1e-6 * max(actual, 1e-9) + 1e-9, (claimed_s, actual)


def _solution(
    problem: PipelineProblem, chosen: list[_Column], bound_s: float, counts: tuple[int, int, float]
) -> PipelineSolution:
    runs, start = [], 0
    for column in chosen:  # equal layers: columns carry counts, runs follow from their order
        runs.append((start, start + column.j - column.i))
        start = runs[-1][1]
    stages = tuple(c.price for c in chosen)
    return PipelineSolution(tuple(runs), stages, step_time(stages, problem.micro_batches), bound_s, *counts)
