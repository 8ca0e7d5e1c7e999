"""Why an alternative loses: the first reason, in one sentence with a number."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_model.evaluate import TIME_PARTS, Evaluation

__all__ = ["reason_it_loses"]

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
    if other.step_s <= best.step_s * (1 + 1e-9):
        return "as fast, but uses more axes or smaller micro-batches"
    part = largest_excess(other.time_s, best.time_s)
    more = other.time_s[part] - best.time_s[part]
    return f"{_NAMES[part]}: {1e3 * more:.3g} ms more a step"


def largest_excess(other: Mapping[str, float], best: Mapping[str, float]) -> str:
    return max(TIME_PARTS, key=lambda part: other[part] - best[part])
