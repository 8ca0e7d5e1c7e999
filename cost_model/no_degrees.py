"""Why nothing divides: the rules, the pins to blame, and the nearest values that are legal, each of them tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.errors import InfeasiblePlanError, SpecError
from autopar.mesh import divisors
from autopar.plan import CHECKPOINT_MODES, CONTEXT_PARALLEL, SCHEDULES
from autopar.specs import MOST_DEVICES, Pins

if TYPE_CHECKING:
    from autopar.cost_model.candidates import ModelLimits

__all__ = ["no_degrees"]

NEAREST = 4
"""Values that are named of one pin."""

MOST_COUNTS = 64
"""Numbers of devices that are tried in each direction."""

IsPossible = Callable[[int, Pins], bool]


def no_degrees(
    num_devices: int, global_batch: int, seq_len: int, limits: ModelLimits, pins: Pins, is_possible: IsPossible
) -> InfeasiblePlanError:
    """`is_possible(devices, pins)`: whether there is a partition, for this model, batch and sequence."""
    legal_tp = [d for d in divisors(num_devices) if limits.tp_is_legal(d)]
    values = _legal_values(num_devices, global_batch, limits, pins, is_possible)
    if pins.tp is not None and pins.tp not in legal_tp:
        return InfeasiblePlanError(
            f"tp={pins.tp} cannot shard {_heads_text(limits.heads)} of this model", where="pin tp",
            try_=_one_of({"tp": values.get("tp") or legal_tp}) + _on_other_devices(limits, legal_tp),
        )  # fmt: skip
    rules = (
        f"tp may be {', '.join(map(str, legal_tp))}, pp at most {limits.layers} (layers), dp and micro-batch have to "
        f"divide the global batch {global_batch}, 2 cp the sequence {seq_len}{_rules_of_pins(limits, legal_tp, pins)}"
    )
    if any(getattr(pins, name) is not None for name in _options(num_devices, global_batch, limits)):
        what, remedy = _blame(num_devices, global_batch, pins, values, is_possible)
        return InfeasiblePlanError(f"{what}: {rules}; {remedy[0]}", where="degrees", try_=remedy[1])
    share = num_devices // max(_inside(num_devices, legal_tp, limits))
    remedies = [f"a global batch that is a multiple of {share}"] if global_batch % share else ["a longer sequence"]
    if counts := _nearest_counts(num_devices, limits, pins, is_possible):
        remedies.append(f"{', '.join(map(str, counts))} devices")
    return InfeasiblePlanError(
        f"no degrees factor {num_devices} devices: {rules}", where="degrees", try_=", or ".join(remedies)
    )


def _blame(
    num_devices: int, global_batch: int, pins: Pins, values: dict[str, list[Any]], is_possible: IsPossible
) -> tuple[str, tuple[str, str]]:
    """The pins; (which of them are to blame, what would do)."""
    texts = [text for text in pins.texts() if text.partition("=")[0] in values]
    free = [name for name in values if _is_legal(num_devices, pins, name, None, is_possible)]
    blame = f"without {' or '.join(free)} there would be plans" if free else "no single pin is to blame"
    legal = {name: found for name, found in values.items() if found}
    unnamed = [f"free the pin {name}" for name in free if name not in legal]
    remedy = _one_of(legal) or (unnamed[0] if unnamed else "fewer pins")
    return (
        f"no degrees of {num_devices} devices satisfy the pins {', '.join(texts)}",
        (blame, remedy + _batch_for(num_devices, global_batch, pins)),
    )


def _one_of(values: dict[str, list[Any]]) -> str:
    """ "pp one of 1, 2, or virtual_stages 1"."""
    texts = []
    for name, found in values.items():
        shown = [str(value).lower() if isinstance(value, bool) else str(value) for value in found]
        texts.append(f"{name} one of {', '.join(shown)}" if len(shown) > 1 else f"{name} {shown[0]}")
    return ", or ".join(texts)


def _options(num_devices: int, global_batch: int, limits: ModelLimits) -> dict[str, Iterable[Any]]:
    """Every value that a pin of a choice may have."""
    degrees = divisors(num_devices)
    return {
        "dp": degrees, "cp": degrees, "tp": degrees, "sp": (False, True), "pp": degrees,
        "microbatch": divisors(global_batch), "schedule": SCHEDULES, "virtual_stages": range(1, limits.layers + 1),
        "zero": (0, 1, 2, 3), "zero_group": degrees, "checkpoint": CHECKPOINT_MODES, "checkpoint_segment": (1,),
        "context_parallel": CONTEXT_PARALLEL,
    }  # fmt: skip


def _legal_values(
    num_devices: int, global_batch: int, limits: ModelLimits, pins: Pins, is_possible: IsPossible
) -> dict[str, list[Any]]:
    """Of every pin those values, nearest first found and in order, with which the other pins leave a partition."""
    found: dict[str, list[Any]] = {}
    for name, options in _options(num_devices, global_batch, limits).items():
        wanted = getattr(pins, name)
        if wanted is None:
            continue
        number = isinstance(wanted, int) and not isinstance(wanted, bool)
        nearest = sorted(options, key=lambda v: (abs(v - wanted), v)) if number else list(options)
        legal: list[Any] = []
        for value in nearest:
            if value != wanted and len(legal) < NEAREST and _is_legal(num_devices, pins, name, value, is_possible):
                legal.append(value)
        found[name] = sorted(legal) if number else legal
    return found


def _is_legal(num_devices: int, pins: Pins, name: str, value: Any, is_possible: IsPossible) -> bool:
    try:
        return is_possible(num_devices, replace(pins, **{name: value}))
    except SpecError:  # a value that another pin contradicts
        return False


def _inside(num_devices: int, legal_tp: list[int], limits: ModelLimits) -> set[int]:
    """Devices that one replica may have."""
    stages = range(1, max(1, limits.layers) + 1)
    return {tp * pp for tp in legal_tp for pp in stages if num_devices % (tp * pp) == 0}


def _nearest_counts(num_devices: int, limits: ModelLimits, pins: Pins, is_possible: IsPossible) -> list[int]:
    """Up to two numbers of devices below and two above that can be laid out, in whole nodes if these are."""
    node = limits.spans[-2] if len(limits.spans) > 1 and num_devices > limits.spans[-2] else 1
    below = [n for i in range(1, MOST_COUNTS + 1) if (n := num_devices - i * node) > 0]
    above = [n for i in range(1, MOST_COUNTS + 1) if (n := num_devices + i * node) <= MOST_DEVICES]
    found: list[int] = []
    for counts in (below, above):
        legal = (n for n in counts if is_possible(n, pins))
        found += [n for _, n in zip(range(2), legal, strict=False)]
    return sorted(found)


def _heads_text(heads: tuple[int, ...]) -> str:
    counts = f"the {' or '.join(map(str, heads))} attention heads" if heads else "the attention heads"
    return f"{counts} or weights"


def _on_other_devices(limits: ModelLimits, legal_tp: list[int]) -> str:
    """The degrees the model itself allows, where the number of devices allows fewer."""
    possible = [d for d in sorted({d for h in limits.heads for d in divisors(h)}) if limits.tp_is_legal(d)]
    return f"; the model allows {', '.join(map(str, possible))}" if set(possible) - set(legal_tp) else ""


def _rules_of_pins(limits: ModelLimits, legal_tp: list[int], pins: Pins) -> str:
    """Rules that only a pin can break."""
    rules = _rules_of_sequence(limits, legal_tp, pins)
    chunks = pins.virtual_stages not in (None, 1) or pins.schedule == "interleaved"
    if chunks:
        rules += f", several chunks need pp above 1, pp times chunks at most {limits.layers} (layers)"
        rules += " and micro-batches in equal rounds of at least pp, under the schedule interleaved"
        if not limits.equal_layers and pins.checkpoint_segment not in (None, 1):
            rules += ", and segments over layers of several kinds a single chunk"
    if pins.schedule == "1f1b":
        rules += ", 1f1b needs a micro-batch for every stage"
    if pins.schedule == "zero-bubble":
        rules += _rules_of_zero_bubble(limits, pins)
    if pins.zero:
        rules += f", dp x cp has to be above 1 for zero {pins.zero} to shard anything"
        if chunks and limits.shares_inside:
            rules += ", a weight is read in several places, so zero 0 or one chunk a rank"
    if pins.zero_group not in (None, 0):
        rules += f", dp has to be a multiple of zero_group {pins.zero_group}"
    return rules


def _rules_of_sequence(limits: ModelLimits, legal_tp: list[int], pins: Pins) -> str:
    rules = ", sp needs tp above 1 that divides a rank's part of the sequence" if pins.sp else ""
    if pins.cp is None or pins.cp == 1:
        return rules
    tps = legal_tp if pins.tp is None else [pins.tp]
    kinds = dict.fromkeys(kind for tp in tps for kind in limits.exchanges(pins.cp, tp))
    return f"{rules}, the attention runs over cp {pins.cp} by {' or '.join(kinds) or 'no exchange'}"


def _rules_of_zero_bubble(limits: ModelLimits, pins: Pins) -> str:
    rules = ", zero-bubble needs micro-batches in equal rounds of at least pp"
    if not limits.splits_backward:
        rules += " and one chain of layers, trained whole and in one dtype"
    if pins.checkpoint not in (None, "none"):
        rules += ", zero-bubble recomputes nothing (each put-off weight gradient would run its layer again)"
    if pins.zero:
        rules += ", zero-bubble needs zero 0"
    return rules


def _batch_for(num_devices: int, global_batch: int, pins: Pins) -> str:
    """The batch that the pinned degrees would take, where they leave a single dp."""
    if pins.tp is None or pins.pp is None or pins.cp is None:
        return ""
    dp, rest = divmod(num_devices, pins.tp * pins.pp * pins.cp)
    return f", or a global batch that is a multiple of {dp}" if rest == 0 and dp and global_batch % dp else ""
