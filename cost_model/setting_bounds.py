"""Lower bounds of the step for settings that differ in schedule and chunks a rank only, all of them at once.

    quick    stages of equal time, every layer in its fastest mode, the least tail of stages with equal parameters
    sharp    for equal layers: whole layers, and as many on a stage as its memory lets it hold

Sharp: on stage s, n layers in any modes take at least  e_s + n (c_r + r d / f_s) - r (R_s / f_s - g_s)  seconds for
every price r of a byte (`stage_table.byte_prices`), where e_s, g_s are time and kept bytes of the ends, R_s the room
beside what needs no layers, d the state of a layer, f_s the micro-batches in flight and c_r the least of time + r bytes
over the modes of a layer. So within B seconds the stage holds at most the whole part of n_s(B), the least over r; no
cut has its slowest stage below the smallest B with  sum_s floor n_s(B) >= layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from autopar.cost_model.candidates import SettingGroup
from autopar.cost_model.memory import flights
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.stage_table import Floats, LayerClass, byte_prices, useful_bytes

__all__ = ["SettingBounds", "least_slowest_s"]

_SLACK = 1e-9
"""Relative: what rounding may cost, so that a bound never exceeds a price."""

_STEPS = 14
"""Halvings of the interval of B: what is left of it is lost sharpness only, its lower end is the bound."""


Held = Callable[[Floats], Floats]
"""Seconds that no stage of a run may exceed [run] -> layers that each stage can hold then [run, stage]."""


def least_slowest_s(held: Held, low: Floats, high: Floats, layers: int, chunks: Floats) -> Floats:
    """[run]: a lower bound of the slowest stage, between `low` and `high`, where stages hold `layers` all together and
    each of them one a chunk."""

    def enough(bound_s: Floats) -> Floats:
        found = held(bound_s)
        fits: Floats = (found.min(axis=1) >= chunks) & (found.sum(axis=1) >= layers)
        return fits

    high = np.where(enough(low), low, np.maximum(low, high))
    for _ in range(_STEPS if (high > low).any() else 0):
        middle = (low + high) / 2
        within = enough(middle)
        low, high = np.where(within, low, middle), np.where(within, middle, high)
    return low


class SettingBounds:
    """Seconds without overhead of every run of `group`; `price` is of one of them. `receives_s`: seconds of a
    micro-batch that each stage waits for others in, a chunk, hidden by nothing; by default the same for all."""

    def __init__(self, price: SettingPrice, group: SettingGroup, receives_s: Floats | None = None) -> None:
        self.price, self.group = price, group
        self.chunks = np.array([chunks for _, chunks in group.runs], dtype=np.float64)
        self.splits = np.array([schedule == "zero-bubble" for schedule, _ in group.runs])
        if receives_s is None:
            receives_s = np.full(price.pp, price.step.receives_s(price.blocks.border_bytes))
        send_s = receives_s * self.chunks[:, None]
        if "pp_send" in price.cluster.stack.overlap:
            plain = np.array([schedule == "1f1b" for schedule, _ in group.runs])[:, None]
            send_s = np.where(plain, 1 - price.step.constants["pp_hidden"], 1.0) * send_s
        self.send_s = send_s

    @cached_property
    def _slowest_s(self) -> Floats:
        """Of stages of equal time, or of one with its share of whole layers."""
        price = self.price
        slowest_s = self._whole_s / price.pp
        if price.equal_layers:
            slowest_s = max(slowest_s, math.ceil(len(price.prices.traced.layers) / price.pp) * price.fastest_s[0])
        least: Floats = slowest_s + self.send_s.min(axis=1)
        return least

    @cached_property
    def _whole_s(self) -> float:
        ends_s = sum(sum(self.price.step.end(unit).values()) for _, unit in self.price.ends)
        return self.price.layers_s() + ends_s

    @cached_property
    def _rest_s(self) -> Floats:
        price = self.price
        units = [(n, layer.unit) for n, layer in zip(price.prices.repeats.values(), price.classes, strict=True)]
        split_s = 2 * price.all_weights_s(units) if self.splits.any() else 0.0
        late_s = np.where(self.splits, split_s, 0.0)
        flow_s = self._whole_s + self.send_s.sum(axis=1) - late_s
        rest: Floats = flow_s / self.chunks + price.least_tail_s(units) + late_s / price.pp
        return rest

    def quick(self) -> Floats:
        return self._with_slowest(self._slowest_s)

    def sharp(self, segment: int) -> Floats:
        """`segment`: the most layers that are recomputed together. Infinite where no cut fits in memory."""
        if not self.price.equal_layers:
            return self.quick()
        most, total = self.most_layers(segment), len(self.price.prices.traced.layers)
        fits = (most.min(axis=1) >= self.chunks) & (most.sum(axis=1) >= total)
        if not fits.any():
            return np.full(len(fits), np.inf)
        held, full_s = self.held_within(segment)
        high = np.where(fits, full_s.max(axis=1), 0.0)
        slowest_s = least_slowest_s(held, self._slowest_s, high, total, self.chunks)
        return np.where(fits, self._with_slowest(slowest_s), np.inf)

    def _with_slowest(self, slowest_s: Floats) -> Floats:
        found: Floats = (self.price.m - 1 / self.chunks) * slowest_s + self._rest_s
        return found

    # --- memory: arrays are [run, stage] ------------------------------------------------------------------------------

    @cached_property
    def _flight(self) -> Floats:
        return flights(self.group.runs, self.price.pp, self.price.m)

    @cached_property
    def _layer(self) -> LayerClass:
        return self.price.layer_class(0)

    @cached_property
    def _room(self) -> Floats:
        """Bytes for layers and what they keep."""
        price, device = self.price, self.price.cluster.device
        least = min(mode.transient_bytes for mode in self._layer.modes)
        working = np.array([max(price.working_bytes(s), least) for s in range(price.pp)])
        limit = device.memory_bytes - device.reserved_bytes
        room: Floats = limit * (1 + _SLACK) - price.fixed_bytes(self._flight, self.chunks) - working
        return room

    @cached_property
    def _glue(self) -> Floats:
        """Bytes a micro-batch that the prologue keeps, by stage."""
        kept = np.zeros(self.price.pp)
        kept[0] = self.price.blocks.prologue.work.saved_bytes
        return kept

    @cached_property
    def _ends_s(self) -> Floats:
        return np.array([self.price.ends_s(s) for s in range(self.price.pp)]) + self.send_s

    def most_layers(self, segment: int) -> Floats:
        """Layers that the memory of a stage can hold; no more than leave one for every other chunk."""
        least = min(kept for _, kept in useful_bytes(self._layer, segment))
        each = self._layer.static_bytes + self._flight * least
        fit = np.floor((self._room - self._flight * self._glue) / np.maximum(each, 1e-9) + _SLACK)
        others = self.chunks * (self.price.pp - 1)
        found: Floats = np.minimum(fit, (len(self.price.prices.traced.layers) - others)[:, None])
        return found

    def _lines(self, segment: int) -> list[tuple[Floats, Floats]]:
        """(seconds without layers, seconds a layer) at least, for every price of a byte."""
        modes, lines = useful_bytes(self._layer, segment), []
        for rate in (0.0, *byte_prices([self._layer], segment)):
            alone = self._ends_s - rate * (self._room / self._flight - self._glue)
            lines.append((alone, min(t + rate * b for t, b in modes) + rate * self._layer.static_bytes / self._flight))
        return lines

    def held_within(self, segment: int) -> tuple[Held, Floats]:
        """Layers that each stage can hold within given seconds at most; and the seconds that as many as its memory can
        hold take at least."""
        most, lines = self.most_layers(segment), self._lines(segment)

        def held(bound_s: Floats) -> Floats:
            fewest = most
            for alone, each in lines:
                fewest = np.minimum(fewest, np.floor((bound_s[:, None] - alone) / each * (1 + _SLACK) + _SLACK))
            return fewest

        full_s: Floats = np.max([alone + most * each for alone, each in lines], axis=0)
        return held, full_s
