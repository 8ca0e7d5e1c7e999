"""Price table of pipeline stages: least time of stage s with given layers within the memory of a device.

Per layer the choice is how it is recomputed; for one stage that is a small knapsack (minimise time subject to memory),
solved exactly over the useful mixes of modes (`mode_mixes`). Entries start as lower bounds, every layer in its fastest
mode, and are worked out where a cut uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

from autopar.cost_model.byte_prices import byte_prices, freed_s, useful_bytes
from autopar.cost_model.held_lines import Line, outermost, peak_bytes, room_bytes
from autopar.cost_model.mode_mixes import (
    SAME,
    LayerClass,
    Mixes,
    class_mixes,
    frugal,
    leanest,
    merged,
    prefix_mixes,
)
from autopar.cost_model.pipeline_problem import Moment, PipelineProblem, StageCost, StagePrice
from autopar.cost_model.stage_runs import stage_runs
from autopar.cost_model.tight_mixes import tight_mixes

__all__ = ["StageTable", "bytes_at", "price_stage"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def stage_mixes(problem: PipelineProblem, counts: tuple[int, ...], held: tuple[int, ...] = ()) -> Mixes:
    """Useful mixes of a stage's layers; `held`: the classes of its layers in order, where that matters."""
    if held:
        return prefix_mixes(problem.classes, held, problem.segment)
    chunks = problem.virtual_stages
    parts = [class_mixes(c, n, problem.segment, chunks) for c, n in zip(problem.classes, counts, strict=True)]
    if not parts:
        zero = np.zeros(1)
        return Mixes(zero, zero, zero, np.zeros((1, 0), dtype=np.int64))
    return reduce(merged, parts)


def _line(
    problem: PipelineProblem, stage: int, counts: tuple[int, ...], moment: Moment
) -> tuple[float, float, bool]:  # fmt: skip
    """What a stage holds at a moment: static bytes, gradients and the rest; so many times what its layers keep a
    micro-batch; whether their working set comes on top."""
    own, layers = problem.stages[stage], list(zip(counts, problem.classes, strict=True))
    there = own.static_bytes + sum(n * (c.static_bytes + moment.gradients * c.gradient_bytes) for n, c in layers)
    there += moment.in_flight * own.saved_bytes + moment.beside_bytes
    return there, moment.kept_flight(sum(counts)), moment.in_layer


def bytes_at(
    problem: PipelineProblem, stage: int, counts: tuple[int, ...], moment: Moment, kept: float, working: float
) -> float:
    """Bytes of a stage at a moment, if its layers keep and work in so many."""
    there, flight, in_layer = _line(problem, stage, counts, moment)
    return there + flight * kept + (working if in_layer else 0.0)


def price_stage(
    problem: PipelineProblem, stage: int, counts: tuple[int, ...], mixes: Mixes | None = None,
    lines: Sequence[Line] | None = None,
) -> StagePrice | None:  # fmt: skip
    """Least-time price of a stage with `counts` layers of each class; None if it does not fit in memory. Of mixes as
    fast that which takes least memory, then the first: not what rounding makes of them. `mixes` and `lines` are
    theirs, if known."""
    mixes = stage_mixes(problem, counts) if mixes is None else mixes
    lines = [_line(problem, stage, counts, m) for m in problem.stages[stage].moments] if lines is None else lines
    memory = peak_bytes(lines, mixes.kept_bytes, mixes.transient_bytes)
    fits = memory <= problem.memory_bytes
    if not fits.any():
        return None
    fastest = fits & (mixes.time_s <= mixes.time_s.min(where=fits, initial=np.inf) * SAME)
    row = int(np.flatnonzero(fastest & (memory <= memory.min(where=fastest, initial=np.inf) * SAME))[0])
    own = problem.stages[stage]
    time_s = own.time_s + float(mixes.time_s[row])
    put_off_s = own.put_off_s + sum(n * c.put_off_s for n, c in zip(counts, problem.classes, strict=True))
    split, first = [], 0
    for c in problem.classes:
        split.append(tuple(int(n) for n in mixes.choice[row, first : first + len(c.modes)]))
        first += len(c.modes)
    return StagePrice(time_s, time_s - put_off_s, put_off_s + problem.tail_s(stage, counts), float(memory[row]), counts,
                      tuple(split), float(mixes.kept_bytes[row]), float(mixes.transient_bytes[row]))  # fmt: skip


_MANY = 13
"""Layers of a stage from which on not all mixes are listed."""


class StageTable:
    """Prices of every stage over all that it can hold (`runs`); arrays are [stage, number]. `memory_binds`: whether
    there is a stage that cannot have every layer in its fastest mode."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        classes, chunks = len(problem.classes), problem.virtual_stages
        self.runs = stage_runs(problem.layers, len(problem.stages), classes, chunks, problem.segment > 1)
        self.counts = self.runs.counts
        self._mixes: dict[int, Mixes] = {}
        self._lean: dict[int, tuple[Floats, Floats]] = {}
        self._prices: dict[tuple[int, int], StagePrice | None] = {}
        self._lines: dict[tuple[int, int], list[Line]] = {}
        self._tight: dict[tuple[int, tuple[Line, ...]], Mixes] = {}
        self._fill(np.array(self.counts, dtype=np.float64).reshape(len(self.counts), len(problem.classes)))

    def _fill(self, counts: Floats) -> None:
        """Lower bounds: every layer in its fastest mode, and what freeing the bytes that are missing costs at least
        (`byte_prices`); infinite where even the least of each figure is too much."""
        problem = self.problem

        def each(figure: Callable[[LayerClass], float]) -> Floats:
            return np.array([figure(c) for c in problem.classes], dtype=np.float64)

        def own(figure: Callable[[StageCost], float]) -> Floats:
            return np.array([figure(s) for s in problem.stages], dtype=np.float64)[:, None]

        def largest(figure: Callable[[LayerClass], float]) -> Floats:
            held: Floats = np.max(np.where(counts > 0, each(figure), 0.0), axis=1, initial=0.0)
            return held

        fast = {c: min(c.modes, key=lambda m: (m.time_s, m.saved_bytes)) for c in problem.classes}
        self.put_off_s = own(lambda s: s.put_off_s) + counts @ each(lambda c: c.put_off_s)
        self.times = own(lambda s: s.time_s) + counts @ each(lambda c: fast[c].time_s)
        least = largest(lambda c: min(m.transient_bytes for m in c.modes))
        kept = counts @ each(lambda c: min(saved for _, saved in useful_bytes(c, problem.segment)))
        fast_kept, fast_working = (
            counts @ each(lambda c: fast[c].saved_bytes),
            largest(lambda c: fast[c].transient_bytes),
        )
        limit = problem.memory_bytes
        there, flight, in_layer = self._held = self._moments(counts)
        room = limit - there - np.where(in_layer, least, 0.0)
        hopeless: npt.NDArray[np.bool_] = np.any(room - flight * kept < -1e-6 * limit, axis=0)
        left = (room / np.maximum(flight, 1e-12)).min(axis=0)
        needed = there + flight * fast_kept + np.where(in_layer, fast_working, 0.0)
        fits: npt.NDArray[np.bool_] = np.all(needed <= limit, axis=0)
        missing_s = np.zeros(self.times.shape)
        for rate in byte_prices([useful_bytes(c, problem.segment) for c in problem.classes]):
            layers_s = counts @ np.array([freed_s(c, problem.segment, rate) for c in problem.classes], dtype=np.float64)
            missing_s = np.maximum(missing_s, layers_s - rate * left)
        self.times += missing_s * (1 - 1e-9)
        self.times[hopeless] = np.inf
        plain = problem.segment == 1 or all(m.name != "full" for m in fast.values())
        self.exact, self.memory_binds = hopeless | (fits & plain), not (fits.all() and plain)
        self.tails = np.full(self.times.shape, np.nan)

    def _moments(self, counts: Floats) -> tuple[Floats, Floats, Floats]:
        """[moment, stage, id] (or 1 for a stage, an id): bytes beside what layers keep and work in; `kept_flight`;
        whether a layer runs. Stages with fewer moments repeat their last."""
        stages, classes = self.problem.stages, self.problem.classes
        static = counts @ np.array([c.static_bytes for c in classes], dtype=np.float64)
        gradients = counts @ np.array([c.gradient_bytes for c in classes], dtype=np.float64)
        most, own = max(len(s.moments) for s in stages), []
        for s in stages:
            here = [(s.static_bytes + m.in_flight * s.saved_bytes + m.beside_bytes, m.gradients, m.in_flight,
                     m.in_layer, *m.excess) for m in s.moments]  # fmt: skip
            own.append(here + here[-1:] * (most - len(here)))
        columns = np.array(own, dtype=np.float64).transpose(2, 1, 0)[..., None]
        (alone, share, flight, in_layer), excess = columns[:4], columns[4:, :, :, 0]
        if len(excess) > 1:
            layers = counts.sum(axis=1).astype(np.int64)
            flight = flight + np.moveaxis(excess[layers % len(excess)], 0, 2) / np.maximum(layers, 1)
        return static + share * gradients + alone, flight, in_layer

    def tails_where(self, wanted: npt.NDArray[np.bool_]) -> Floats:
        """[stage, id]: seconds after the last backward, put-off weight gradients included; inf where not wanted."""
        for s, k in np.argwhere(wanted & np.isnan(self.tails)):
            self.tails[s, k] = self.problem.tail_s(int(s), self.counts[k]) + self.put_off_s[s, k]
        found: Floats = np.where(wanted, self.tails, np.inf)
        return found

    def mixes(self, number: int) -> Mixes:
        if number not in self._mixes:
            held = self.runs.held[number] if self.runs.held else ()
            self._mixes[number] = stage_mixes(self.problem, self.counts[number], held)
        return self._mixes[number]

    def settle(self, number: int) -> None:
        """Work out the exact times of every stage with these layers."""
        own = self.problem.stages
        for s in range(len(own)):
            if not self.exact[s, number]:
                self.times[s, number] = own[s].time_s + self._layers_s(s, number)
                self.exact[s, number] = True
        if self.problem.is_uniform:  # more layers take no less
            longer = np.maximum.accumulate(self.times[:, number:], axis=1)
            self.times[:, number:] = np.where(self.exact[:, number:], self.times[:, number:], longer)

    def lines(self, stage: int, number: int) -> list[Line]:
        """What a stage with these layers holds at those of its moments that count."""
        key = (stage, number)
        if key not in self._lines:
            there, flight, in_layer = (of[:, stage, min(number, of.shape[2] - 1)].tolist() for of in self._held)
            self._lines[key] = outermost(list(zip(there, flight, map(bool, in_layer), strict=True)))
        return self._lines[key]

    def _worth(self, stage: int, number: int) -> Mixes:
        """Mixes of which one is the fastest that fits; of few layers all."""
        problem, count = self.problem, sum(self.counts[number])
        if not problem.is_uniform or count < _MANY:
            return self.mixes(number)
        lines = self.lines(stage, number)
        key = (number, tuple(lines))
        if key not in self._tight:
            found = tight_mixes(problem.classes[problem.layers[0]], count, problem.segment, problem.virtual_stages,
                                lambda working: room_bytes(lines, problem.memory_bytes, working))  # fmt: skip
            self._tight[key] = self.mixes(number) if found is None else found
        return self._tight[key]

    def _layers_s(self, stage: int, number: int) -> float:
        """Least time of a stage's layers; inf if no mix fits. The leanest is asked first, for mixes are many."""
        problem, counts = self.problem, self.counts[number]
        if problem.is_uniform and problem.layers:
            layer = problem.classes[problem.layers[0]]
            kept, working = leanest(layer, sum(counts), problem.segment, problem.virtual_stages)
            if not (peak_bytes(self.lines(stage, number), kept, working) <= problem.memory_bytes).any():
                return np.inf
        mixes = self._worth(stage, number)
        fits = peak_bytes(self.lines(stage, number), mixes.kept_bytes, mixes.transient_bytes) <= problem.memory_bytes
        return float(mixes.time_s.min(where=fits, initial=np.inf))

    def price(self, stage: int, number: int) -> StagePrice | None:
        key = (stage, number)
        if key not in self._prices:
            self._prices[key] = price_stage(
                self.problem, stage, self.counts[number], self._worth(*key), self.lines(*key)
            )
        return self._prices[key]

    def number(self, i: int, j: int) -> int:
        """Number of the run [i, j); -1 if no stage can be that run."""
        if not self.problem.is_uniform:
            return int(self.runs.ids[i, j])
        n = j - i - self.runs.least
        return n if 0 <= n < len(self.counts) else -1

    def _all_numbers(self) -> npt.NDArray[np.int64]:
        """[i, j]: `number`."""
        if not self.problem.is_uniform:
            return self.runs.ids
        ends = np.arange(len(self.problem.layers) + 1)
        n = ends - ends[:, None] - self.runs.least
        return np.where((n >= 0) & (n < len(self.counts)), n, -1)

    def numbers(self, cut: Sequence[tuple[int, int]]) -> list[int]:
        """What each stage holds."""
        if self.runs.cuts is not None:
            return self.runs.numbers([j - i for i, j in cut])
        return [self.number(i, j) for i, j in cut]

    def _least_bytes(self, stage: int, number: int) -> float:
        kept, working = self._frugal(number)
        return float(peak_bytes(self.lines(stage, number), kept, working).min(initial=np.inf))

    def _frugal(self, number: int) -> tuple[Floats, Floats]:
        """(kept bytes, working bytes) of mixes of which one needs least memory."""
        problem = self.problem
        if not problem.is_uniform or not problem.layers:
            mixes = self.mixes(number)
            return mixes.kept_bytes, mixes.transient_bytes
        if number not in self._lean:
            layer, count = problem.classes[problem.layers[0]], sum(self.counts[number])
            self._lean[number] = frugal(layer, count, problem.segment, problem.virtual_stages)
        return self._lean[number]

    def memory_needed(self) -> tuple[float, int]:
        """Smallest device memory in bytes any cut fits in, and the stage that binds; see `InfeasiblePlanError`."""
        stages, total = len(self.problem.stages), len(self.problem.layers)
        need = np.array(
            [[self._least_bytes(s, k) for k in range(len(self.counts))] for s in range(stages)]
        )  # fmt: skip
        if self.runs.cuts is not None:
            of_cuts = need[np.arange(stages), self.runs.cuts]
            best = int(of_cuts.max(axis=1).argmin())
            return float(of_cuts[best].max()), int(of_cuts[best].argmax())
        reach = np.full((stages + 1, total + 1), np.inf)
        reach[0, 0] = 0.0
        cut = np.zeros((stages + 1, total + 1), dtype=int)
        ids = self._all_numbers()
        for s in range(stages):
            through = np.maximum(reach[s][:, None], np.append(need[s], np.inf)[ids])  # [i, j]; no run is number -1
            reach[s + 1], cut[s + 1] = through.min(axis=0), through.argmin(axis=0)
        worst, binding, j = float(reach[stages, total]), 0, total
        for s in reversed(range(stages)):
            i = int(cut[s + 1, j])
            if need[s, self.number(i, j)] == worst:
                binding = s
            j = i
        return worst, binding
