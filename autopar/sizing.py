"""Sizing the other way round: the smallest and the cheapest cluster that trains a model in time, each with its plan.

The model is captured once; every count of devices is a search of its own. Counts that are looked at are parts of a node
and whole nodes in round numbers (1, 3, 5, 9, 15 times a power of two), which schedulers hand out and degrees divide.
From a first guess the count that just meets the deadline is approached by the best use of devices seen so far, then
smaller counts are looked at until none could meet it even at somewhat better use, then some larger ones, because more
memory can save recomputation.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.checks import finite_positive, require_count, require_fraction
from autopar.cost_model.search_result import SearchResult
from autopar.errors import InfeasiblePlanError, SpecError, nearest
from autopar.hardware import DEVICES, NODES, preset
from autopar.plan import Plan
from autopar.specs import MOST_DEVICES, ClusterSpec

__all__ = ["Offer", "Size", "Sizing", "counts_of", "offer_of", "size"]

MOST_SEARCHES = 32
GUESSED_MFU = 0.45
"""Model FLOPs utilisation of the first count that is tried; only the way to the answer depends on it."""

MOST_SLOWER = 6
"""Counts in a row that are no faster than one before, after which more devices are taken not to help: a batch is used
up."""

NOTHING_FITS = 1.5
"""Step up from a count without a plan."""

BETTER = 0.9
"""Fewer devices have shorter collectives and fuller batches, so each may do more: up to so much less than any seen."""

LARGER = (1.25, 1.5, 2.0)
"""Multiples of the smallest count that are looked at for a lower cost."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind of node one can have any number of: `cluster(devices)` is so many devices of it. Raises SpecError beyond
    the largest cluster."""

    name: str
    cluster: Callable[[int], ClusterSpec]
    devices_per_node: int


@dataclass(frozen=True, kw_only=True)
class Size:
    """One count of devices. `plan` is None if there is none, for `reason`; seconds and money for all tokens."""

    devices: int
    plan: Plan | None
    reason: str = ""
    train_s: float = math.inf
    cost: float | None = None
    headroom_bytes: float = 0.0

    @property
    def device_s_per_step(self) -> float:
        return math.inf if self.plan is None else self.devices * float(self.plan.prediction["step_time_s"])

    @property
    def device_hours(self) -> float:
        return self.devices * self.train_s / 3600


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """`sizes` by count. `smallest` and `cheapest` (the fewest device hours) meet the deadline, if one was set; both are
    None if no count does. `left_from`: the largest of smaller counts that might do, but were not searched any more."""

    sizes: tuple[Size, ...]
    smallest: Size | None
    cheapest: Size | None
    left_from: int | None = None


def offer_of(device: str) -> Offer:
    """A device's usual node ("h100"), a node preset ("dgx-h100") or a cluster file whose last link is the network.

    Raises SpecError for an unknown name, or a file that cannot be grown.
    """
    if device.endswith(".toml") or "/" in device:
        return _offer_of_file(device)
    nodes = {NODES[name].device: name for name in NODES} | {name: name for name in NODES}
    if device not in nodes:
        known = [name for name in nodes if name != "cpu"]
        what = f"no node preset holds {device}" if device in DEVICES else f"unknown device {device!r}"
        raise SpecError(what, where="--device", try_=f"{nearest(device, known)}, or a cluster file")
    name = nodes[device]
    per_node = NODES[name].devices_per_node

    def cluster(devices: int) -> ClusterSpec:
        return preset(name, 1).resized(devices) if devices < per_node else preset(name, devices // per_node)

    return Offer(name=name, cluster=cluster, devices_per_node=per_node)


def _offer_of_file(path: str) -> Offer:
    whole = ClusterSpec.load(Path(path))
    per_node = whole.links[-2].span if len(whole.links) > 1 else 1

    return Offer(name=whole.name, cluster=whole.resized, devices_per_node=per_node)


def counts_of(offer: Offer) -> list[int]:
    """Counts worth asking for, in order."""
    per_node = offer.devices_per_node
    parts = [n for n in range(1, per_node) if per_node % n == 0]
    most = MOST_DEVICES // per_node
    round_ = sorted({odd << a for odd in (1, 3, 5, 9, 15) for a in range(21) if odd << a <= most})
    return [*parts, *(per_node * n for n in round_)]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What has to be trained. `useful` is the fraction of the time that trains, the rest being failures and evaluation;
    `price` is money per device and hour. Raises SpecError for a value out of range."""

    tokens: float | None
    tokens_per_step: int
    deadline_s: float | None = None
    price: float | None = None
    useful: float = 1.0

    def __post_init__(self) -> None:
        for name in ("tokens", "deadline_s", "price"):
            if getattr(self, name) is not None:
                finite_positive(getattr(self, name), f"--{name.removesuffix('_s')}")
        require_count(self.tokens_per_step, "tokens per step")
        require_fraction(self.useful, "--useful")


def size(
    offer: Offer, job: Job, parameters: int, plan_for: Callable[[ClusterSpec], SearchResult],
    counts: Sequence[int] | None = None, check: Callable[[ClusterSpec], None] = lambda cluster: None,
) -> Sizing:  # fmt: skip
    """The sizes looked at, and the best of them. With `counts` exactly those are. `check` raises SpecError for a
    cluster that the pins do not go with; such counts are passed over, unless they are asked for.

    `plan_for` searches a cluster's plan. Raises InfeasiblePlanError if no count meets the deadline.
    """
    run = _Run(offer, job, plan_for, check, counts)
    if counts is None:
        if job.tokens is None or job.deadline_s is None:
            raise SpecError("without counts, tokens and a deadline decide", where="size",
                            try_="--tokens 15e12 --deadline 30d, or --counts 64,128")  # fmt: skip
        run.approach(parameters)
    else:
        for count in sorted(set(counts)):
            run.look_at(count)
    found = run.result()
    if counts is None and found.smallest is None:
        raise run.missed()
    return found


class _Run:
    def __init__(
        self, offer: Offer, job: Job, plan_for: Callable[[ClusterSpec], SearchResult],
        check: Callable[[ClusterSpec], None], counts: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.offer, self.job, self.plan_for = offer, job, plan_for
        asked = counts or counts_of(offer)
        self.refusals = {count: error for count in asked if (error := self._refusal(count, check)) is not None}
        self.counts = [count for count in asked if count not in self.refusals]
        if not self.counts:
            raise self.refusals[asked[-1]]
        self.seen: dict[int, Size] = {}
        self.left_from: int | None = None
        self.odd: set[int] = set()  # counts that no degrees factor; others without a plan have too little memory

    def _refusal(self, devices: int, check: Callable[[ClusterSpec], None]) -> SpecError | None:
        try:
            check(self.offer.cluster(devices))
        except SpecError as error:
            return error
        return None

    def look_at(self, devices: int) -> Size:
        if devices not in self.seen:
            self.seen[devices] = self._search(devices)
        return self.seen[devices]

    def _search(self, devices: int) -> Size:
        if devices in self.refusals:
            return Size(devices=devices, plan=None, reason=self.refusals[devices].what)
        cluster = self.offer.cluster(devices)
        try:
            plan = self.plan_for(cluster).plan
        except InfeasiblePlanError as error:
            if error.where != "memory":
                self.odd.add(devices)
            return Size(devices=devices, plan=None, reason=error.what)
        prediction, job = plan.prediction, self.job
        train_s = math.inf
        if job.tokens is not None:
            train_s = math.ceil(job.tokens / job.tokens_per_step) * prediction["step_time_s"] / job.useful
        cost = None if job.price is None else devices * train_s / 3600 * job.price
        peak = max(stage["total"] for stage in prediction["peak_memory_bytes"])
        spare = cluster.device.memory_bytes - peak
        return Size(devices=devices, plan=plan, train_s=train_s, cost=cost, headroom_bytes=spare)

    def meets(self, found: Size) -> bool:
        return found.plan is not None and (self.job.deadline_s is None or found.train_s <= self.job.deadline_s)

    def approach(self, parameters: int) -> None:
        tokens, deadline_s = self.job.tokens, self.job.deadline_s
        assert tokens is not None
        assert deadline_s is not None
        device = self.offer.cluster(self.offer.devices_per_node).device
        peak = max(device.flops.get(dtype, 0.0) for dtype in ("bf16", "fp16", "fp32"))
        guess = 6 * parameters * tokens / (deadline_s * self.job.useful * peak * GUESSED_MFU)
        # a power of two first: batches mostly are, so this is a count that factors well
        place = self._place(2.0 ** math.floor(math.log2(max(1.0, guess))))
        first = self.look_at(self.counts[place])
        if first.plan is not None:
            place = self._place(0.95 * first.devices * first.train_s / deadline_s)
        reached = self._up(place)
        if reached is None:
            return
        self._down(reached - 1)
        smallest = min(count for count, found in self.seen.items() if self.meets(found))
        for factor in LARGER:
            self.look_at(self.counts[self._place(factor * smallest)])

    def _place(self, devices: float) -> int:
        """Index of the first count that is at least `devices`."""
        return min(bisect.bisect_left(self.counts, devices * (1 - 1e-9)), len(self.counts) - 1)

    def _up(self, place: int) -> int | None:
        """The first place from here up that meets the deadline, in steps as long as perfect scaling allows."""
        assert self.job.deadline_s is not None
        slower, best_s = 0, math.inf
        while place < len(self.counts) and not self._spent and slower < MOST_SLOWER:
            found = self.look_at(self.counts[place])
            if self.meets(found):
                return place
            if found.plan is None:
                wanted = 0.0 if found.devices in self.odd else NOTHING_FITS * found.devices
            else:
                slower = slower + 1 if found.train_s >= best_s else 0
                best_s = min(best_s, found.train_s)
                wanted = self._fewest()
            if place + 1 == len(self.counts):
                break
            place = max(place + 1, self._place(wanted))
        return None

    @property
    def _spent(self) -> bool:
        """Whether enough was searched. What no degrees factor took no time."""
        return len(self.seen) - len(self.odd) >= MOST_SEARCHES

    def _fewest(self) -> float:
        """Devices it takes at the best use of them seen so far; a count that factors badly may take more."""
        assert self.job.deadline_s is not None
        hours = min(found.device_hours for found in self.seen.values())
        return hours * 3600 / self.job.deadline_s

    def _down(self, place: int) -> None:
        """Every smaller count that could meet the deadline if it used its devices somewhat better than any seen, down
        to where memory ends."""
        too_small = 0
        while place >= 0 and too_small < 2:
            count = self.counts[place]
            if count < BETTER * self._fewest():
                return
            if self._spent and count not in self.seen:
                self.left_from = count
                return
            if self.look_at(count).plan is not None:
                too_small = 0
            elif count not in self.odd:
                too_small += 1
            place -= 1

    def result(self) -> Sizing:
        sizes = tuple(self.seen[count] for count in sorted(self.seen))
        good = [found for found in sizes if self.meets(found)]
        cheapest = min(good, key=lambda s: (s.device_s_per_step, s.devices), default=None)
        smallest = good[0] if good else None
        return Sizing(sizes=sizes, smallest=smallest, cheapest=cheapest, left_from=self.left_from)

    def missed(self) -> InfeasiblePlanError:
        planned = [found for found in self.seen.values() if found.plan is not None]
        if not planned:
            largest = self.seen[max(self.seen)]
            return InfeasiblePlanError(
                f"no plan with {largest.devices} devices or fewer: {largest.reason}", where="size"
            )
        best = min(planned, key=lambda s: s.train_s)
        return InfeasiblePlanError(
            f"no count of {self.offer.name} meets the deadline: the fastest looked at, {best.devices} devices, "
            f"takes {best.train_s / 86400:.3g} days",
            where="--deadline",
            try_=f"at least {_days_up(best.train_s)}d, or a larger --global-batch, which more devices can share",
        )


def _days_up(seconds: float) -> str:
    """Three digits, never less than it is."""
    days = seconds / 86400
    scale = 10.0 ** (math.floor(math.log10(days)) - 2)
    return f"{math.ceil(days / scale) * scale:.6g}"
