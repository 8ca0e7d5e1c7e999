"""Lower bounds of a step whose stages lie on unequal groups.

Work is a number of things n_c (layers of a class), each t_cg seconds on a stage of group g. However they are placed,
the slowest stage takes at least

    sum_c n_c min_g (z_g t_cg)      for any z >= 0 with  sum over stages s of z_g(s) = 1

(the dual of dividing them among the stages); z_g ~ 1 / sum_c n_c t_cg divides them in proportion to speed, and is exact
for one class. What lies on a known stage (ends, receives) counts there. Of equal layers whole ones are counted, no more
on a stage than its memory holds, as for equal devices (`setting_bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost_model.candidates import SettingGroup
from autopar.cost_model.mixed_stages import MixedPrice
from autopar.cost_model.setting_bounds import SettingBounds, divided_s, least_slowest_s
from autopar.cost_model.stage_table import Floats

__all__ = ["MixedBounds", "shared_s", "stage_shares"]


def stage_shares(numbers: Floats, times: Floats, owner: Sequence[int]) -> Floats:
    """[stage]: z of the dual. `numbers` [c]; `times` [c, g]; `owner` is the group of each stage."""
    whole = numbers @ times
    speed = np.array([1 / whole[g] if whole.min() > 0 else 1.0 for g in owner])
    shares: Floats = speed / speed.sum()
    return shares


def shared_s(numbers: Floats, times: Floats, owner: Sequence[int], shares: Floats) -> float:
    """Seconds of the slowest stage at least."""
    used = sorted(set(owner))
    rates = np.array([shares[list(owner).index(g)] for g in used])
    return float(numbers @ (times[:, used] * rates).min(axis=1))


def _as_many_lines(arrays: Sequence[Floats]) -> list[Floats]:
    """[run, stage, r, ..] of each group, the last line repeated where fewer prices of a byte bind."""
    most = max(array.shape[2] for array in arrays)
    return [np.concatenate([a, *[a[:, :, -1:]] * (most - a.shape[2])], axis=2) for a in arrays]


class MixedBounds:
    """As `SettingBounds`, of one order of the groups; `price` is of one run of `group`."""

    def __init__(self, price: MixedPrice, group: SettingGroup) -> None:
        self._price, self._pp = price, len(price.owner)
        receives_s = price.receives_s()
        self._groups = [SettingBounds(own, group, receives_s) for own in price.prices]
        first = price.prices[0]
        self._chunks, self._splits = self._groups[0].chunks, self._groups[0].splits
        self._layers = len(first.prices.traced.layers)
        self._numbers = np.array(list(first.prices.repeats.values()), dtype=np.float64)
        self._times = np.array([own.fastest_s for own in price.prices]).T
        self._sends_s = self._own([bounds.send_s for bounds in self._groups])
        self._ends_s = np.array([price.prices[g].ends_s(s) for s, g in enumerate(price.owner)])

    def _own(self, arrays: Sequence[Floats]) -> Floats:
        """[run, stage, ..] of every stage's own group."""
        return np.stack([arrays[g][:, s] for s, g in enumerate(self._price.owner)], axis=1)

    def quick(self) -> Floats:
        return self._with_slowest(self.slowest_s())

    def sharp(self, segment: int) -> Floats:
        """As `SettingBounds.sharp`."""
        if not self._price.prices[0].equal_layers:
            lines = zip(*(bounds.lines(segment) for bounds in self._groups), strict=True)
            alone, each = (self._own(_as_many_lines(of)) for of in lines)
            return self._with_slowest(np.maximum(self.slowest_s(), divided_s(self._numbers, alone, each)))
        most = self._own([bounds.most_layers(segment) for bounds in self._groups])
        fits = (most.min(axis=1) >= self._chunks) & (most.sum(axis=1) >= self._layers)
        if not fits.any():
            return np.full(len(fits), np.inf)
        held, full_s = zip(*(bounds.held_within(segment) for bounds in self._groups), strict=True)
        high = np.where(fits, self._own(full_s).max(axis=1), 0.0)
        slowest_s = least_slowest_s(
            lambda bound_s: self._own([of(bound_s) for of in held]), self.slowest_s(), high, self._layers, self._chunks
        )
        return np.where(fits, self._with_slowest(slowest_s), np.inf)

    def slowest_s(self) -> Floats:
        """[run]: of the slowest stage, whatever memory says."""
        owner = self._price.owner
        shares = stage_shares(self._numbers, self._times, owner)
        found: Floats = shared_s(self._numbers, self._times, owner, shares) + (self._ends_s + self._sends_s) @ shares
        return found

    def _with_slowest(self, slowest_s: Floats) -> Floats:
        pace_s = (self._price.m - 1 / self._chunks) * slowest_s
        found: Floats = pace_s + self.flow_s() / self._chunks + self.tail_s()
        return found

    def flow_s(self) -> Floats:
        """[run]: of all stages, less what zero-bubble puts off."""
        sends_s: Floats = self._sends_s.sum(axis=1)
        whole_s = float(self._numbers @ self._times.min(axis=1) + self._ends_s.sum())
        if not self._splits.any():
            plain: Floats = sends_s + whole_s
            return plain
        prices, owner = self._price.prices, self._price.owner
        kept = self._times - np.array([[2 * own.step.all_weights_s(c.unit) for c in own.classes] for own in prices]).T
        ends_s = [
            prices[g].ends_s(s) - 2 * sum(prices[g].step.all_weights_s(unit) for unit in prices[g].end_units(s))
            for s, g in enumerate(owner)
        ]
        split_s = float(self._numbers @ kept.min(axis=1)) + sum(ends_s)
        found: Floats = sends_s + np.where(self._splits, split_s, whole_s)
        return found

    def tail_s(self) -> float:
        """Of the longest tail: the optimizer, divided in proportion to its speed; or, for equal layers, what follows
        the mean number of them, which some stage has: more there take no less (a tail is convex), unless computing them
        hides more."""
        prices = self._price.prices
        trained = sum(unit.trained for _, unit in prices[0].ends)
        trained += sum(n * c.unit.trained for n, c in zip(self._numbers, prices[0].classes, strict=True))
        each_s = [prices[g].step.optimizer_s(1.0) for g in self._price.owner]
        least_s = trained / sum(1 / s for s in each_s) if min(each_s) > 0 else 0.0
        if not prices[0].equal_layers:
            return float(least_s)
        return max(float(least_s), min(self._mean_tail_s(g) for g in set(self._price.owner)))

    def _mean_tail_s(self, group: int) -> float:
        price = self._price.prices[group]
        layer, layers = price.classes[0].unit, self._layers / self._pp
        work = layer.price
        forward_s = work.forward_s + work.forward_communication_s
        backward_s = work.backward_s + work.backward_communication_s
        here, beyond = (
            price.step.least_tail_s(n * layer.trained, n * forward_s, n * backward_s) for n in (layers, layers * 1.001)
        )
        return here if beyond >= here else 0.0
