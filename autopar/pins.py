"""Pins: what the user fixes in a plan. Everything not pinned is searched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autopar.checks import LARGEST_COUNT, require_count, require_text, shown
from autopar.errors import SpecError, nearest
from autopar.mesh import divisors
from autopar.placement import parse_placement
from autopar.plan import CHECKPOINT_MODES, CONTEXT_PARALLEL, LOOPED, SCHEDULES

if TYPE_CHECKING:
    from autopar.specs import ClusterSpec, TrainSpec

__all__ = ["Pins"]

COUNTS = ("dp", "cp", "tp", "pp", "microbatch", "virtual_stages", "zero_group", "checkpoint_segment")
SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Constraints with names: what the user fixes. None is free. `sp` is sequence sharding over tp.

    `modules` maps a module path pattern to a placement ("shard(1)", "replicate", "S(0)"). It is kept most specific
    first, so that pins mean the same in any order. Raises SpecError if a value has the wrong type or range.
    """

    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    zero: int | None = None
    zero_group: int | None = None
    checkpoint: str | None = None
    checkpoint_segment: int | None = None
    context_parallel: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None:
                require_count(value, f"pin {name}")
        if self.sp is not None and not isinstance(self.sp, bool):
            raise SpecError(f"must be true or false, not {shown(self.sp)}", where="pin sp")
        for name, allowed in (("schedule", SCHEDULES), ("zero", (0, 1, 2, 3)), ("checkpoint", CHECKPOINT_MODES),
                              ("context_parallel", CONTEXT_PARALLEL)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool | float) or value not in allowed):
                raise SpecError(f"{shown(value)} is not one of {', '.join(map(str, allowed))}", where=f"pin {name}")
        _check_together(self)
        if not isinstance(self.modules, Mapping):
            raise SpecError(f"must map module paths to placements, not {shown(self.modules)}", where="pin modules",
                            try_='modules={"lm_head": "replicate"}')  # fmt: skip
        for pattern, text in self.modules.items():
            require_text(pattern, "pin modules: a path")
            _check_placement(pattern, text)
        ordered = dict(sorted(self.modules.items(), key=lambda item: (_breadth(item[0]), item[0])))
        object.__setattr__(self, "modules", MappingProxyType(ordered))

    # A read-only view neither pickles nor hashes: both go through the texts.
    def __reduce__(self) -> tuple[Any, ...]:
        return (Pins.parse, (list(self.texts()),))

    def __hash__(self) -> int:
        return hash(self.texts())

    @staticmethod
    def parse(texts: Iterable[str]) -> Pins:
        """`["tp=2", "checkpoint=full", "model.layers.*.mlp.down_proj=shard(1)"]` -> Pins, whatever the order.

        Raises SpecError for an unknown name (the nearest is named), a value of the wrong type, or a name given twice.
        """
        values: dict[str, Any] = {}
        modules: dict[str, str] = {}
        for text in texts:
            key, equals, value = (part.strip() for part in text.partition("="))
            if not (key and equals and value):
                raise SpecError("not of the form name=value", where=f"pin {text!r}", try_="tp=2")
            if key in values or key in modules:
                raise SpecError("given twice", where=f"pin {key}")
            if key in _names():
                values[key] = _value(key, value)
            else:
                modules[key] = _module_placement(key, value)
        return Pins(**values, modules=modules)

    def texts(self) -> tuple[str, ...]:
        """Inverse of `parse`."""
        named = [(name, getattr(self, name)) for name in _names() if getattr(self, name) is not None]
        named_texts = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in named]
        return (*named_texts, *(f"{pattern}={placement}" for pattern, placement in self.modules.items()))

    def check(self, cluster: ClusterSpec, train: TrainSpec) -> None:
        """Refuse what no model could make legal, before one is captured. Raises SpecError: rule, values, legal values.

        Degrees must multiply to the devices, dp x microbatch must divide the batch, cp the sequence.
        """
        devices, batch, seq_len = cluster.num_devices, train.global_batch, train.seq_len
        _check_devices(self, devices)
        _check_zero(self, devices)
        if batch is not None:
            _check_batch(self, devices, batch)
        if not _cuts_sequence(self.cp, seq_len):
            raise SpecError(
                f"the sequence of {seq_len} tokens cannot be cut into {self.cp} equal parts of even length",
                where="pin cp",
                try_=_nearest_legal(self, "cp", devices, lambda cp: _cuts_sequence(cp, seq_len)),
            )


def _check_together(pins: Pins) -> None:
    """Refuse a pin that another leaves without effect, which would be ignored without a word."""
    if pins.pp == 1 and pins.schedule in LOOPED:
        raise SpecError(
            f"schedule {pins.schedule} needs a pipeline, and pp is pinned to 1",
            where="pin schedule",
            try_=f"pp of 2 or more, or schedule one of {', '.join(s for s in SCHEDULES if s not in LOOPED)}",
        )
    if pins.zero == 0 and pins.zero_group is not None:
        raise SpecError("zero 0 shards nothing", where="pin zero_group", try_="zero 1, 2 or 3, or no zero_group")
    if pins.checkpoint is not None and pins.checkpoint != "full" and (pins.checkpoint_segment or 1) > 1:
        raise SpecError(
            f"checkpoint {pins.checkpoint} has no segments", where="pin checkpoint_segment", try_="checkpoint full"
        )


def _check_devices(pins: Pins, num_devices: int) -> None:
    degrees = {name: getattr(pins, name) for name in ("dp", "tp", "cp", "pp")}
    pinned = {name: size for name, size in degrees.items() if size is not None}
    product = math.prod(pinned.values())
    text = " x ".join(f"{name} {size}" for name, size in pinned.items())
    text = f"{text} = {product}" if len(pinned) > 1 else text
    if num_devices % product:
        one = next(iter(pinned)) if len(pinned) == 1 else None
        raise SpecError(
            f"{text} does not divide the {num_devices} devices",
            where=f"pin {' '.join(pinned)}",
            try_=_nearest_legal(pins, one, num_devices)
            if one
            else f"a product of {_nearest(divisors(num_devices), product)}",
        )
    if len(pinned) == len(degrees) and product != num_devices:
        raise SpecError(
            f"{text} uses {product} of the {num_devices} devices",
            where=f"pin {' '.join(pinned)}",
            try_=f"degrees whose product is {num_devices}, or leave one of them free",
        )


def _check_zero(pins: Pins, num_devices: int) -> None:
    """ZeRO shards over dp x cp ranks; the pinned degrees may leave one."""
    of_model = math.prod(size for size in (pins.tp, pins.pp) if size is not None)
    if pins.zero and (num_devices == of_model or (pins.dp == 1 and pins.cp == 1)):
        raise SpecError(
            f"zero {pins.zero} shards over dp x cp, and the pins leave one such rank on {num_devices} devices",
            where="pin zero",
            try_="zero 0, or pins that leave dp x cp at 2 or more" if num_devices > 1 else "zero 0, or more devices",
        )


def _check_batch(pins: Pins, num_devices: int, global_batch: int) -> None:
    dp, microbatch = pins.dp or 1, pins.microbatch or 1
    if global_batch % dp:
        raise SpecError(
            f"the global batch of {global_batch} sequences cannot be shared equally by dp {dp}",
            where="pin dp",
            try_=_nearest_legal(pins, "dp", num_devices, lambda dp: global_batch % dp == 0),
        )
    if global_batch % (dp * microbatch):
        share = f"{global_batch} / dp {dp} = {global_batch // dp}" if pins.dp else f"the global batch of {global_batch}"
        raise SpecError(
            f"microbatch {microbatch} does not divide {share} sequences",
            where="pin microbatch",
            try_=f"microbatch one of {_nearest(divisors(global_batch // dp), microbatch)}",
        )


def _cuts_sequence(cp: int | None, seq_len: int | None) -> bool:
    """Whether every rank of cp gets two parts, one of the sequence's first half and one of its second."""
    return cp in (None, 1) or seq_len is None or seq_len % (2 * cp) == 0


def _nearest_legal(pins: Pins, axis: str, num_devices: int, legal: Callable[[int], bool] = lambda size: True) -> str:
    """ "cp one of 1, 2": degrees that the other pins leave room for. What tp and pp may be the model says."""
    others = math.prod(getattr(pins, name) or 1 for name in ("dp", "tp", "cp", "pp") if name != axis)
    values = [size for size in divisors(num_devices // math.gcd(num_devices, others)) if legal(size)]
    of_model = {"tp": ", as far as it divides the heads", "pp": ", at most the layers"}
    one_of = " one of" if len(values) > 1 else ""
    return f"{axis}{one_of} {_nearest(values, getattr(pins, axis))}{of_model.get(axis, '')}"


def _nearest(numbers: list[int], wanted: int) -> str:
    """Up to four of them closest to `wanted`, in order: what a person would change the value to."""
    closest = sorted(numbers, key=lambda d: (abs(d - wanted), d))[:4]
    return ", ".join(map(str, sorted(closest)))


def _names() -> list[str]:
    return [f.name for f in fields(Pins) if f.name != "modules"]


def _value(key: str, text: str) -> Any:
    if key in (*COUNTS, "zero"):
        if not text.isdecimal() or len(text) > 20:
            wanted = "one of 0, 1, 2, 3" if key == "zero" else f"a positive integer, at most {LARGEST_COUNT}"
            raise SpecError(f"must be {wanted}, not {shown(text)}", where=f"pin {key}")
        return int(text)
    if key == "sp":
        if text.lower() not in SWITCHES:
            raise SpecError(f"must be true or false, not {text!r}", where="pin sp")
        return SWITCHES[text.lower()]
    return text


def _module_placement(key: str, value: str) -> str:
    """A module pin's placement. A key without a dot whose value is no placement is a mistyped name, not a module."""
    try:
        parse_placement(value)
    except ValueError as error:
        if "." in key:
            raise SpecError(str(error), where=f"pin {key}", try_="shard(1) or replicate") from error
        raise SpecError(f"unknown pin {key!r}", where="pin", try_=nearest(key, _names())) from error
    return value


def _check_placement(pattern: str, text: str) -> None:
    require_text(text, f"pin {pattern}: the placement")
    try:
        placement = parse_placement(text)
    except ValueError as error:
        raise SpecError(str(error), where=f"pin {pattern}", try_="shard(1) or replicate") from error
    if placement.kind not in ("R", "S"):
        raise SpecError(f"a weight is replicated or sharded, not {text}", where=f"pin {pattern}")


def _breadth(pattern: str) -> tuple[int, int, int]:
    """Rises with what a pattern covers: parts left open, of these by `*`; the weights of a module after one of them."""
    parts = pattern.split(".")
    return sum("*" in part or "-" in part for part in parts), sum("*" in part for part in parts), -len(parts)
