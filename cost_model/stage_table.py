"""Price table of pipeline stages: least time of stage s holding layers i..j within the memory of a device.

Per layer the choice is between keeping activations ("none") and recomputing them ("full"). For one stage that is a
knapsack: minimise extra time subject to memory freed >= memory missing. With two modes per layer and identical layers
counted, it is solved exactly by enumerating the counts of all classes but one and closing the last by division.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LayerClass", "LayerMode", "PipelineProblem", "StageCost", "StagePrice", "StageTable", "price_stage"]


@dataclass(frozen=True)
class LayerMode:
    """One way to run a layer: seconds per micro-batch (forward, backward, recompute, communication), bytes kept per
    micro-batch in flight, and the working bytes its backward needs once per stage on top."""

    name: str
    time_s: float
    saved_bytes: float
    transient_bytes: float = 0.0


@dataclass(frozen=True)
class LayerClass:
    """Layers of equal structure. `modes` is (none,), (full,) or (none, full); `static_bytes` is what parameters,
    gradients and optimizer of one layer take."""

    modes: tuple[LayerMode, ...]
    static_bytes: float


@dataclass(frozen=True)
class StageCost:
    """What a stage costs besides its layers: prologue, epilogue, sends. `in_flight` micro-batches are held at once."""

    time_s: float = 0.0
    static_bytes: float = 0.0
    saved_bytes: float = 0.0
    transient_bytes: float = 0.0
    in_flight: int = 1


@dataclass(frozen=True)
class PipelineProblem:
    """`layers` is the class index of every layer in order; `tail_s(stage, layers per class)` is what a stage adds after
    its last backward (exposed gradient reduction, optimizer)."""

    layers: tuple[int, ...]
    classes: tuple[LayerClass, ...]
    stages: tuple[StageCost, ...]
    micro_batches: int
    memory_bytes: float
    tail_s: Callable[[int, tuple[int, ...]], float] = lambda stage, counts: 0.0


@dataclass(frozen=True)
class StagePrice:
    """A priced stage. `recomputed` layers of each class run in mode "full" (0 where the only mode is "none")."""

    time_s: float
    memory_bytes: float
    tail_s: float
    counts: tuple[int, ...]
    recomputed: tuple[int, ...]


def price_stage(problem: PipelineProblem, stage: int, counts: tuple[int, ...]) -> StagePrice | None:
    """Least-time price of a stage with `counts` layers of each class; None if it does not fit in memory."""
    best: StagePrice | None = None
    for recomputed in _recompute_choices(problem, stage, counts):
        memory = stage_memory(problem, stage, counts, recomputed)
        if memory > problem.memory_bytes:
            continue
        time_s = _stage_time(problem, stage, counts, recomputed)
        if best is None or (time_s, memory) < (best.time_s, best.memory_bytes):
            best = StagePrice(time_s, memory, 0.0, counts, recomputed)
    if best is None:
        return None
    return StagePrice(best.time_s, best.memory_bytes, problem.tail_s(stage, counts), counts, best.recomputed)


def stage_memory(problem: PipelineProblem, stage: int, counts: tuple[int, ...], recomputed: tuple[int, ...]) -> float:
    """Peak bytes of a stage: static, kept activations of the micro-batches in flight, largest working set."""
    own = problem.stages[stage]
    static, saved, transient = own.static_bytes, own.saved_bytes, own.transient_bytes
    for layer, count, again in zip(problem.classes, counts, recomputed, strict=True):
        static += count * layer.static_bytes
        for mode, number in zip((layer.modes[0], layer.modes[-1]), (count - again, again), strict=True):
            if number:
                saved += number * mode.saved_bytes
                transient = max(transient, mode.transient_bytes)
    return static + own.in_flight * saved + transient


def frugal_memory(problem: PipelineProblem, stage: int, counts: tuple[int, ...]) -> float:
    """Least memory a stage with these layers can live in, whatever the time."""
    everything = tuple(n if len(c.modes) == 2 else 0 for n, c in zip(counts, problem.classes, strict=True))
    nothing = tuple(0 for _ in counts)
    return min(stage_memory(problem, stage, counts, choice) for choice in (everything, nothing))


def _stage_time(problem: PipelineProblem, stage: int, counts: tuple[int, ...], recomputed: tuple[int, ...]) -> float:
    total = problem.stages[stage].time_s
    for layer, count, again in zip(problem.classes, counts, recomputed, strict=True):
        total += (count - again) * layer.modes[0].time_s + again * layer.modes[-1].time_s
    return total


def _recompute_choices(problem: PipelineProblem, stage: int, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Numbers of recomputed layers per class that can be optimal: none, and every minimal way to free what is missing.

    Which classes are recomputed decides the working set, so each subset of classes is closed on its own.
    """
    nothing = tuple(0 for _ in counts)
    choices = {nothing}
    able = [c for c, n in enumerate(counts) if n and len(problem.classes[c].modes) == 2]
    in_flight = problem.stages[stage].in_flight
    for used in itertools.chain.from_iterable(itertools.combinations(able, k) for k in range(1, len(able) + 1)):
        *free, last = used
        for head in itertools.product(*(range(1, counts[c] + 1) for c in free)):
            trial = list(nothing)
            for c, n in zip(free, head, strict=True):
                trial[c] = n
            trial[last] = 1
            missing = stage_memory(problem, stage, counts, tuple(trial)) - problem.memory_bytes
            kept, dropped = (m.saved_bytes for m in problem.classes[last].modes)
            freed = in_flight * (kept - dropped)
            more = max(0, math.ceil(missing / freed)) if freed > 0 else 0
            for extra in (more, more + 1):  # one more guards the division against rounding
                if 1 + extra <= counts[last]:
                    trial[last] = 1 + extra
                    choices.add(tuple(trial))
            trial[last] = counts[last]  # dropping the last kept layer can shrink the working set
            choices.add(tuple(trial))
    return sorted(choices)


class StageTable:
    """Prices of every stage over every run of layers [i, j); runs with equal counts share one price."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        self._prices: dict[tuple[int, tuple[int, ...]], StagePrice | None] = {}
        total = len(problem.layers)
        prefix = np.zeros((total + 1, len(problem.classes)), dtype=int)
        for i, c in enumerate(problem.layers):
            prefix[i + 1] = prefix[i]
            prefix[i + 1, c] += 1
        self._prefix = prefix

    def counts(self, i: int, j: int) -> tuple[int, ...]:
        """Layers per class in [i, j)."""
        return tuple(int(n) for n in self._prefix[j] - self._prefix[i])

    def price(self, stage: int, i: int, j: int) -> StagePrice | None:
        key = (stage, self.counts(i, j))
        if key not in self._prices:
            self._prices[key] = price_stage(self.problem, *key)
        return self._prices[key]

    def runs(self, stage: int) -> list[tuple[int, int]]:
        """Runs [i, j) the stage can hold when every stage holds at least one layer."""
        total, stages = len(self.problem.layers), len(self.problem.stages)
        after = stages - 1 - stage
        starts = [0] if stage == 0 else range(stage, total - after)
        return [(i, j) for i in starts for j in ([total] if after == 0 else range(i + 1, total - after + 1)) if j > i]

    def arrays(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(times, tails)[stage, i, j] in seconds, inf where the run does not fit."""
        total, stages = len(self.problem.layers), len(self.problem.stages)
        times = np.full((stages, total + 1, total + 1), np.inf)
        tails = times.copy()
        alike = len(set(self.problem.layers)) == 1
        for stage in range(stages):
            known: dict[int, StagePrice | None] = {}
            for i, j in self.runs(stage):
                found = known[j - i] if alike and j - i in known else self.price(stage, i, j)
                known[j - i] = found
                if found is not None:
                    times[stage, i, j], tails[stage, i, j] = found.time_s, found.tail_s
        return times, tails

    def memory_needed(self) -> tuple[float, int]:
        """Smallest device memory in bytes any cut fits in, and the stage that binds; see `InfeasiblePlanError`."""
        total, stages = len(self.problem.layers), len(self.problem.stages)
        reach = np.full((stages + 1, total + 1), np.inf)
        reach[0, 0] = 0.0
        cut = np.zeros((stages + 1, total + 1), dtype=int)
        need: dict[tuple[int, tuple[int, ...]], float] = {}
        for stage in range(stages):
            for i, j in self.runs(stage):
                key = (stage, self.counts(i, j))
                if key not in need:
                    need[key] = frugal_memory(self.problem, *key)
                value = max(reach[stage, i], need[key])
                if value < reach[stage + 1, j]:
                    reach[stage + 1, j], cut[stage + 1, j] = value, i
        worst, binding, j = float(reach[stages, total]), 0, total
        for stage in reversed(range(stages)):
            i = int(cut[stage + 1, j])
            if need[(stage, self.counts(i, j))] == worst:
                binding = stage
            j = i
        return worst, binding
