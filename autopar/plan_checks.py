"""What a plan must be to be one: the type of every field, then what the fields say to each other.

A plan is edited by hand, so nothing is taken for granted: whatever a JSON file can hold ends in a SpecError that names
the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.checks import finite_non_negative, finite_positive, require_count, shown
from autopar.errors import SpecError, nearest
from autopar.mesh import AXES, Degrees, divisors
from autopar.placement import parse_placement

if TYPE_CHECKING:
    from autopar.plan import Plan

__all__ = [
    "CHECKPOINT_MODES",
    "CONTEXT_PARALLEL",
    "LOOPED",
    "OVERLAPS",
    "SCHEDULES",
    "check_fields",
    "check_types",
    "degrees_from",
    "read_json",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
LOOPED = ("interleaved", "zero-bubble")
"""Schedules that mean nothing without a pipeline; with one stage the others accumulate gradients."""
CHECKPOINT_MODES = ("none", "selective", "selective-ops", "full")
CONTEXT_PARALLEL = ("ring", "all-gather", "all-to-all")
OVERLAPS = ("dp_reduce", "tp_linear", "tp_ring", "cp_ring", "zero3_gather", "pp_send")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16-mixed")
MOST_LAYERS = 100_000


def read_json(text: str, where: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises SpecError: not JSON, nested too deeply, a key given twice, no object."""
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _unrepeated(pairs, where))
    except ValueError as error:
        raise SpecError(f"not JSON: {error}", where=where) from error
    except RecursionError as error:
        raise SpecError("not a plan: nested too deeply", where=where) from error
    if not isinstance(data, dict):
        raise SpecError("a plan is a JSON object", where=where)
    return data


def degrees_from(value: Any, where: str) -> Degrees:
    if not isinstance(value, Mapping):
        raise SpecError(f"must be an object of axis sizes, not {shown(value)}", where=where)
    for axis, size in value.items():
        if axis not in AXES:
            raise SpecError(f"unknown axis {axis!r}", where=where, try_=nearest(str(axis), list(AXES)))
        require_count(size, f"{where}.{axis}")
    return Degrees(**value)


def check_types(plan: Plan) -> None:
    """Before the fields are frozen: each is of its documented type. Raises SpecError naming the key."""
    if not isinstance(plan.degrees, Degrees):
        raise SpecError(f"must be Degrees, not {shown(plan.degrees)}", where="degrees")
    for name in _counts(plan):
        require_count(getattr(plan, name), name)
    _require_in("schedule", plan.schedule, SCHEDULES)
    _require_in("zero", plan.zero, (0, 1, 2, 3))
    _require_in("context_parallel", plan.context_parallel, CONTEXT_PARALLEL)
    _require_in("precision", plan.precision, PRECISIONS)
    if not isinstance(plan.sequence_sharding, bool):
        raise SpecError(f"must be true or false, not {shown(plan.sequence_sharding)}", where="sequence_sharding")
    for index, stage in enumerate(_list(plan.stages, "stages", "lists of module paths, one a stage")):
        for entry in _list(stage, f"stages[{index}]", "module paths"):
            _require_layers(entry, f"stages[{index}]")
    for name in _list(plan.overlap, "overlap", "names"):
        _require_in("overlap", name, OVERLAPS)
    for key in ("parameters", "ops", "checkpoint", "groups", "fingerprints"):
        for name, value in _object(getattr(plan, key), key).items():
            _require_text(value, f"{key}[{name}]")
    for name, value in _object(plan.solver, "solver").items():
        _require_note(value, f"solver[{name}]", number=name == "bound" or name.endswith("_s"))
    _check_prediction(_object(plan.prediction, "prediction"))


def _counts(plan: Plan) -> tuple[str, ...]:
    """Fields that have to be positive integers; a zero_group may be 0."""
    counts = ("global_batch", "seq_len", "micro_batch", "virtual_stages", "checkpoint_segment")
    return counts if type(plan.zero_group) is int and plan.zero_group == 0 else (*counts, "zero_group")


def check_fields(plan: Plan) -> None:
    """What the fields, each of its type, say to each other. Raises SpecError naming the key and legal values."""
    for path, text in plan.parameters.items():
        try:
            placement = parse_placement(text)
        except ValueError as error:
            raise SpecError(str(error), where=f"parameters[{path}]") from error
        if placement.is_partial or placement.kind == "R|P":
            raise SpecError(f"a parameter is R or S(dim), not {text}", where=f"parameters[{path}]")
    for path, mode in plan.checkpoint.items():
        _require_in(f"checkpoint[{path}]", mode, CHECKPOINT_MODES)
    dp = plan.degrees.dp
    if plan.global_batch % (dp * plan.micro_batch):
        legal = divisors(plan.global_batch // dp) if plan.global_batch % dp == 0 else []
        raise SpecError(
            f"global_batch {plan.global_batch} is not a multiple of dp {dp} x micro_batch {plan.micro_batch}",
            where="micro_batch",
            try_=f"micro_batch one of {legal}" if legal else f"a global_batch that is a multiple of dp {dp}",
        )
    if plan.degrees.pp == 1 and plan.schedule in LOOPED:
        raise SpecError(
            f"{plan.schedule} needs a pipeline, and pp is 1",
            where="schedule",
            try_=f"pp of 2 or more, or one of {', '.join(s for s in SCHEDULES if s not in LOOPED)}",
        )
    _check_zero_group(plan)
    count = plan.degrees.pp * plan.virtual_stages
    if len(plan.stages) != count:
        raise SpecError(
            f"{len(plan.stages)} stages for pp {plan.degrees.pp} x virtual_stages {plan.virtual_stages}", where="stages"
        )
    for key in ("peak_memory_bytes", "stage_busy", "stage_group"):
        entries = plan.prediction.get(key)
        if entries is not None and len(entries) != count:
            raise SpecError(f"{len(entries)} entries for {count} stages", where=f"prediction.{key}")


def _check_zero_group(plan: Plan) -> None:
    dp, cp, group = plan.degrees.dp, plan.degrees.cp, plan.zero_group
    if group == 0:
        return
    if plan.zero == 0:
        raise SpecError("zero 0 shards nothing", where="zero_group", try_="zero 1, 2 or 3, or no zero_group")
    legal = [size for size in divisors(dp) if size * cp > 1]
    if group not in legal:
        raise SpecError(
            f"copies cannot be shared by {group} of {dp} dp ranks",
            where="zero_group",
            try_=f"one of {', '.join(map(str, legal))}" if legal else "0",
        )


def _check_prediction(prediction: Mapping[str, Any]) -> None:
    """Types of the parts a report reads. Whatever else is noted is kept as it is."""
    for key in ("step_time_s", "tokens_per_s_per_device", "mfu", "cost_per_million_tokens"):
        if key in prediction:
            check = finite_positive if key == "step_time_s" else finite_non_negative
            check(prediction[key], f"prediction.{key}")
    where = "prediction.time_s"
    for part, seconds in _object(prediction.get("time_s", {}), where).items():
        finite_non_negative(seconds, f"{where}.{part}")
    where = "prediction.peak_memory_bytes"
    for index, stage in enumerate(_list(prediction.get("peak_memory_bytes", []), where, "objects, one a stage")):
        for category, size_bytes in _object(stage, f"{where}[{index}]").items():
            finite_non_negative(size_bytes, f"{where}[{index}].{category}")
        if "total" not in stage:
            raise SpecError("has no total", where=f"{where}[{index}]")
    _check_details(prediction)
    where = "prediction.collectives"
    for index, entry in enumerate(_list(prediction.get("collectives", []), where, "objects")):
        for key in ("kind", "axis"):
            _require_text(_object(entry, f"{where}[{index}]").get(key), f"{where}[{index}].{key}")
        for key in ("bytes", "count"):
            finite_non_negative(entry.get(key), f"{where}[{index}].{key}")


def _check_details(prediction: Mapping[str, Any]) -> None:
    for busy in _list(prediction.get("stage_busy", []), "prediction.stage_busy", "fractions, one a stage"):
        finite_non_negative(busy, "prediction.stage_busy")
    where = "prediction.largest_activations"
    for index, entry in enumerate(_list(prediction.get("largest_activations", []), where, "objects")):
        _require_text(_object(entry, f"{where}[{index}]").get("tensor"), f"{where}[{index}].tensor")
        for key in ("bytes", "layers"):
            finite_non_negative(entry.get(key), f"{where}[{index}].{key}")
    for name in _list(prediction.get("stage_group", []), "prediction.stage_group", "names, one a stage"):
        _require_text(name, "prediction.stage_group")


def _unrepeated(pairs: Sequence[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Python would silently keep the last of two equal keys."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise SpecError(f"the key {shown(key)} is given twice", where=where)
        found[key] = value
    return found


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise SpecError(f"must be an object, not {shown(value)}", where=where)
    return value


def _list(value: Any, where: str, of: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise SpecError(f"must be a list of {of}, not {shown(value)}", where=where)
    return value


def _require_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise SpecError(f"must be a text, not {shown(value)}", where=where)


def _require_layers(entry: Any, where: str) -> None:
    """A module path, its range, if it has one, rising and of a length that can be written out."""
    if not isinstance(entry, str) or not entry:
        raise SpecError(f"must be module paths, not {shown(entry)}", where=where)
    for part in entry.split("."):
        low, dash, high = part.partition("-")
        if dash and low.isdecimal() and high.isdecimal():
            longest = max(len(low), len(high))
            if longest > 9 or not 0 <= int(high) - int(low) < MOST_LAYERS:
                raise SpecError(
                    f"{shown(part)} is not a range of 1 to {MOST_LAYERS} layers", where=where, try_="0-3 for 0, 1, 2, 3"
                )


def _require_note(value: Any, where: str, *, number: bool) -> None:
    """A number, text or truth value; a number only where the report formats it as a time."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if not (good or (not number and (value is None or isinstance(value, str | bool)))):
        raise SpecError(f"must be a {'number' if number else 'number or text'}, not {shown(value)}", where=where)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _require_in(name: str, value: Any, allowed: Iterable[Any]) -> None:
    if not any(value == known and type(value) is type(known) for known in allowed):
        raise SpecError(f"{shown(value)} is not one of {', '.join(map(str, allowed))}", where=name)
