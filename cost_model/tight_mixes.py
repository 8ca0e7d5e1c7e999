"""Mixes of many equal layers, of which only those that fill a stage's memory are listed.

Of two modes that keep as much for every layer they run, the faster one runs as many as there is room for, whatever the
others do: its number follows from theirs, and the list has a dimension less than that of all mixes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.cost_model.mode_mixes import Floats, LayerClass, Mixes, compositions, mixes_of, useful_modes

__all__ = ["tight_mixes"]

Room = Callable[[Floats], Floats]
"""Largest working set of a stage's layers -> bytes that they may keep a micro-batch."""


def tight_mixes(layer: LayerClass, count: int, segment: int, chunks: int, room: Room) -> Mixes | None:
    """Mixes of `count` layers among which is the fastest that fits; None if no two modes can be traded."""
    useful = useful_modes(layer.modes)
    traded = [mode for mode in useful if mode.name != "full" or segment == 1]
    if len(useful) < 3 or len(traded) < 2:
        return None
    fast, lean = min(traded, key=lambda m: m.time_s), min(traded, key=lambda m: m.saved_bytes)
    if fast.saved_bytes <= lean.saved_bytes:
        return None
    rest = [layer.modes.index(mode) for mode in useful if mode not in (fast, lean)]
    parts = compositions(count, len(rest) + 1)
    left, choice = parts[:, -1], np.zeros((len(parts), len(layer.modes)), dtype=np.int64)
    choice[:, rest] = parts[:, :-1]
    fixed = mixes_of(layer, choice, segment, chunks)
    working = np.maximum(fixed.transient_bytes, max(fast.transient_bytes, lean.transient_bytes))
    missing = fixed.kept_bytes + left * fast.saved_bytes - room(working)
    fewest = np.ceil(missing / (fast.saved_bytes - lean.saved_bytes))
    found = []
    # all in the fast mode may fit where the lean one's working set does not; all in the lean one is among the clipped
    for in_lean in (0 * left, *(np.clip(fewest + more, 0, left).astype(np.int64) for more in (-1, 0, 1))):
        choice[:, layer.modes.index(fast)], choice[:, layer.modes.index(lean)] = left - in_lean, in_lean
        found.append(choice.copy())
    return mixes_of(layer, np.concatenate(found), segment, chunks)
