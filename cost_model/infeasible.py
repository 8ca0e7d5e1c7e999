"""Why nothing fits in memory: the stage that binds and by what, the pin to blame, and the nearest things that would do.

Every statement is a search of its own: the most frugal setting is exact (`least_memory`), a pin is blamed only if there
is a plan without it, and a number of devices is named only if a plan fits on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.cost_model.evaluate import Evaluation
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.mesh import AXES
from autopar.specs import ClusterSpec, Pins

__all__ = ["Shortage", "explain_shortage", "gib_text"]

MOST_TIMES = 64
"""A cluster so many times as large is the largest that is looked at."""

MOST_BETWEEN = 7
"""Numbers of devices that are looked at between one that is too small and twice as many."""

_WORTH = 0.98
"""Doubling devices has to lower the need at least to this part of it, else more of them are not the way."""


@dataclass(frozen=True)
class Shortage:
    """The setting that needs least, what its fullest stage holds by category, and how it would run. `proven_bytes`: no
    setting needs less, which is as much unless `deadline_s` (on the clock of `time.perf_counter`) came first.
    `headroom` is the fraction of a device's memory that is kept free."""

    least: Evaluation
    stage_bytes: Mapping[str, int]
    checkpoint: str
    step_s: float
    proven_bytes: float
    headroom: float = 0.0
    deadline_s: float = math.inf

    @property
    def device_bytes(self) -> float:
        """Memory of a device that would do."""
        return self.least.needed_bytes / (1 - self.headroom)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline_s


LeastOf = Callable[[ClusterSpec, Pins, float | None], Evaluation]
"""The most frugal setting of a cluster under pins; with a number of bytes, one that they are enough for will do."""


def explain_shortage(
    found: Shortage, cluster: ClusterSpec, pins: Pins, limit_bytes: float, least_of: LeastOf, nearest_plan: object
) -> InfeasiblePlanError:
    """`least_of` is the most frugal setting of another cluster or of other pins; it raises SpecError or
    InfeasiblePlanError where there is none at all. `nearest_plan` runs on devices with the memory that is asked for."""
    missing = math.ceil(found.least.needed_bytes - limit_bytes)
    lacks = f"lacks {missing} {'bytes' if missing > 1 else 'byte'} ({gib_text(missing)})"
    blamed = [] if found.is_late else _blamed_pins(pins, cluster, limit_bytes, least_of)
    what = (
        f"no plan fits in {gib_text(limit_bytes)} a device{_of_which(cluster, limit_bytes)}: even the most frugal "
        f"({_setting_text(found)}) {lacks} on stage {found.least.binding_stage}, "
        f"which needs {gib_text(found.least.needed_bytes)}: {_categories(found.stage_bytes)}"
    )
    pinned = pins.texts()
    if found.proven_bytes < found.least.needed_bytes:
        what += f" (the time limit ended the search for less; none needs under {gib_text(found.proven_bytes)})"
    if found.is_late:
        what += "; the time limit left no time to look for pins to blame and for clusters that would do"
    elif blamed:
        what += "; " + "; ".join(blamed)
    elif pinned:
        what += f" under the pins {', '.join(pinned)}, none of which is to blame alone"
    spare = f"{found.headroom:.3g} of it kept free; " if found.headroom else ""
    remedies = [f"devices of at least {gib_text(found.device_bytes, up=True)} ({spare}there this plan takes "
                f"{found.step_s:.3g} s a step)"]  # fmt: skip
    more = "" if found.is_late else _enough_devices(cluster, pins, limit_bytes, found, least_of)
    remedies.append(more or ("fewer pins" if pinned else "a shorter sequence"))
    return InfeasiblePlanError(what, where="memory", try_=", or ".join(remedies), nearest_plan=nearest_plan)


def _blamed_pins(pins: Pins, cluster: ClusterSpec, limit_bytes: float, least_of: LeastOf) -> list[str]:
    """A sentence for every pin without which there is a plan, and what it costs."""
    texts, found = pins.texts(), []
    for text in texts:
        without = Pins.parse(t for t in texts if t != text)
        needed = _needed(cluster, without, least_of)
        if needed <= limit_bytes:
            found.append(f"the pin {text} is to blame, without it {gib_text(needed)} are enough")
    return found


def _enough_devices(cluster: ClusterSpec, pins: Pins, limit_bytes: float, shortage: Shortage, least_of: LeastOf) -> str:
    """The smallest number of devices looked at on which a plan fits, and that plan; "" if more devices are not the way,
    or the time is over. Doublings first, then what lies between the last two."""
    before, times = shortage.least.needed_bytes, 2
    while times <= MOST_TIMES and not shortage.is_late:
        count = times * cluster.num_devices
        try:
            found = least_of(cluster.resized(count), pins, limit_bytes)
            if limit_bytes < found.needed_bytes and _WORTH * before < found.needed_bytes:
                found = least_of(cluster.resized(count), pins, None)
        except (InfeasiblePlanError, SpecError):  # degrees that are all pinned, or one device that nothing joins
            return ""
        if found.needed_bytes <= limit_bytes:
            for fewer in _between(cluster, count // 2, count):
                smaller = None if shortage.is_late else _least(cluster.resized(fewer), pins, least_of, limit_bytes)
                if smaller is not None and smaller.needed_bytes <= limit_bytes:
                    count, found = fewer, smaller
                    break
            d = found.setting.degrees
            degrees = " ".join(f"{axis}={getattr(d, axis)}" for axis in AXES if getattr(d, axis) > 1)
            return f"{count} of these devices ({degrees}, zero {found.setting.zero})"
        if found.needed_bytes > _WORTH * before:
            return ""
        before, times = found.needed_bytes, 2 * times
    return ""


def _between(cluster: ClusterSpec, low: int, high: int) -> list[int]:
    """Numbers of devices above `low` and below `high`, in whole units of the innermost link, of many some."""
    unit = cluster.links[0].span if cluster.links else 1
    step = unit * max(1, math.ceil((high - low) / unit / (MOST_BETWEEN + 1)))
    return list(range(low + step, high, step))


def _needed(cluster: ClusterSpec, pins: Pins, least_of: LeastOf) -> float:
    found = _least(cluster, pins, least_of)
    return math.inf if found is None else found.needed_bytes


def _least(cluster: ClusterSpec, pins: Pins, least_of: LeastOf, enough_bytes: float | None = None) -> Evaluation | None:
    try:
        return least_of(cluster, pins, enough_bytes)
    except (InfeasiblePlanError, SpecError):
        return None


def _setting_text(found: Shortage) -> str:
    s = found.least.setting
    degrees = " ".join(f"{axis}={getattr(s.degrees, axis)}" for axis in AXES if getattr(s.degrees, axis) > 1)
    return f"{degrees or 'one device'}, micro-batch {s.micro_batch}, zero {s.zero}, checkpointing {found.checkpoint}"


def _categories(stage_bytes: Mapping[str, int]) -> str:
    """Largest first."""
    parts = sorted(((n, name) for name, n in stage_bytes.items() if name != "total" and n), reverse=True)
    return ", ".join(f"{name} {gib_text(n)}" for n, name in parts)


def _of_which(cluster: ClusterSpec, limit_bytes: float) -> str:
    whole = cluster.device.memory_bytes
    return f" ({gib_text(whole)} less the headroom)" if limit_bytes < whole else ""


def gib_text(nbytes: float, *, up: bool = False) -> str:
    """With one digit behind the point, in the unit that leaves two or more: 0.14 GiB rounded up would be 0.2."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= scale:
            tenths = math.ceil(nbytes / scale * 10) if up else round(nbytes / scale * 10)
            return f"{tenths / 10:.1f} {unit}"
    return f"{math.ceil(nbytes)} byte" + ("s" if math.ceil(nbytes) != 1 else "")
