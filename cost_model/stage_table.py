"""Price table of pipeline stages: least time of stage s with given layers within the memory of a device.

Per layer the choice is how it is recomputed; for one stage that is a small knapsack (minimise time subject to memory),
solved exactly over the useful mixes of modes (`mode_mixes`). Entries start as lower bounds, every layer in its fastest
mode, and are worked out where a cut uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

from autopar.cost_model.mode_mixes import LayerClass, LayerMode, Mixes, class_mixes, leanest, merged, prefix_mixes
from autopar.cost_model.stage_runs import stage_runs

__all__ = [
    "LayerClass",
    "LayerMode",
    "Moment",
    "PipelineProblem",
    "StageCost",
    "StagePrice",
    "StageTable",
    "bytes_at",
    "price_stage",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Moment:
    """A moment of a step at which a stage may hold most: micro-batches in flight, the share of its layers' gradients
    that is there, bytes beside by category. `in_layer`: in the backward of a layer, with its working set. `excess`: see
    `moments.Flight`."""

    in_flight: float = 1
    gradients: float = 1
    beside: Mapping[str, float] = field(default_factory=dict)
    in_layer: bool = True
    excess: tuple[float, ...] = (0.0,)

    @cached_property
    def beside_bytes(self) -> float:
        return sum(self.beside.values())

    def kept_flight(self, layers: int) -> float:
        """Times what a stage of so many layers keeps a micro-batch."""
        return self.in_flight + (self.excess[layers % len(self.excess)] / layers if layers else 0.0)


@dataclass(frozen=True)
class StageCost:
    """What a stage costs besides its layers: prologue, epilogue, sends. `static_bytes` are always there, `saved_bytes`
    in every micro-batch in flight; `put_off_s` as in LayerClass."""

    time_s: float = 0.0
    static_bytes: float = 0.0
    saved_bytes: float = 0.0
    moments: tuple[Moment, ...] = (Moment(),)
    put_off_s: float = 0.0


@dataclass(frozen=True)
class PipelineProblem:
    """`layers` is the class index of every layer in order; `tail_s(stage, layers per class)` is what a stage adds after
    its last backward (exposed gradient reduction, optimizer). A rank holds `virtual_stages` chunks. Layers in mode
    "full" are recomputed in segments of `segment`; layers of several classes then are the first ones of a stage, which
    has a single chunk."""

    layers: tuple[int, ...]
    classes: tuple[LayerClass, ...]
    stages: tuple[StageCost, ...]
    micro_batches: int
    memory_bytes: float
    tail_s: Callable[[int, tuple[int, ...]], float] = lambda stage, counts: 0.0
    virtual_stages: int = 1
    segment: int = 1

    @cached_property
    def is_uniform(self) -> bool:
        return len(set(self.layers)) <= 1


@dataclass(frozen=True)
class StagePrice:
    """A priced stage: seconds per micro-batch, those of them that fill a bubble, seconds after the last backward; peak
    bytes; layers of each class, and of these how many run in each of the class's modes; bytes that these keep a
    micro-batch, and their largest working set."""

    time_s: float
    flow_s: float
    tail_s: float
    memory_bytes: float
    counts: tuple[int, ...]
    modes: tuple[tuple[int, ...], ...]
    kept_bytes: float = 0.0
    working_bytes: float = 0.0


def useful_bytes(layer: LayerClass, segment: int) -> list[tuple[float, float]]:
    """(seconds, bytes kept at least) of a layer in each of its modes, recomputed in segments of `segment`."""
    return [(m.time_s, m.saved_bytes / (segment if m.name == "full" else 1)) for m in layer.modes]


def byte_prices(classes: Sequence[LayerClass], segment: int) -> list[float]:
    """Seconds a byte at which the bound of a stage bends: slopes of the lower hull of time over bytes of each class.

    The least time of a stage that may keep X bytes a micro-batch is at least  sum_c n_c min_mode (t + r b) - r X  for
    every price r of a byte (its Lagrangian); the largest of these bounds is at one of the slopes.
    """
    prices = set()
    for layer in classes:
        points = sorted(useful_bytes(layer, segment))
        time_s, kept = points[0]
        while leaner := [((t - time_s) / (kept - b), t, b) for t, b in points if b < kept]:
            price, time_s, kept = min(leaner, key=lambda step: (step[0], step[2]))
            prices.add(price)
    return sorted(prices)


def _freed_s(layer: LayerClass, segment: int, rate: float) -> float:
    """What a layer takes more than at least, if a byte kept costs `rate` seconds."""
    modes = useful_bytes(layer, segment)
    return min(t + rate * b for t, b in modes) - min(t for t, _ in modes)


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


def mix_memory(problem: PipelineProblem, stage: int, counts: tuple[int, ...], mixes: Mixes) -> Floats:
    """Peak bytes of a stage under each mix."""
    return _peak(problem, stage, counts, mixes.kept_bytes, mixes.transient_bytes)


def _peak(problem: PipelineProblem, stage: int, counts: tuple[int, ...], kept: Floats, working: Floats) -> Floats:
    held = [bytes_at(problem, stage, counts, moment, kept, working) for moment in problem.stages[stage].moments]
    total: Floats = reduce(np.maximum, held)
    return total


def bytes_at(
    problem: PipelineProblem, stage: int, counts: tuple[int, ...], moment: Moment, kept: Floats, working: Floats
) -> Floats:
    """What a stage holds at a moment: static bytes, kept activations of the micro-batches in flight, gradients, the
    rest."""
    own, layers = problem.stages[stage], list(zip(counts, problem.classes, strict=True))
    there = own.static_bytes + sum(n * (c.static_bytes + moment.gradients * c.gradient_bytes) for n, c in layers)
    there += moment.in_flight * own.saved_bytes + moment.beside_bytes
    total: Floats = there + moment.kept_flight(sum(counts)) * kept + (working if moment.in_layer else 0.0)
    return total


def price_stage(
    problem: PipelineProblem, stage: int, counts: tuple[int, ...], mixes: Mixes | None = None
) -> StagePrice | None:
    """Least-time price of a stage with `counts` layers of each class; None if it does not fit in memory."""
    mixes = stage_mixes(problem, counts) if mixes is None else mixes
    memory = mix_memory(problem, stage, counts, mixes)
    fits = memory <= problem.memory_bytes
    if not fits.any():
        return None
    row = int(np.lexsort((memory, np.where(fits, mixes.time_s, np.inf)))[0])
    own = problem.stages[stage]
    time_s = own.time_s + float(mixes.time_s[row])
    put_off_s = own.put_off_s + sum(n * c.put_off_s for n, c in zip(counts, problem.classes, strict=True))
    split, first = [], 0
    for c in problem.classes:
        split.append(tuple(int(n) for n in mixes.choice[row, first : first + len(c.modes)]))
        first += len(c.modes)
    return StagePrice(time_s, time_s - put_off_s, put_off_s + problem.tail_s(stage, counts), float(memory[row]), counts,
                      tuple(split), float(mixes.kept_bytes[row]), float(mixes.transient_bytes[row]))  # fmt: skip


class StageTable:
    """Prices of every stage over all that it can hold (`runs`); arrays are [stage, number]. `memory_binds`: whether
    there is a stage that cannot have every layer in its fastest mode."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        classes, chunks = len(problem.classes), problem.virtual_stages
        self.runs = stage_runs(problem.layers, len(problem.stages), classes, chunks, problem.segment > 1)
        self.counts = self.runs.counts
        self._mixes: dict[int, Mixes] = {}
        self._prices: dict[tuple[int, int], StagePrice | None] = {}
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
        fits, left = np.ones(self.times.shape, dtype=np.bool_), np.full(self.times.shape, np.inf)
        hopeless, limit = ~fits, problem.memory_bytes
        for there, flight, kept_flight, in_layer in self._moments(counts):
            room = limit - there - np.where(in_layer, least, 0.0)
            hopeless |= room - flight * kept < -1e-6 * limit
            left = np.minimum(left, room / np.maximum(flight, 1e-12))
            fits &= there + kept_flight * fast_kept + np.where(in_layer, fast_working, 0.0) <= limit
        missing_s = np.zeros(self.times.shape)
        for rate in byte_prices(problem.classes, problem.segment):
            freed_s = counts @ np.array([_freed_s(c, problem.segment, rate) for c in problem.classes], dtype=np.float64)
            missing_s = np.maximum(missing_s, freed_s - rate * left)
        self.times += missing_s * (1 - 1e-9)
        self.times[hopeless] = np.inf
        plain = problem.segment == 1 or all(m.name != "full" for m in fast.values())
        self.exact, self.memory_binds = hopeless | (fits & plain), not (fits.all() and plain)
        self.tails = np.full(self.times.shape, np.nan)

    def _moments(self, counts: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Of each moment, by [stage, id] (or [stage, 1]): bytes beside what layers keep and work in, micro-batches in
        flight, the same as `Moment.kept_flight`, whether a layer runs. Stages with fewer moments repeat their last."""
        stages, classes = self.problem.stages, self.problem.classes
        static = counts @ np.array([c.static_bytes for c in classes], dtype=np.float64)
        gradients = counts @ np.array([c.gradient_bytes for c in classes], dtype=np.float64)
        layers = [int(n) for n in counts.sum(axis=1)]
        for k in range(max(len(s.moments) for s in stages)):
            here = [s.moments[min(k, len(s.moments) - 1)] for s in stages]
            own = [(s.static_bytes + m.in_flight * s.saved_bytes + m.beside_bytes, m.gradients, m.in_flight, m.in_layer)
                   for s, m in zip(stages, here, strict=True)]  # fmt: skip
            alone, share, flight, in_layer = (column[:, None] for column in np.array(own, dtype=np.float64).T)
            kept_flight = flight
            if any(len(m.excess) > 1 for m in here):
                kept_flight = np.array([[m.kept_flight(n) for n in layers] for m in here], dtype=np.float64)
            yield static + share * gradients + alone, flight, kept_flight, in_layer

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

    def _layers_s(self, stage: int, number: int) -> float:
        """Least time of a stage's layers; inf if no mix fits. The leanest is asked first, for mixes are many."""
        problem, counts = self.problem, self.counts[number]
        if problem.is_uniform and problem.layers:
            layer = problem.classes[problem.layers[0]]
            kept, working = leanest(layer, sum(counts), problem.segment, problem.virtual_stages)
            if not (_peak(problem, stage, counts, kept, working) <= problem.memory_bytes).any():
                return np.inf
        mixes = self.mixes(number)
        fits = mix_memory(problem, stage, counts, mixes) <= problem.memory_bytes
        return float(mixes.time_s.min(where=fits, initial=np.inf))

    def price(self, stage: int, number: int) -> StagePrice | None:
        key = (stage, number)
        if key not in self._prices:
            self._prices[key] = price_stage(self.problem, stage, self.counts[number], self.mixes(number))
        return self._prices[key]

    def number(self, i: int, j: int) -> int:
        """Number of the run [i, j); -1 if no stage can be that run."""
        if not self.problem.is_uniform:
            return int(self.runs.ids[i, j])
        n = j - i - self.runs.least
        return n if 0 <= n < len(self.counts) else -1

    def numbers(self, cut: Sequence[tuple[int, int]]) -> list[int]:
        """What each stage holds."""
        if self.runs.cuts is not None:
            return self.runs.numbers([j - i for i, j in cut])
        return [self.number(i, j) for i, j in cut]

    def memory_needed(self) -> tuple[float, int]:
        """Smallest device memory in bytes any cut fits in, and the stage that binds; see `InfeasiblePlanError`."""
        stages, total = len(self.problem.stages), len(self.problem.layers)
        need = np.array(
            [[float(mix_memory(self.problem, s, held, self.mixes(k)).min(initial=np.inf))
              for k, held in enumerate(self.counts)] for s in range(stages)]
        )  # fmt: skip
        if self.runs.cuts is not None:
            of_cuts = need[np.arange(stages), self.runs.cuts]
            best = int(of_cuts.max(axis=1).argmin())
            return float(of_cuts[best].max()), int(of_cuts[best].argmax())
        reach = np.full((stages + 1, total + 1), np.inf)
        reach[0, 0] = 0.0
        cut = np.zeros((stages + 1, total + 1), dtype=int)
        for s in range(stages):
            for i in map(int, np.flatnonzero(np.isfinite(reach[s]))):
                for j in range(i, total + 1):
                    k = self.number(i, j)
                    value = max(reach[s, i], need[s, k]) if k >= 0 else np.inf
                    if value < reach[s + 1, j]:
                        reach[s + 1, j], cut[s + 1, j] = value, i
        worst, binding, j = float(reach[stages, total]), 0, total
        for s in reversed(range(stages)):
            i = int(cut[s + 1, j])
            if need[s, self.number(i, j)] == worst:
                binding = s
            j = i
        return worst, binding
