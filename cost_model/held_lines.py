"""What a stage holds at its moments, as lines in the bytes that its layers keep for a micro-batch.

    held(moment) = there + flight kept + (working, if in a layer)

The most over all moments is a convex function of few pieces: interleaving has as many moments as chunks, of which only
those on the upper hull count.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["Line", "outermost", "peak_bytes", "room_bytes"]

Floats = npt.NDArray[np.float64]

Line = tuple[float, float, bool]
"""(bytes beside, micro-batches in flight, whether a layer works)."""


def outermost(lines: Iterable[Line]) -> list[Line]:
    """Those that can be the most for some number of bytes kept; at an end, and in a layer."""
    found: list[Line] = []
    for kind in (False, True):
        hull: list[tuple[float, float]] = []
        for flight, there in sorted((flight, there) for there, flight, in_layer in lines if in_layer == kind):
            while hull and (hull[-1][1] <= there or (len(hull) > 1 and _is_below(hull[-2], hull[-1], (flight, there)))):
                hull.pop()
            hull.append((flight, there))
        found += [(there, flight, kind) for flight, there in hull]
    return found


def _is_below(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether `a` or `c` is as high as `b` everywhere; (slope, intercept), slopes rise and intercepts fall."""
    return (c[1] - a[1]) * (b[0] - a[0]) >= (b[1] - a[1]) * (c[0] - a[0])


def peak_bytes(lines: Iterable[Line], kept: Floats, working: Floats) -> Floats:
    """The most at any of the moments, for every pair of bytes kept and worked in."""
    total: Floats = np.full(kept.shape, -np.inf)
    for there, flight, in_layer in lines:
        held = there + flight * kept
        total = np.maximum(total, held + working if in_layer else held)
    return total


def room_bytes(lines: Iterable[Line], limit: float, working: Floats) -> Floats:
    """What layers may keep a micro-batch at most, beside each of their working sets."""
    room: Floats = np.full(working.shape, np.inf)
    for there, flight, in_layer in lines:
        left = limit - there - (working if in_layer else 0.0 * working)
        room = np.minimum(room, left / flight if flight > 0 else np.where(left >= 0, np.inf, -np.inf))
    return room
