"""Lower bounds of the step for settings that differ in schedule and chunks a rank only, all of them at once.

    quick    stages of equal time, every layer in its fastest mode, the least tail of stages with equal parameters
    sharp    as many layers on a stage as its memory lets it hold; of equal layers, whole ones

Sharp: on stage s, layers n_c of class c in any modes take at least

    alone_sr + sum_c each_src n_c    with  alone = e_s - r (R_s / f_s - g_s)  and  each = c_cr + r d_c / f_s

seconds for every price r of a byte (`byte_prices`), where e_s, g_s are time and kept bytes of the ends,
R_s the room beside what needs no layers, d_c the state of a layer, f_s the micro-batches in flight and c_cr the least
of time + r bytes over the modes of a layer; R, d and f before any gradient is there, or when all are. Of equal layers
the stage holds, within B seconds, at most the whole part of n_s(B), the least over r; no cut has its slowest stage
below the smallest B with  sum_s floor n_s(B) >= layers. Of several classes (`divided_s`) no division of all N_c layers
has it below

    sum_s z_s alone_s + sum_c N_c min_s (z_s each_sc)    for any z >= 0 with  sum_s z_s = 1

whichever r each stage is held against. z_s ~ 1 / sum_c N_c each_sc divides in proportion to speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.cost_model.byte_prices import byte_prices, useful_bytes
from autopar.cost_model.candidates import SettingGroup
from autopar.cost_model.mode_mixes import LayerClass
from autopar.cost_model.moments import bounding_flights
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.stage_table import Floats

__all__ = ["SettingBounds", "divided_s", "least_slowest_s"]

_SLACK = 1e-9
"""Relative: what rounding may cost, so that a bound never exceeds a price."""

_STEPS = 11
"""Halvings of the interval of B: what is left of it is lost sharpness only, its lower end is the bound."""

_ALIKE = 0.01
"""Working sets that differ by less of a device's memory are bounded as one."""

_DIVISIONS = 3
"""Divisions of the layers that `divided_s` looks at."""

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


def divided_s(numbers: Floats, alone: Floats, each: Floats) -> Floats:
    """[run]: a lower bound of the slowest stage, over any division of `numbers` [class] of layers. `alone` [run, stage,
    r]; `each` [run, stage, r, class]. Looks at the lines r that bind where the layers are spread evenly, then where
    they are as the last bound allows."""
    runs, stages, _ = alone.shape
    held, best = np.broadcast_to(numbers / stages, (runs, stages, len(numbers))), np.zeros(runs)
    for _ in range(_DIVISIONS):
        line = (alone + np.einsum("abrc,abc->abr", each, held)).argmax(axis=2)[:, :, None]
        own = np.take_along_axis(alone, line, axis=2)[:, :, 0]
        pace = np.take_along_axis(each, line[..., None], axis=2)[:, :, 0]
        whole = pace @ numbers
        shares = 1 / whole
        shares /= shares.sum(axis=1, keepdims=True)
        found = (shares * own).sum(axis=1) + (shares[:, :, None] * pace).min(axis=1) @ numbers
        best = np.maximum(best, found)
        parts = np.maximum(found[:, None] - own, 0.0) / whole
        held = (parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-300))[:, :, None] * numbers
    return best * (1 - _SLACK)


@dataclass(frozen=True)
class _Moment:
    """Micro-batches in flight, bytes beside layers and what they keep, at an end and in a layer [run, stage]; bytes a
    layer of each class has anyway [.., class]."""

    flight: Floats
    at_end: Floats
    in_layer: Floats
    static: Floats

    def room(self, limit: float, working: float) -> Floats:
        """Bytes for layers and what they keep, if one of them has a working set as large."""
        return limit - np.maximum(self.at_end, self.in_layer + working)


class SettingBounds:
    """Seconds without overhead of every run of `group`; `price` is of one of them. `receives_s`: seconds of a
    micro-batch that each stage waits for others in, a chunk, hidden by nothing; by default the same for all."""

    def __init__(self, price: SettingPrice, group: SettingGroup, receives_s: Floats | None = None) -> None:
        self.price, self.group = price, group
        self._most: dict[int, Floats] = {}
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
            numbers = np.array(list(self.price.prices.repeats.values()), dtype=np.float64)
            return self._with_slowest(np.maximum(self._slowest_s, divided_s(numbers, *self.lines(segment))))
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
    def _layers(self) -> list[LayerClass]:
        return [self.price.layer_class(i) for i in range(len(self.price.classes))]

    @cached_property
    def _moments(self) -> list[_Moment]:
        """Those of all moments of a stage that bound it. (Zero-bubble keeps no memory of gradients between steps, as
        the price's schedule may: of it the last alone.)"""
        price, schedules, found = self.price, [schedule for schedule, _ in self.group.runs], []
        own, come = (
            np.array(of, dtype=np.float64)
            for of in zip(*((c.static_bytes, c.gradient_bytes) for c in self._layers), strict=True)
        )
        flights = bounding_flights(tuple(self.group.runs), price.pp, price.m)
        last, late = flights[-1], self.splits[:, None]
        for i, flight in enumerate(flights):
            in_flight, share = (np.where(late, z, a) for a, z in zip(flight, last, strict=True))
            if any(np.array_equal(in_flight, f) and np.array_equal(share, g) for f, g in flights[i + 1 :]):
                continue
            at_end, in_layer = price.bytes.least_beside(in_flight, share, self.chunks, schedules)
            found.append(_Moment(in_flight, at_end, in_layer, own + share[:, :, None] * come))
        return found

    @cached_property
    def _limit(self) -> float:
        device = self.price.cluster.device
        return (device.memory_bytes - device.reserved_bytes) * (1 + _SLACK)

    def _working(self) -> list[tuple[float, float]]:
        """(least, most): what the largest working set of a stage's layers may be. The larger, the more modes and the
        less room; those that differ by less than matters are one."""
        found: list[tuple[float, float]] = []
        for working in sorted({mode.transient_bytes for layer in self._layers for mode in layer.modes}):
            if found and (working - found[-1][0] < _ALIKE * self._limit or not self.price.equal_layers):
                found[-1] = (found[-1][0], working)
            else:
                found.append((working, working))
        return found

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
        """Equal layers that the memory of a stage can hold; no more than leave one for every other chunk."""
        found: Floats = self._most_layers(segment).max(axis=0)
        return found

    def _most_layers(self, segment: int) -> Floats:
        """[working, run, stage]: if none of them works in more than that."""
        if segment not in self._most:
            self._most[segment] = self._most_layers_of(segment)
        return self._most[segment]

    def _most_layers_of(self, segment: int) -> Floats:
        (layer,), working = self._layers, self._working()
        least = np.array([min(kept for _, kept in self._modes(layer, segment, most)) for _, most in working])[
            :, None, None
        ]
        others = self.chunks * (self.price.pp - 1)
        found: Floats = np.tile((len(self.price.prices.traced.layers) - others)[:, None], self.price.pp)
        for moment in self._moments:
            each = np.maximum(moment.static[..., 0] + moment.flight * least, 1e-9)
            room = np.stack([moment.room(self._limit, w) for w, _ in working]) - moment.flight * self._glue
            found = np.minimum(found, np.floor(room / each + _SLACK))
        return found

    def _modes(self, layer: LayerClass, segment: int, working: float) -> list[tuple[float, float]]:
        """(seconds, bytes kept) of a layer in modes with no larger working set."""
        found = zip(layer.modes, useful_bytes(layer, segment), strict=True)
        return [figures for mode, figures in found if mode.transient_bytes <= working]

    def lines(self, segment: int) -> tuple[Floats, Floats]:
        """Seconds without layers [run, stage, r] and of a layer [.., class] at least, for every price r of a byte and
        moment; the last one is so high that what does not fit takes very long."""
        return self._lines([useful_bytes(layer, segment) for layer in self._layers], self._working()[0][0])

    def _lines(self, modes: list[list[tuple[float, float]]], working: float) -> tuple[Floats, Floats]:
        """`lines` of layers in these modes, of which one has a working set as large."""
        prices = byte_prices(modes)

        def least(rate: float) -> Floats:
            return np.array([min(t + rate * b for t, b in of_class) for of_class in modes])

        free_s = least(0.0)
        alone, each = [self._ends_s], [np.broadcast_to(free_s, (*self._ends_s.shape, len(modes)))]
        for moment in self._moments:
            flies = moment.flight > 0
            divisor = np.where(flies, moment.flight, 1.0)
            room = moment.room(self._limit, working) / divisor - self._glue * flies
            for rate in (*prices, *(1e3 * price for price in prices[-1:])):
                alone.append(self._ends_s - rate * room)
                layer_s = np.where(flies[:, :, None], least(rate), free_s)
                each.append(layer_s + rate * moment.static / divisor[:, :, None])
        return np.stack(alone, axis=2), np.stack(each, axis=2)

    def held_within(self, segment: int) -> tuple[Held, Floats]:
        """Equal layers that each stage can hold within given seconds at most; and the seconds that as many as its
        memory can hold take at least."""
        (layer,), most = self._layers, self._most_layers(segment)
        found = [self._lines([self._modes(layer, segment, most_w)], least_w) for least_w, most_w in self._working()]
        lines = max(alone.shape[2] for alone, _ in found)
        alone, each = (np.stack([_padded(of, lines) for of in arrays]) for arrays in zip(*found, strict=True))
        each, slack = each[..., 0], 1 + _SLACK

        def held(bound_s: Floats) -> Floats:
            by_line = (bound_s[:, None, None] - alone) / each
            fewest: Floats = np.minimum(most, np.floor(by_line.min(axis=3) * slack + _SLACK)).max(axis=0)
            return fewest

        full_s = np.where(most == most.max(axis=0), (alone + most[..., None] * each).max(axis=3), np.inf)
        return held, full_s.min(axis=0)


def _padded(lines: Floats, number: int) -> Floats:
    """[run, stage, r, ..] with the last line repeated."""
    return np.concatenate([lines, *[lines[:, :, -1:]] * (number - lines.shape[2])], axis=2)
