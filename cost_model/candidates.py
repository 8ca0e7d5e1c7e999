"""Legal settings of degrees, sequence sharding, micro-batch and schedule, with an analytic lower bound on the step.

Bound: every op of the model at 1/tp of its single-rank time (launches are not divided), the pipeline's slowest stage at
least the mean stage, no communication, no recompute, no tail:  (m - 1) T / pp + T.  It never exceeds the priced step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import InfeasiblePlanError, SpecError
from autopar.mesh import Degrees, divisors
from autopar.specs import Pins

__all__ = ["Setting", "check_pins", "enumerate_settings", "lower_bound"]

_SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Setting:
    """One point of the outer search space."""

    degrees: Degrees
    sequence_sharding: bool
    micro_batch: int
    schedule: str
    global_batch: int

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.degrees.dp * self.micro_batch)

    @property
    def order(self) -> tuple[int, ...]:
        """Ties go to fewer axes, then to less tp, less pp, no sequence sharding, larger micro-batches."""
        d = self.degrees
        axes = sum(size > 1 for size in d.shape)
        return (axes, d.tp, d.pp, d.cp, int(self.sequence_sharding), -self.micro_batch, int(self.schedule == "gpipe"))


def check_pins(pins: Pins, num_devices: int, global_batch: int, seq_len: int) -> None:
    """Refuse what this release does not execute, and what cannot be whatever the rest. Raises SpecError by name."""
    _check_built(pins)
    _check_degrees(pins, num_devices)
    _check_sizes(pins, global_batch, seq_len)


def _check_built(pins: Pins) -> None:
    if pins.cp is not None and pins.cp != 1:
        raise SpecError(f"cp={pins.cp} is priced but not executed yet", where="pin cp", try_="cp=1")
    if pins.zero not in (None, 0):
        raise SpecError(f"zero={pins.zero} is not built yet", where="pin zero", try_="zero=0")
    if pins.schedule not in (None, *_SCHEDULES):
        raise SpecError(f"schedule={pins.schedule} is not built yet", where="pin schedule", try_="1f1b or gpipe")
    if pins.virtual_stages not in (None, 1):
        raise SpecError(
            f"virtual_stages={pins.virtual_stages} is not built yet",
            where="pin virtual_stages",
            try_="virtual_stages=1",
        )
    if pins.checkpoint not in (None, "none", "full"):
        raise SpecError(f"checkpoint={pins.checkpoint} is not built yet", where="pin checkpoint", try_="none or full")


def _check_degrees(pins: Pins, num_devices: int) -> None:
    for axis in ("dp", "tp", "pp"):
        size = getattr(pins, axis)
        if size is not None and num_devices % size:
            raise SpecError(
                f"{axis}={size} does not divide {num_devices} devices", where=f"pin {axis}",
                try_=f"one of {', '.join(map(str, divisors(num_devices)))}",
            )  # fmt: skip
    product = (pins.dp or 1) * (pins.tp or 1) * (pins.pp or 1)
    complete = None not in (pins.dp, pins.tp, pins.pp)
    if (complete and product != num_devices) or num_devices % product:
        raise SpecError(
            f"pinned degrees multiply to {product}, the cluster has {num_devices} devices", where="pins",
            try_="degrees whose product is the number of devices",
        )  # fmt: skip


def _check_sizes(pins: Pins, global_batch: int, seq_len: int) -> None:
    if pins.sp and pins.tp and pins.tp > 1 and seq_len % pins.tp:
        raise SpecError(f"seq_len {seq_len} does not divide by tp={pins.tp}", where="pin sp", try_="sp=false")
    if pins.sp and pins.tp == 1:
        raise SpecError("sequence sharding needs tp > 1", where="pin sp", try_="sp=false")
    if pins.microbatch is not None and global_batch % pins.microbatch:
        raise SpecError(
            f"microbatch={pins.microbatch} does not divide global_batch {global_batch}", where="pin microbatch",
            try_=f"one of {', '.join(map(str, divisors(global_batch)))}",
        )  # fmt: skip


def enumerate_settings(
    num_devices: int,
    global_batch: int,
    seq_len: int,
    num_layers: int,
    pins: Pins,
    tp_is_legal: Callable[[int], bool],
    heads: tuple[int, ...] = (),
) -> list[Setting]:
    """Every legal setting under the pins, cp included (the search lists cp > 1, it does not choose it).

    `heads`: attention heads of the layers, named in the refusal of a pinned tp.
    Raises InfeasiblePlanError naming the rule or pin that leaves nothing.
    """
    legal_tp = [d for d in divisors(num_devices) if tp_is_legal(d)]
    if pins.tp is not None and pins.tp not in legal_tp:
        raise InfeasiblePlanError(
            f"tp={pins.tp} cannot shard {_heads_text(heads)} of this model", where="pin tp",
            try_=f"tp one of {', '.join(map(str, legal_tp))}",
        )  # fmt: skip
    found = []
    for tp in legal_tp if pins.tp is None else [pins.tp]:
        for pp in divisors(num_devices // tp) if pins.pp is None else [pins.pp]:
            if pp > max(1, num_layers) or num_devices % (tp * pp):
                continue
            rest = num_devices // (tp * pp)
            for dp in divisors(rest) if pins.dp is None else [pins.dp]:
                if rest % dp or global_batch % dp or (pins.cp is not None and rest // dp != pins.cp):
                    continue
                degrees = Degrees(dp=dp, cp=rest // dp, tp=tp, pp=pp)
                found += _settings(degrees, global_batch, seq_len, pins)
    if not any(s.degrees.cp == 1 for s in found):
        what, remedy = _nothing_left(num_devices, global_batch, num_layers, legal_tp, pins)
        raise InfeasiblePlanError(what, where="degrees", try_=remedy)
    return found


def _heads_text(heads: tuple[int, ...]) -> str:
    counts = f"the {' or '.join(map(str, heads))} attention heads" if heads else "the attention heads"
    return f"{counts} or weights"


def _settings(degrees: Degrees, global_batch: int, seq_len: int, pins: Pins) -> list[Setting]:
    if seq_len % degrees.cp:
        return []
    sp_options = [False]
    if degrees.tp > 1 and (seq_len // degrees.cp) % degrees.tp == 0:
        sp_options = [False, True] if pins.sp is None else [pins.sp]
    elif pins.sp:
        return []
    result = []
    for micro_batch in divisors(global_batch // degrees.dp):
        micro_batches = global_batch // (degrees.dp * micro_batch)
        if pins.microbatch not in (None, micro_batch):
            continue
        # torch's 1F1B needs a micro-batch per stage; GPipe takes as long and never holds fewer activations
        schedule = "1f1b" if micro_batches >= degrees.pp else "gpipe"
        if pins.schedule == "1f1b" and schedule != "1f1b":
            continue
        chosen = pins.schedule or schedule
        result += [Setting(degrees, sp, micro_batch, chosen, global_batch) for sp in sp_options]
    return result


def _nothing_left(
    num_devices: int, global_batch: int, num_layers: int, legal_tp: list[int], pins: Pins
) -> tuple[str, str]:
    """What is wrong, and what would be right: a batch for these devices, device counts for this batch."""
    pinned = ", ".join(f"{k}={v}" for k in ("dp", "tp", "pp", "sp", "microbatch", "schedule")
                       if (v := getattr(pins, k)) is not None)  # fmt: skip
    batch = f"dp and micro-batch have to divide the global batch {global_batch}"
    inside = {tp * pp for tp in legal_tp for pp in range(1, max(1, num_layers) + 1) if num_devices % (tp * pp) == 0}
    fewer = sorted({dp * size for dp in divisors(global_batch) for size in inside if dp * size < num_devices})
    share = num_devices // max(inside)
    remedy = f"a global batch that is a multiple of {share}" if global_batch % share else "fewer pins"
    remedy += f", or {', '.join(map(str, fewer[-3:]))} devices" if fewer and not pinned else ""
    return (
        f"no degrees factor {num_devices} devices: tp may be {', '.join(map(str, legal_tp))}, pp at most {num_layers} "
        f"(layers), {batch}" + (f"; pinned: {pinned}" if pinned else ""),
        remedy,
    )


def lower_bound(setting: Setting, seconds: float, launches: float) -> float:
    """Seconds of a step no layout of this setting can beat; `seconds` and `launches` are of one micro-batch on one rank
    (see `ModelPrices.single_rank_seconds`)."""
    d = setting.degrees
    whole = (seconds - launches) / (d.tp * d.cp) + launches
    return (setting.micro_batches - 1) * whole / d.pp + whole
