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
    return f"{_NAMES[part]}: {1e3 * more:.3g} ms more a step"


def largest_excess(other: Mapping[str, float], best: Mapping[str, float]) -> str:
    return max(TIME_PARTS, key=lambda part: other[part] - best[part])


def across_slow_link(cluster: ClusterSpec, solved: Iterable[Evaluation], proven_s: float) -> str:
    """The fastest plan with tp or cp over the outermost link, and the fastest without; "" if no link is the slow one.

    `solved` are the best settings of the layouts that were worked out; no other is faster than `proven_s`.
    """
    span = cluster.links[-2].span if len(cluster.links) > 1 else 1
    if cluster.num_devices <= max(span, 1):
        return ""
    inside: list[Evaluation] = []
    across: list[Evaluation] = []
    for e in solved:
        d = e.setting.degrees
        (across if d.tp * d.cp > span else inside).append(e)
    name = cluster.links[-1].name
    texts = [f"{how} it {_fastest(found, proven_s)}" for how, found in (("across", across), ("inside", inside))]
    return f"tp and cp by the slow link {name}: {'; '.join(texts)}"


def _fastest(found: Iterable[Evaluation], proven_s: float) -> str:
    fastest = min(found, key=lambda e: e.step_s, default=None)
    if fastest is None:
        return f"at least {proven_s:.4g} s a step" if proven_s < float("inf") else "no plan fits"
    d = fastest.setting.degrees
    return (
        f"{fastest.step_s:.4g} s a step ({' '.join(f'{a}={n}' for a, n in vars(d).items() if n > 1) or 'one device'})"
    )
