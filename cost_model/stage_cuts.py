"""The best cut of layers into stages over a price table, by dynamic programming: exact, without a solver.

    step = (m - 1/v) max_s T_s + (1/v) sum_s U_s + max_s tail_s

For a bound B on T and one on the tails, the least sum of U is a shortest path over (stage, layers used). B is one of
the distinct T, from the smallest that lets a cut through; they are halved, and halves that cannot win are left. So are
the bounds on the tail under each of them. Entries of the table that are lower bounds are
worked out when the best cut uses them; a cut of exact entries is optimal.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from autopar.cost_model.stage_table import Floats, Ints, StageTable

__all__ = ["Cut", "best_cut", "least_cut_s", "least_sum_through", "step_seconds"]

Cut = list[tuple[int, int]]
"""Layers [i, j) of each stage."""


def step_seconds(times: list[float], flows: list[float], tails: list[float], micro_batches: int, chunks: int) -> float:
    """The closed form."""
    return (micro_batches - 1 / chunks) * max(times) + sum(flows) / chunks + max(tails)


def best_cut(table: StageTable, cutoff_s: float = np.inf) -> tuple[float, Cut | None]:
    """(seconds, cut) of the best cut; (lower bound, None) once the bound passes the cutoff; inf if none fits."""
    while True:
        bound_s, cut = _sweep(table, cutoff_s)
        if cut is None or bound_s > cutoff_s:
            return bound_s, None
        guessed = {number for s, number in enumerate(table.numbers(cut)) if not table.exact[s, number]}
        if not guessed:
            return bound_s, cut
        for number in guessed:
            table.settle(number)


def least_cut_s(table: StageTable, cutoff_s: float = np.inf) -> float:
    """Seconds that no cut takes less than, by the lower bounds of the table alone; only a bound past the cutoff."""
    return _sweep(table, cutoff_s)[0]


def _sweep(table: StageTable, cutoff_s: float) -> tuple[float, Cut | None]:
    """The best cut of the table as it stands."""
    if table.runs.cuts is not None:
        return _best_listed(table, cutoff_s)
    problem = table.problem
    m, v = problem.micro_batches, problem.virtual_stages
    times = table.times
    if m > 1:  # a stage that alone is slower than the cutoff is in no cut of use
        times = np.where((m - 1 / v) * times <= cutoff_s, times, np.inf)
    levels = _levels(table, times)
    if len(levels) == 0:
        return (np.inf if np.array_equal(times, table.times) else _above(cutoff_s)), None
    free_s = float(_reach(table, times - table.put_off_s)[-1][-1])
    if (m - 1 / v) * levels[0] + free_s / v > cutoff_s:
        return (m - 1 / v) * levels[0] + free_s / v, None
    if np.isfinite(cutoff_s):  # what no cut within the cutoff can use needs no tail
        slowest = np.maximum(np.where(np.isfinite(times), times, 0.0), levels[0])
        times = np.where((m - 1 / v) * slowest + free_s / v <= cutoff_s, times, np.inf)
    best_s, best = _best_under_levels(table, times, levels, free_s)
    return (best_s, best) if best is not None else (_above(cutoff_s), None)


def _best_listed(table: StageTable, cutoff_s: float) -> tuple[float, Cut | None]:
    """The best of the listed cuts, in order of what they take without the tail."""
    runs, problem = table.runs, table.problem
    assert runs.cuts is not None
    assert runs.sizes is not None
    m, v, stages = problem.micro_batches, problem.virtual_stages, np.arange(len(problem.stages))
    times = table.times[stages, runs.cuts]
    rest = (m - 1 / v) * times.max(axis=1) + (times - table.put_off_s[stages, runs.cuts]).sum(axis=1) / v
    best_s, best = np.inf, -1
    for row in np.argsort(rest, kind="stable"):
        if rest[row] > cutoff_s or rest[row] >= best_s:
            break
        wanted = np.zeros(table.times.shape, dtype=np.bool_)
        wanted[stages, runs.cuts[row]] = True
        value_s = float(rest[row] + table.tails_where(wanted).max(where=wanted, initial=-np.inf))
        if value_s < best_s:
            best_s, best = value_s, int(row)
    if best < 0:
        return (_above(cutoff_s) if np.isfinite(rest).any() else np.inf), None
    borders = [0, *np.cumsum(runs.sizes[best]).tolist()]
    return best_s, list(itertools.pairwise(borders))


def _above(cutoff_s: float) -> float:
    """A bound that says no more than that the cutoff is missed."""
    return cutoff_s * (1 + 1e-9)


def _best_under_levels(table: StageTable, times: Floats, levels: Floats, free_s: float) -> tuple[float, Cut | None]:
    """The best cut: over bounds on the slowest stage, and at each of them over bounds on the tail."""
    m, v = table.problem.micro_batches, table.problem.virtual_stages
    flows, tails = times - table.put_off_s, table.tails_where(np.isfinite(times))
    latest = _levels(table, tails)
    if m * v == 1:
        levels = levels[-1:]  # a single micro-batch waits for no stage twice: the slowest costs nothing extra
    best: tuple[float, float, Cut | None] = (np.inf, np.inf, None)  # of equal ones that with the fastest slowest stage

    def look(allowed: npt.NDArray[np.bool_]) -> tuple[float, float]:
        """(the least sum of flows through allowed entries, the tail of that cut), which may be the best."""
        nonlocal best
        sum_s, cut = _shortest(table, np.where(allowed, flows, np.inf))
        if cut is None:
            return np.inf, np.inf
        picked = [(s, table.number(i, j)) for s, (i, j) in enumerate(cut)]
        slowest_s, latest_s = (max(float(of[entry]) for entry in picked) for of in (times, tails))
        value_s = (m - 1 / v) * slowest_s + sum_s / v + latest_s
        if (value_s, slowest_s) < best[:2]:
            best = (value_s, slowest_s, cut)
        return sum_s, latest_s

    def bound_s(level: int, sum_s: float, tail: int = 0) -> float:
        return float((m - 1 / v) * levels[level] + sum_s / v + latest[tail])

    def under_level(level: int) -> float:
        allowed = times <= levels[level]
        sum_s, latest_s = look(allowed)
        if np.isfinite(sum_s):
            below = int(np.searchsorted(latest, latest_s)) - 1

            def under_tail(tail: int) -> float:
                return look(allowed & (tails <= latest[tail]))[0]

            _halved(0, below, sum_s, lambda tail, s: bound_s(level, s, tail), under_tail, lambda: best[0])
        return sum_s

    _halved(0, 0, free_s, bound_s, under_level, lambda: best[0])
    _halved(1, len(levels) - 1, free_s, bound_s, under_level, lambda: best[0])
    return best[0], best[2]


def _halved(
    low: int, high: int, sum_s: float, bound_s: Callable[[int, float], float], look: Callable[[int], float],
    best_s: Callable[[], float],
) -> None:  # fmt: skip
    """Looks at rising bounds `low` to `high`, of which `look` gives the least sum of flows under it, while one may
    be as good as the best. Those between two wait together: none of them is below the lower one with the least sum
    under the upper one, `sum_s` at first."""
    waiting = [(bound_s(low, sum_s), low, high, sum_s)] if low <= high else []
    while waiting and waiting[0][0] <= best_s():
        _, low, high, under_high_s = heapq.heappop(waiting)
        middle = (low + high) // 2
        under_middle_s = look(middle)
        if low < middle and np.isfinite(under_middle_s):
            heapq.heappush(waiting, (bound_s(low, under_middle_s), low, middle - 1, under_middle_s))
        if middle < high:
            heapq.heappush(waiting, (bound_s(middle + 1, under_high_s), middle + 1, high, under_high_s))


def _levels(table: StageTable, times: Floats) -> Floats:
    """Distinct seconds that can be the most of some cut's stages, rising; none if no cut is finite."""
    levels = np.unique(times[np.isfinite(times)])
    levels = levels[levels >= times.min(axis=1).max()]
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        if _lets_through(table, times <= levels[middle]):
            high = middle
        else:
            low = middle + 1
    found: Floats = levels[low:]
    return found


def _lets_through(table: StageTable, allowed: npt.NDArray[np.bool_]) -> bool:
    """True if some cut uses allowed entries only."""
    if not table.problem.is_uniform:
        return bool(np.isfinite(_reach(table, np.where(allowed, 0.0, np.inf))[-1][-1]))
    # times rise with the layers, so a stage can be anything up to its largest allowed entry
    largest = np.where(allowed.any(axis=1), allowed.shape[1] - np.argmax(allowed[:, ::-1], axis=1), 0)
    return bool(largest.min() > 0 and (largest + table.runs.least - 1).sum() >= len(table.problem.layers))


def _shortest(table: StageTable, costs: Floats) -> tuple[float, Cut | None]:
    """Least sum over all cuts of one entry a stage."""
    reach = _reach(table, costs)
    if not np.isfinite(reach[-1][-1]):
        return np.inf, None
    cut, j = [], len(reach[0]) - 1
    for s in reversed(range(len(costs))):
        starts, numbers = _runs_ending_at(table, j)
        i = int(starts[int(np.argmin(reach[s][starts] + costs[s][numbers]))])
        cut.append((i, j))
        j = i
    return float(reach[-1][-1]), cut[::-1]


def _runs_ending_at(table: StageTable, j: int) -> tuple[Ints, Ints]:
    if table.problem.is_uniform:
        sizes = np.arange(len(table.counts)) + table.runs.least
        numbers = np.flatnonzero(sizes <= j)
        return j - sizes[numbers], numbers
    starts = np.flatnonzero(table.runs.ids[:, j] >= 0)
    return starts, table.runs.ids[starts, j]


def _reach(table: StageTable, costs: Floats) -> list[Floats]:
    """[stages done][layers used]: least sum."""
    total = len(table.problem.layers)
    reach = [np.full(total + 1, np.inf)]
    reach[0][0] = 0.0
    for s in range(len(costs)):
        reach.append(_advance(table, reach[-1], costs[s]))
    return reach


def _advance(table: StageTable, before: Floats, costs: Floats) -> Floats:
    """One more stage, forwards."""
    total = len(before) - 1
    after = np.full(total + 1, np.inf)
    if table.problem.is_uniform:
        usable = np.flatnonzero(np.isfinite(costs))
        if len(usable) == 0:
            return after
        low, high = int(usable[0]), int(usable[-1]) + 1
        padded = np.concatenate([np.full(len(costs) - 1 + table.runs.least, np.inf), before])
        shifted = padded[table.runs.shifts[low:high]]
        least_sum: Floats = (shifted + costs[low:high, None]).min(axis=0)
        return least_sum
    through = before[:, None] + np.where(table.runs.ids >= 0, costs[table.runs.ids], np.inf)
    least: Floats = through.min(axis=0)
    return least


def least_sum_through(table: StageTable, costs: Floats) -> Floats:
    """[stage, id]: least sum of a cut in which the stage has that entry."""
    reach = _reach(table, costs)
    total, stages = len(table.problem.layers), len(costs)
    after = np.full(total + 1, np.inf)
    after[total] = 0.0
    through = np.full(costs.shape, np.inf)
    for s in reversed(range(stages)):
        before_stage = np.full(total + 1, np.inf)
        for j in np.flatnonzero(np.isfinite(after)):
            starts, numbers = _runs_ending_at(table, int(j))
            ahead = costs[s][numbers] + after[j]
            np.minimum.at(before_stage, starts, ahead)
            np.minimum.at(through[s], numbers, reach[s][starts] + ahead)
        after = before_stage
    return through
