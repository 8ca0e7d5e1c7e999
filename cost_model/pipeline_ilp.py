"""Pipeline ILP: which run of layers goes to which stage. How the layers of a stage are recomputed is priced before.

Sets
    stages s = 0..p-1; columns k = (s, run of layers): stage s holds the run, with time T_k per micro-batch (least over
    the mixes of modes within device memory, from `stage_table`), of it U_k not put off, and tail W_k after its last
    backward
    bottleneck levels B_0 < ... < B_J: the distinct T_k that can still be the slowest stage; likewise for tails
Variables
    x_k in {0,1}   stage s holds run k
    y_j in [0,1]   the slowest stage is at least as slow as level j; v_j the same for tails
Objective (milliseconds), m micro-batches, v chunks a rank
    (m - 1/v) [B_0 + sum_j (B_j - B_{j-1}) y_j]  +  (1/v) sum_k U_k x_k  +  W_0 + sum_j (W_j - W_{j-1}) v_j
Constraints
    (1) sum_{k of s} x_k = 1                               for every stage                add_one_run_per_stage
    (2) runs join up: equal layers  sum_k (j - i) x_k = L                                 add_all_layers
        several classes  sum_{k of s ends at b} x_k = sum_{k of s+1 starts at b} x_k      add_runs_join
    (3) sum_{k of s: T_k >= B_j} x_k <= y_j                for every stage and level      add_ladder
    (4) y_j <= y_{j-1}                                                                    add_ladder

The ladder makes the relaxation of the min-max tight; one continuous bottleneck variable does not. A dynamic programme
(`stage_cuts`) finds the best cut first and prunes against the incumbent of the search; columns that cannot beat it are
dropped, which leaves few. The ILP then proves the cut: another answer, or another objective, is an error.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model.pipeline_problem import PipelineProblem, StagePrice
from autopar.cost_model.solver import Model, SolverPolicy, solve
from autopar.cost_model.stage_cuts import Cut, best_cut, least_sum_through, step_seconds
from autopar.cost_model.stage_table import StageTable

__all__ = ["PipelineSolution", "prove", "prove_table", "solve_pipeline", "solve_table", "step_time"]

_MS = 1e3


@dataclass(frozen=True)
class PipelineSolution:
    """The best cut. `runs[s]` are the layers [i, j) of stage (rank) s, all its chunks together; counts are of the ILP
    that proved it (0 before `prove`, or if the bounds alone left one choice)."""

    runs: tuple[tuple[int, int], ...]
    stages: tuple[StagePrice, ...]
    step_s: float
    bound_s: float
    segment: int = 1
    variables: int = 0
    constraints: int = 0
    solve_s: float = 0.0
    solver: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Column:
    stage: int
    i: int
    j: int
    price: StagePrice


def step_time(stages: tuple[StagePrice, ...] | list[StagePrice], micro_batches: int, chunks: int = 1) -> float:
    """Closed form of every schedule: the slowest stage m - 1/v times, what fills the bubble, the longest tail."""
    times, flows, tails = ([getattr(s, name) for s in stages] for name in ("time_s", "flow_s", "tail_s"))
    return step_seconds(times, flows, tails, micro_batches, chunks)


def solve_pipeline(problem: PipelineProblem, *, cutoff_s: float = np.inf) -> PipelineSolution | float:
    """Optimal cut into stages; or, if there is none within the cutoff, a lower bound in seconds (inf: none fits in
    memory, and `StageTable.memory_needed` says what is missing).

    Raises ValueError if there are more stages than layers.
    """
    if len(problem.stages) * problem.virtual_stages > max(1, len(problem.layers)):
        chunks = len(problem.stages) * problem.virtual_stages
        raise ValueError(f"{chunks} stages for {len(problem.layers)} layers")
    return solve_table(StageTable(problem), cutoff_s=cutoff_s)


def solve_table(table: StageTable, *, cutoff_s: float = np.inf) -> PipelineSolution | float:
    """`solve_pipeline` of a priced table."""
    bound_s, cut = best_cut(table, cutoff_s)
    if cut is None:
        return bound_s
    return _solution(table.problem, _evened(table, _columns(table, cut)))


def prove(problem: PipelineProblem, found: PipelineSolution, *, policy: SolverPolicy | None = None) -> PipelineSolution:
    """The solution, agreed to by the ILP. Raises AssertionError if the ILP knows a better cut. If no solver answers, or
    none proves its own answer, the sweep's proof stands alone, and the notes say so."""
    return prove_table(StageTable(problem), found, policy=policy)


def prove_table(table: StageTable, found: PipelineSolution, *, policy: SolverPolicy | None = None) -> PipelineSolution:
    """`prove` over a priced table."""
    problem = table.problem
    if table.runs.cuts is not None:
        return found
    columns = _useful_columns(table, found)
    if len(columns) <= len(problem.stages):
        return found
    model, picks = _build(problem, columns)
    answer = solve(model, policy=policy)
    solved = replace(found, variables=len(model.costs), constraints=len(model.rows), solve_s=answer.solve_s,
                     solver=answer.solver, notes=answer.notes)  # fmt: skip
    if answer.status == "no answer":
        return solved
    if not answer.values:
        raise AssertionError("the pipeline ILP lost the cut that proves it feasible")
    chosen = sorted((columns[k] for k, x in enumerate(picks) if answer.values[x] > 0.5), key=lambda c: c.stage)
    _check(problem, chosen, answer.objective / _MS)
    least_s, most_s, tolerance_s = answer.bound / _MS, answer.objective / _MS, 1e-6 * found.step_s + 1e-9
    assert least_s - tolerance_s <= found.step_s <= most_s + tolerance_s, (least_s, found.step_s, most_s)
    return solved


def _evened(table: StageTable, chosen: list[_Column]) -> list[_Column]:
    """Of the cuts that take equally long, one whose stages are most alike: the others only idle, and use more memory.

    Moves single layers between stages of equal layers while that keeps the step time and lowers the sum of squares.
    """
    problem = table.problem
    if not problem.is_uniform or len(problem.layers) <= len(chosen):
        return chosen
    m, v = problem.micro_batches, problem.virtual_stages
    limit_s = step_time([c.price for c in chosen], m, v) * (1 + 1e-12)
    best, improved = list(chosen), True
    while improved:
        improved = False
        for source in range(len(best)):
            for target in range(len(best)):
                if best[source].price.time_s <= best[target].price.time_s:
                    continue
                moved = _moved(table, best, source, target)
                if moved is None or step_time([c.price for c in moved], m, v) > limit_s:
                    continue
                if _squares(moved) < _squares(best) * (1 - 1e-12):
                    best, improved = moved, True
    return best


def _moved(table: StageTable, columns: list[_Column], source: int, target: int) -> list[_Column] | None:
    """One layer moved from stage to stage; None if the source would have too few or the target does not fit."""
    result = list(columns)
    for s, n in ((source, -1), (target, 1)):
        number = table.number(0, columns[s].j - columns[s].i + n)
        price = table.price(s, number) if number >= 0 else None
        if price is None:
            return None
        result[s] = _Column(s, 0, columns[s].j - columns[s].i + n, price)
    return result


def _squares(columns: list[_Column]) -> float:
    return sum(c.price.time_s**2 for c in columns)


def _build(problem: PipelineProblem, columns: list[_Column]) -> tuple[Model, list[int]]:
    model, chunks = Model("pipeline"), problem.virtual_stages
    picks = [model.add_binary(c.price.flow_s / chunks * _MS) for c in columns]
    add_one_run_per_stage(model, columns, picks, len(problem.stages))
    if problem.is_uniform:
        add_all_layers(model, columns, picks, len(problem.layers))
    else:
        add_runs_join(model, columns, picks, problem)
    weight = problem.micro_batches - 1 / chunks
    add_ladder(model, columns, picks, [c.price.time_s for c in columns], weight)
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


def _useful_columns(table: StageTable, found: PipelineSolution) -> list[_Column]:
    """Columns that some cut no worse than `found` may use: bound by its own time as the bottleneck, the least sum of a
    cut through it, and the least tail."""
    problem = table.problem
    m, v = problem.micro_batches, problem.virtual_stages
    least_slowest_s = float(table.times.min(axis=1).max())
    through = least_sum_through(table, table.times - table.put_off_s)
    slowest = np.maximum(np.where(np.isfinite(table.times), table.times, 0.0), least_slowest_s)
    rest = (m - 1 / v) * slowest + through / v
    tails = table.tails_where(rest <= found.step_s * (1 + 1e-12))
    rest = rest + np.maximum(tails, float(tails.min(axis=1).max()))
    keep = rest <= found.step_s * (1 + 1e-12)
    for s, (i, j) in enumerate(found.runs):
        keep[s, table.number(i, j)] = True
    columns = []
    for s, number in zip(*np.nonzero(keep), strict=True):
        price = table.price(int(s), int(number))
        if price is not None:
            columns += [_Column(int(s), i, j, price) for i, j in _runs(table, int(s), int(number))]
    return columns


def _runs(table: StageTable, stage: int, number: int) -> list[tuple[int, int]]:
    """Where layers of this kind lie: for equal layers their number alone counts."""
    if table.problem.is_uniform:
        return [(0, number + table.runs.least)]
    total, stages = len(table.problem.layers), len(table.problem.stages)
    runs = [(int(i), int(j)) for i, j in np.argwhere(table.runs.ids == number)]
    return [(i, j) for i, j in runs if (i == 0) == (stage == 0) and (j == total) == (stage == stages - 1)]


def _columns(table: StageTable, cut: Cut) -> list[_Column]:
    columns = []
    for s, ((i, j), number) in enumerate(zip(cut, table.numbers(cut), strict=True)):
        price = table.price(s, number)
        assert price is not None, "a run without a price was chosen"
        columns.append(_Column(s, i, j, price))
    return columns


def _check(problem: PipelineProblem, chosen: list[_Column], claimed_s: float) -> None:
    """Re-check the solver's answer: every stage once, all layers covered, memory kept, objective as claimed."""
    assert [c.stage for c in chosen] == list(range(len(problem.stages))), "not one run per stage"
    assert sum(c.j - c.i for c in chosen) == len(problem.layers), "layers lost or repeated"
    joined = problem.is_uniform or all(a.j == b.i for a, b in itertools.pairwise(chosen))
    assert joined, "a stage does not start where the one before ends"
    assert all(c.price.memory_bytes <= problem.memory_bytes for c in chosen), "a stage does not fit"
    actual = step_time([c.price for c in chosen], problem.micro_batches, problem.virtual_stages)
    assert abs(actual - claimed_s) <= 1e-6 * max(actual, 1e-9) + 1e-9, (claimed_s, actual)


def _solution(problem: PipelineProblem, chosen: list[_Column]) -> PipelineSolution:
    runs, start = [], 0
    for column in chosen:  # equal layers: columns carry counts, runs follow from their order
        runs.append((start, start + column.j - column.i))
        start = runs[-1][1]
    stages = tuple(c.price for c in chosen)
    step_s = step_time(stages, problem.micro_batches, problem.virtual_stages)
    return PipelineSolution(tuple(runs), stages, step_s, step_s, problem.segment)
