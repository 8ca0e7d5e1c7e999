"""Why nothing fits on unequal groups: how much memory of each would do, and the pins without which there is a plan.

As in `infeasible`, every statement is a search of its own, here one that ends at the first plan that fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.cost_model.infeasible import gib_text
from autopar.errors import InfeasiblePlanError
from autopar.plan import Plan
from autopar.specs import ClusterSpec, GroupSpec, Pins

__all__ = ["Fitting", "explain_groups"]

_NEAR = 0.01
"""Memory that would do is found to this part of it."""


@dataclass(frozen=True)
class Fitting:
    """A plan whose stages fit on their groups, and what the fullest device of each group holds, in bytes."""

    plan: Plan
    peak_bytes: dict[str, int]


FirstFit = Callable[[ClusterSpec, Pins], Fitting | None]


def explain_groups(
    refused: InfeasiblePlanError, cluster: ClusterSpec, pins: Pins, headroom: float, first_fit: FirstFit,
    deadline_s: float,
) -> InfeasiblePlanError:  # fmt: skip
    """`refused` says why nothing fits where all devices are equals of the slowest; `first_fit` is any plan with stages
    on groups."""
    given = ", ".join(f"{g.name} {gib_text(g.device.memory_bytes)} a device" for g in cluster.groups)
    what = f"stages on groups do not fit ({given})"
    texts = pins.texts()
    for text in texts:
        without = Pins.parse(t for t in texts if t != text)
        if time.perf_counter() < deadline_s and first_fit(cluster, without):
            what += f"; the pin {text} is to blame, without it they do"
    remedies, nearest = [], refused.nearest_plan
    for group in cluster.groups:
        found = _enough(cluster, group, pins, headroom, first_fit, deadline_s)
        if found is not None:
            remedies.append(f"{gib_text(found[0], up=True)} a device in group {group.name}")
            nearest = found[1] if len(remedies) == 1 else nearest
    return InfeasiblePlanError(
        f"{what}. All devices as equals of the slowest: {refused.what}", where=refused.where,
        try_=", or ".join((*remedies, refused.try_)), nearest_plan=nearest,
    )  # fmt: skip


def _enough(
    cluster: ClusterSpec, group: GroupSpec, pins: Pins, headroom: float, first_fit: FirstFit, deadline_s: float
) -> tuple[int, Plan] | None:
    """Bytes a device of this group that do where the others are left as they are, and the plan; None if none do."""

    def fit_in(nbytes: int) -> tuple[int, Plan] | None:
        device = replace(group.device, memory_bytes=nbytes)
        groups = tuple(replace(g, device=device) if g is group else g for g in cluster.groups)
        found = first_fit(replace(cluster, groups=groups), pins)
        if found is None:
            return None
        return math.ceil((found.peak_bytes[group.name] + 1) / (1 - headroom)), found.plan

    low = group.device.memory_bytes
    best = fit_in(_PLENTY) if time.perf_counter() < deadline_s else None
    while best is not None and best[0] - low > _NEAR * best[0] and time.perf_counter() < deadline_s:
        middle = (low + best[0]) // 2
        found = fit_in(middle)
        best, low = (best, middle) if found is None else (found, low)
    return best


_PLENTY = 1 << 50
"""Bytes that no stage needs."""
