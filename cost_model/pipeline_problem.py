"""The pipeline problem: layers in order, what a stage costs besides them, when it holds most; and a stage's price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost_model.mode_mixes import LayerClass

__all__ = ["Moment", "PipelineProblem", "StageCost", "StagePrice"]


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
