"""What it costs to free memory on a stage: prices of a byte at which its layers change modes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_model.mode_mixes import LayerClass

__all__ = ["byte_prices", "freed_s", "useful_bytes"]


def useful_bytes(layer: LayerClass, segment: int) -> list[tuple[float, float]]:
    """(seconds, bytes kept at least) of a layer in each of its modes, recomputed in segments of `segment`."""
    return [(m.time_s, m.saved_bytes / (segment if m.name == "full" else 1)) for m in layer.modes]


def byte_prices(classes: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds a byte at which the bound of a stage bends: slopes of the lower hull of time over bytes of each class, of
    which the (seconds, bytes) of every mode are given.

    The least time of a stage that may keep X bytes a micro-batch is at least  sum_c n_c min_mode (t + r b) - r X  for
    every price r of a byte (its Lagrangian); the largest of these bounds is at one of the slopes.
    """
    prices = set()
    for modes in classes:
        points = sorted(modes)
        time_s, kept = points[0]
        while leaner := [((t - time_s) / (kept - b), t, b) for t, b in points if b < kept]:
            price, time_s, kept = min(leaner, key=lambda step: (step[0], step[2]))
            prices.add(price)
    return sorted(prices)


def freed_s(layer: LayerClass, segment: int, rate: float) -> float:
    """What a layer takes more than at least, if a byte kept costs `rate` seconds."""
    modes = useful_bytes(layer, segment)
    return min(t + rate * b for t, b in modes) - min(t for t, _ in modes)
