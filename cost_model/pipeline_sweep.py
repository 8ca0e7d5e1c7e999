"""The cut into stages by dynamic programmes: what the pipeline ILP is left with, and what stands where no solver is.

    step = (m-1) max_s T_s + sum_s T_s + max_s W_s        T: time, W: tail of a stage, both of the run it holds

S(B, W) is the least sum of a cut whose stages all take at most B and leave tails of at most W: a shortest path over
(stage, layers used). For every B that can still win, from the least feasible one up, W goes down from cut to cut until
S(B, W) with the least tail there is cannot win. Whatever is left after `most_cuts` paths is bounded by the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Cut", "Sweep", "sweep_cuts"]

Array = npt.NDArray[np.float64]
Cut = list[tuple[int, int]]

_SLACK = 1e-12
"""Relative: sums of the same stage times in another order are not a better cut."""


@dataclass(frozen=True)
class Sweep:
    """`cut`: runs [i, j) of each stage. No cut has a slowest stage below `least_slowest_s`, or a tail below
    `least_tail_s`. Seconds."""

    cut: Cut
    step_s: float
    bound_s: float
    least_slowest_s: float
    least_tail_s: float


def sweep_cuts(times: Array, tails: Array, micro_batches: int, most_cuts: int) -> Sweep | None:
    """The best cut and what is proven of it; None if no cut fits. At least one cut is tried.

    `times[s, i, j]` and `tails[s, i, j]` in seconds, inf where the run does not fit. Of equally fast cuts the first met
    is returned, the one whose slowest stage is fastest.
    """
    levels = np.unique(times[np.isfinite(times)])
    first = _least_level(times, levels)
    if first is None:
        return None
    tail_levels = np.unique(tails[np.isfinite(tails)])
    least_tail = float(tail_levels[_least_level(tails, tail_levels) or 0])
    sweep = _Sweep(times, tails, micro_batches, most_cuts, least_tail)
    for level in levels[first:]:
        if not sweep.can_win((micro_batches - 1) * level + sweep.least_sum + sweep.least_tail):
            break
        sweep.try_level(level)
    bound_s = min(sweep.open_s, sweep.best_s)
    return Sweep(sweep.best, sweep.best_s, bound_s, float(levels[first]), least_tail)


@dataclass
class _Sweep:
    times: Array
    tails: Array
    micro_batches: int
    cuts_left: int
    least_tail: float

    def __post_init__(self) -> None:
        self.best: Cut = []
        self.best_s = self.open_s = np.inf
        self.least_sum = _shortest(self.times)[0]

    def can_win(self, bound_s: float) -> bool:
        return bool(bound_s < self.best_s * (1 - _SLACK))

    def try_level(self, level: float) -> None:
        """All cuts whose stages take at most `level`."""
        allowed = np.where(self.times <= level, self.times, np.inf)
        base = (self.micro_batches - 1) * level + self.least_tail
        if self.best and self.cuts_left <= 0:
            self.open_s = min(self.open_s, base + self.least_sum)
            return
        while True:
            total, cut = _shortest(allowed)
            self.cuts_left -= 1
            if not cut or not self.can_win(base + total):
                return
            tail = self._consider(cut)
            if not self.can_win(base + total):
                return
            if self.cuts_left <= 0:
                self.open_s = min(self.open_s, base + total)
                return
            allowed = np.where(self.tails < tail, allowed, np.inf)

    def _consider(self, cut: Cut) -> float:
        """Keep the cut if it is the best so far; its longest tail."""
        stages = [self.times[s, i, j] for s, (i, j) in enumerate(cut)]
        tail = max(float(self.tails[s, i, j]) for s, (i, j) in enumerate(cut))
        step_s = (self.micro_batches - 1) * max(stages) + sum(stages) + tail
        if self.can_win(step_s):
            self.best, self.best_s = cut, float(step_s)
        return tail


def _least_level(times: Array, levels: Array) -> int | None:
    """Index of the least of `levels` such that a cut exists whose stages do not exceed it."""
    low, high = 0, len(levels) - 1
    if high < 0 or not _shortest(times)[1]:
        return None
    while low < high:
        middle = (low + high) // 2
        if _shortest(np.where(times <= levels[middle], times, np.inf))[1]:
            high = middle
        else:
            low = middle + 1
    return low


def _shortest(times: Array) -> tuple[float, Cut]:
    """Least sum of stage times over all cuts; inf and [] if there is none."""
    stages, total = times.shape[0], times.shape[1] - 1
    reach = np.full(total + 1, np.inf)
    reach[0] = 0.0
    backs = []
    for s in range(stages):
        through = reach[:, None] + times[s]
        backs.append(np.argmin(through, axis=0))
        reach = np.min(through, axis=0)
    if not np.isfinite(reach[total]):
        return np.inf, []
    runs, j = [], total
    for s in reversed(range(stages)):
        i = int(backs[s][j])
        runs.append((i, j))
        j = i
    return float(reach[total]), runs[::-1]
