"""Why an alternative loses: the first reason, in one sentence with a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.cost_model.evaluate import TIME_PARTS, Evaluation
from autopar.specs import ClusterSpec

__all__ = ["across_slow_link", "reason_it_loses"]

_NAMES = {
    "forward": "forward compute",
    "backward": "backward compute",
    "recompute": "recompute",
    "tp_communication": "tp communication",
    "cp_communication": "cp communication",
    "dp_communication": "dp communication",
    "pp_communication": "pipeline sends",
    "accumulation": "gradient accumulation",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "straggler": "waiting for the slowest node",
    "overhead": "overhead of a step",
}


def reason_it_loses(other: Evaluation, best: Evaluation) -> str:
    """The part of the step that costs most more than in the chosen plan."""
    if other.step_s < best.step_s * (1 - 1e-9):
        return f"{1 - other.step_s / best.step_s:.2%} faster, less than what a kept plan is given up for"
    if other.step_s <= best.step_s * (1 + 1e-9):
        return "as fast, but uses more axes or smaller micro-batches"
    part = largest_excess(other.time_s, best.time_s)
    more = other.time_s[part] - best.time_s[part]
    unit = (
        f"{more:.3g} s" if more >= 0.9995 else f"{1e3 * more:.3g} ms" if more >= 0.9995e-3 else f"{1e6 * more:.3g} us"
    )
    return f"{_NAMES[part]}: {unit} more a step"


def largest_excess(other: Mapping[str, float], best: Mapping[str, float]) -> str:
    return max(TIME_PARTS, key=lambda part: other[part] - best[part])


def across_slow_link(cluster: ClusterSpec, solved: Iterable[Evaluation], proven_s: float) -> str:
    """The fastest plan with tp or cp over the outermost link, and the fastest without; "" for a single device or node.
    Where one link joins all devices none is the slow one: then what stands side by side is tp or cp, and neither.

    `solved` are the best settings of the layouts that were worked out; no other is faster than `proven_s`.
    """
    span = cluster.links[-2].span if len(cluster.links) > 1 else 1
    if cluster.num_devices <= max(span, 1):
        return ""
    inside: list[Evaluation] = []
    across: list[Evaluation] = []
    for e in solved:
        d = e.setting.degrees
        (across if span % (d.tp * d.cp) else inside).append(e)  # groups that do not fill a unit evenly lie in two
    name = cluster.links[-1].name
    with_it, without = _fastest(across, proven_s), _fastest(inside, proven_s)
    if span == 1:
        return f"all devices are joined by {name}: with tp or cp {with_it}; with neither {without}"
    return f"tp and cp by the slow link {name}: across it {with_it}; inside it {without}"


def _fastest(found: Iterable[Evaluation], proven_s: float) -> str:
    fastest = min(found, key=lambda e: e.step_s, default=None)
    if fastest is None:
        return f"at least {proven_s:.4g} s a step" if proven_s < float("inf") else "no plan"
    d = fastest.setting.degrees
    return (
        f"{fastest.step_s:.4g} s a step ({' '.join(f'{a}={n}' for a, n in vars(d).items() if n > 1) or 'one device'})"
    )
