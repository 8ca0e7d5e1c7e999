"""The plan that verify runs: the search's choice, or, where pins ask for more, a fixed layout that has all of them.

The search answers what is best; verify asks whether a given mix trains right. So pins that say how a layout is run
(ZeRO level, schedule, virtual stages, context parallelism, checkpointing) are put onto a plan as they are, and free
degrees are chosen so that each of them has an effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from autopar.cost_model.search import search
from autopar.errors import AutoparError, SpecError
from autopar.ir import TracedModel
from autopar.mesh import AXES, Degrees, divisors
from autopar.plan import DEFAULT_OVERLAP, Plan
from autopar.runtime.limits import model_precision
from autopar.runtime.pipeline import check_micro_batches
from autopar.runtime.rows import row_count
from autopar.runtime.sequence import sequence_length
from autopar.specs import ClusterSpec, Pins, TrainSpec

__all__ = ["FixedLayouts", "batch_size", "pinned_plan"]

_SEARCHED = {"schedule": ("1f1b", "gpipe"), "checkpoint": ("none", "full"), "cp": (1,), "zero": (0,)}
_LAYOUT = ("dp", "cp", "tp", "pp", "sp", "microbatch", "modules")
"""Pins that say what lies where; every other one is a field of the plan and is put there."""


def pinned_plan(traced: TracedModel, ranks: int, pins: Pins, rows: int, seq_len: int) -> Plan:
    """A plan for `ranks` local processes and batches of `rows` x `seq_len` tokens that has every pin.

    Raises AutoparError if there is none.
    """
    train = TrainSpec(global_batch=rows, seq_len=seq_len, precision=model_precision(traced))
    if all(getattr(pins, name, None) in (None, *_SEARCHED.get(name, ())) for name in _run_pins()):
        return search(traced, ClusterSpec.parse(f"local:{ranks}"), train, pins).plan
    pins.check(ClusterSpec.parse(f"local:{ranks}"), train)
    layouts, refusal = FixedLayouts(traced, rows, seq_len), None
    for degrees in _degrees(ranks, pins, rows):
        try:
            return layouts.plan(degrees, pins)
        except AutoparError as error:
            refusal = refusal or error
    if refusal is None:
        raise SpecError(
            f"no degrees of {ranks} processes let every pin have an effect ({', '.join(pins.texts())})",
            where="pins",
            try_="more ranks, or pins on the degrees",
        )
    raise refusal


class FixedLayouts:
    """Plans of one captured model for batches of `rows` x `seq_len` tokens, as pinned; nothing else is optimised."""

    def __init__(self, traced: TracedModel, rows: int, seq_len: int) -> None:
        self._traced, self._rows, self._seq_len = traced, rows, seq_len
        self._sharded: dict[tuple[Any, ...], Plan] = {}

    def plan(self, degrees: Degrees, pins: Pins) -> Plan:
        """The pinned mix on these degrees: op sharding as the search chooses it, layers in equal stages.

        Raises AutoparError if the model cannot be cut so.
        """
        pp = degrees.pp
        virtual = pins.virtual_stages or (2 if pins.schedule == "interleaved" and pp > 1 else 1)
        schedule = pins.schedule or ("interleaved" if virtual > 1 else "1f1b")
        changes = {name: getattr(pins, name) for name in _run_pins() if name not in ("cp", "checkpoint")}
        changes = {name: value for name, value in changes.items() if value is not None}
        if pins.checkpoint not in (None, "none"):
            changes["checkpoint"] = {segment.path: pins.checkpoint for segment in self._traced.layers}
        return self._sharding(degrees, pins).replace(
            **changes | {"schedule": schedule, "virtual_stages": virtual},
            degrees=degrees,
            global_batch=self._rows,
            micro_batch=pins.microbatch or _micro_batch(self._rows // degrees.dp, pp, schedule),
            stages=_stages(self._traced, pp * virtual),
            overlap=DEFAULT_OVERLAP,
        )

    def _sharding(self, degrees: Degrees, pins: Pins) -> Plan:
        """The search's plan for this tp alone: what lies where over tp does not depend on how the rest is run."""
        even = (self._seq_len // degrees.cp) % degrees.tp == 0
        sp = None if degrees.tp == 1 else pins.sp if pins.sp is not None or even else False
        key = (degrees.tp, sp, tuple(pins.modules.items()))
        if key not in self._sharded:
            layout = Pins(dp=1, cp=1, tp=degrees.tp, pp=1, sp=sp, checkpoint="none", modules=pins.modules)
            train = TrainSpec(global_batch=self._rows, seq_len=self._seq_len, precision=model_precision(self._traced))
            found = search(self._traced, ClusterSpec.parse(f"local:{degrees.tp}"), train, layout).plan
            self._sharded[key] = found.replace(prediction={}, solver={}, fingerprints={})
        return self._sharded[key]


def batch_size(traced: TracedModel, batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of a batch and tokens a row; one where the inputs have no sequence. Raises SpecError if none has rows."""
    inputs = traced.signature.bind((), batch)
    return row_count(traced.inputs, inputs), sequence_length(traced.inputs, inputs) or traced.seq_range[0]


def _run_pins() -> list[str]:
    return ["cp", *(f.name for f in fields(Pins) if f.name not in _LAYOUT)]


def _degrees(ranks: int, pins: Pins, rows: int) -> Iterator[Degrees]:
    """Within the pins, such that each has an effect; fewest axes first, then data before tensor parallelism."""
    options = [[size] if (size := getattr(pins, axis)) is not None else divisors(ranks) for axis in AXES]
    found = [Degrees(**dict(zip(AXES, sizes, strict=True))) for sizes in itertools.product(*options)]
    pipelined = pins.schedule is not None or (pins.virtual_stages or 1) > 1
    fits = [
        d for d in found
        if d.world_size == ranks and rows % d.dp == 0 and not (pipelined and d.pp == 1 and pins.pp is None)
        and not (pins.zero and d.dp * d.cp == 1) and not (pins.sp and d.tp == 1)
    ]  # fmt: skip
    yield from sorted(fits, key=lambda d: (sum(size > 1 for size in d.shape), -d.dp, -d.pp, d.tp))


def _stages(traced: TracedModel, count: int) -> tuple[tuple[str, ...], ...]:
    paths = [segment.path for segment in traced.layers]
    if len(paths) < count:
        raise SpecError(f"{len(paths)} layers do not make {count} stages", where="pin virtual_stages", try_="fewer")
    cuts = [round(i * len(paths) / count) for i in range(count + 1)]
    return tuple(tuple(paths[a:b]) for a, b in itertools.pairwise(cuts))


def _micro_batch(rows: int, stages: int, schedule: str) -> int:
    """The largest that fills the pipeline twice, or as often as the rows allow."""
    for wanted in (2 * stages, stages, 1):
        for size in reversed(divisors(rows)):
            if rows // size >= wanted and _runs(schedule, stages, rows // size):
                return size
    return 1


def _runs(schedule: str, ranks: int, micro_batches: int) -> bool:
    try:
        check_micro_batches(schedule, ranks, micro_batches)
    except SpecError:
        return False
    return True
