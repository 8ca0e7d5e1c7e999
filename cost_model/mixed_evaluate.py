"""Prices of settings whose stages each lie inside one of unequal groups, in the best order of the groups.

What `Evaluator` is for equal devices. Layouts over tp are those of the slowest devices, so the plan has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost_model.candidates import Partition, Setting, SettingGroup
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.mixed_bounds import MixedBounds, shared_s, stage_shares
from autopar.cost_model.mixed_stages import MixedPrice
from autopar.cost_model.pipeline_ilp import PipelineSolution, prove_table, solve_table
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.stage_table import Floats
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec

__all__ = ["MixedEvaluator", "group_orders"]

Order = tuple[int, ...]
"""Groups in the order of their ranks."""


def group_orders(cluster: ClusterSpec, degrees: Degrees) -> list[Order]:
    """Orders of the groups along the pipeline, if each is a whole number of stages; equal groups count once."""
    width, groups = cluster.num_devices // degrees.pp, cluster.groups
    if degrees.pp == 1 or any(group.num_devices % width for group in groups):
        return []
    alike = [(group.device, group.num_devices, group.links) for group in groups]
    orders = {tuple(map(alike.__getitem__, order)): order for order in itertools.permutations(range(len(groups)))}
    return sorted(orders.values())


class MixedEvaluator:
    """`slowest` prices what all devices have in common, `evaluators` each group on its view of the cluster."""

    def __init__(self, cluster: ClusterSpec, slowest: Evaluator, evaluators: Sequence[Evaluator]) -> None:
        self._cluster, self._slowest, self._evaluators = cluster, slowest, evaluators
        self._views = [evaluator.cluster for evaluator in evaluators]
        self._orders = {d: group_orders(cluster, d) for d in {p.degrees for p in slowest.partitions}}
        rooms = [view.device.memory_bytes - view.device.reserved_bytes for view in self._views]
        sizes = [group.num_devices for group in cluster.groups]
        self._mean_room_bytes = float(np.average(rooms, weights=sizes))
        self._paces: dict[tuple[int, Degrees], float] = {}
        self._sharp: dict[Setting, list[float]] = {}
        self.found: dict[Setting, tuple[Order, MixedPrice]] = {}

    # --- bounds -------------------------------------------------------------------------------------------------------

    def analytic_bound_s(self, partition: Partition) -> float:
        """Lower bound of the step in seconds from single-rank prices alone; infinite if a group is no whole number of
        stages."""
        if not self._orders[partition.degrees]:
            return np.inf
        d = partition.degrees
        share = 1 / (d.tp * d.cp)

        def parts(evaluator: Evaluator) -> dict[str, float]:
            seconds = evaluator.prices.single_rank_parts(partition.micro_batch)
            return {name: (whole - launches) * share + launches for name, (whole, launches) in seconds.items()}

        return self._least_step_s(partition, parts)

    def rough_bound_s(self, partition: Partition) -> float:
        """Lower bound from prices that are known on the slowest devices, in seconds: whatever the layout, a group takes
        at least a part of what they take (`Evaluator.least_pace`), and the stages divide the work by it."""
        d = partition.degrees
        if not self._orders[d]:
            return np.inf
        whole_s = self._slowest.known_whole_s(partition)
        paces = [self._pace(group, d) for group in range(len(self._evaluators))]
        if min(paces) <= 0:
            return 0.0
        owner = self._owner(self._orders[d][0], d)
        slowest_s = whole_s / sum(1 / paces[group] for group in owner)
        return self._paced_step_s(partition, slowest_s, whole_s * min(paces))

    def _pace(self, group: int, degrees: Degrees) -> float:
        if (group, degrees) not in self._paces:
            self._paces[group, degrees] = self._evaluators[group].least_pace(self._slowest, degrees)
        return self._paces[group, degrees]

    def block_bound_s(self, partition: Partition) -> float:
        """Lower bound with exact prices of the blocks, in seconds.

        Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        self._slowest.learned_s(partition)  # finds the layouts
        sharding = partition.sequence_sharding
        return self._least_step_s(partition, lambda own: own.busy_parts(own.blocks(partition), sharding))

    def _least_step_s(self, partition: Partition, parts: Callable[[Evaluator], dict[str, float]]) -> float:
        """With the bubble of the number of chunks that suits best, no sends and no tail."""
        prices = self._slowest.prices
        of_groups = [parts(evaluator) for evaluator in self._evaluators]
        numbers = np.array([prices.repeats.get(name, 1) for name in of_groups[0]], dtype=np.float64)
        times = np.array([list(found.values()) for found in of_groups]).T
        owner = self._owner(self._orders[partition.degrees][0], partition.degrees)
        slowest_s = shared_s(numbers, times, owner, stage_shares(numbers, times, owner))
        return self._paced_step_s(partition, slowest_s, float(numbers @ times.min(axis=1)))

    def _paced_step_s(self, partition: Partition, slowest_s: float, flow_s: float) -> float:
        """If the slowest stage and all of them together take as long for a micro-batch."""
        prices = self._slowest.prices
        m, pp, layers = partition.micro_batches, partition.degrees.pp, len(prices.traced.layers)
        chunks = layers // pp if partition.fills_rounds else 1
        if partition.fills_rounds and self._slowest.splits_backward:
            flow_s = 0.0  # zero-bubble may put off as much
        busy_s = min((m - 1 / v) * slowest_s + flow_s / v for v in (1, max(1, chunks)))
        return self._with_overhead(busy_s)

    def _with_overhead(self, busy_s: float) -> float:
        """As `MixedPrice.with_overhead`."""
        return max(own.with_overhead(0.0) for own in self._evaluators) + busy_s * max(
            own.slowdown for own in self._evaluators
        )

    def bounds_s(self, group: SettingGroup, *, sharp: bool = False) -> Floats:
        """As `Evaluator.bounds_s`, over all orders of the groups."""
        first = group.setting(0)
        if self._slowest.least_bytes(first) > self._mean_room_bytes:
            return np.full(len(group.runs), np.inf)
        found = []
        for price in self.priced(first):
            bounds = MixedBounds(price, group)
            own = self._evaluators[0]
            busy_s = bounds.sharp(own.longest_segment(price.prices[0])) if sharp else bounds.quick()
            found.append(busy_s * price.slowdown + price.overhead_s)
        if sharp:
            for i, of_orders in enumerate(np.stack(found, axis=1).tolist()):
                self._sharp[group.setting(i)] = of_orders
        least: Floats = np.min(found, axis=0)
        return least

    # --- exact --------------------------------------------------------------------------------------------------------

    def _owner(self, order: Order, degrees: Degrees) -> list[int]:
        """The group of each stage."""
        width = self._cluster.num_devices // degrees.pp
        return [g for g in order for _ in range(self._cluster.groups[g].num_devices // width)]

    def priced(self, setting: Setting) -> list[MixedPrice]:
        """In each order of the groups."""
        self._slowest.blocks(setting.partition)  # finds the layouts
        prices: list[SettingPrice] = [evaluator.price(setting) for evaluator in self._evaluators]
        orders = self._orders[setting.degrees]
        return [MixedPrice(prices, self._views, self._owner(order, setting.degrees)) for order in orders]

    def least_s(self, setting: Setting, cutoff_s: float = np.inf) -> float:
        """As `Evaluator.least_s`: the sharp bounds of the orders are all there is."""
        if setting not in self._sharp:  # of a group of one run, which no other bound has seen
            run = (setting.schedule, setting.virtual_stages)
            alone = SettingGroup(setting.partition, setting.zero, setting.zero_group, setting.exchange, (run,))
            return float(self.bounds_s(alone, sharp=True)[0])
        return min(self._sharp[setting])

    def evaluate(self, setting: Setting, cutoff_s: float = np.inf) -> Evaluation:
        """The best order, stages and modes of a setting; none if they take longer than the cutoff."""
        best: Evaluation | None = None
        bound_s, orders = np.inf, self._orders[setting.degrees]
        sharp = self._sharp.get(setting, [0.0] * len(orders))
        for order, price, least_s in zip(orders, self.priced(setting), sharp, strict=True):
            if least_s > cutoff_s:
                bound_s = min(bound_s, least_s)
                continue
            found = self._best_cut(price, price.without_overhead(cutoff_s))
            if isinstance(found, float):
                bound_s = min(bound_s, price.with_overhead(found))
                continue
            step_s = price.with_overhead(found.step_s)
            best, cutoff_s = Evaluation(setting, found, step_s, step_s), step_s * (1 - 1e-12)
            self.found[setting] = (order, price)
        return best or Evaluation(setting, None, np.inf, bound_s)

    def _best_cut(self, price: MixedPrice, cutoff_s: float) -> PipelineSolution | float:
        """As `Evaluator.evaluate`: a lower bound if none is within the cutoff."""
        best: PipelineSolution | None = None
        bound_s = np.inf
        for segment in self._evaluators[0].segments_of(price.prices[0]):
            found = solve_table(price.table(segment), cutoff_s=cutoff_s)
            if isinstance(found, float):
                bound_s = min(bound_s, found)
            elif best is None or found.step_s < best.step_s * (1 - 1e-12):
                best, cutoff_s = found, min(cutoff_s, found.step_s * (1 - 1e-12))
        return best or bound_s

    def proven(self, found: Evaluation) -> Evaluation:
        """The evaluation with the ILP's proof, and all its figures."""
        assert found.pipeline is not None
        _, price = self.found[found.setting]
        prices = self._slowest.prices
        solution = prove_table(price.table(found.pipeline.segment), found.pipeline, policy=prices.policy)
        if solution.variables:
            prices.counts.add(solution)
        bound_s = min(price.with_overhead(solution.bound_s), found.step_s)
        return self.detailed(replace(found, pipeline=solution, bound_s=bound_s))

    def detailed(self, found: Evaluation) -> Evaluation:
        """The evaluation with its time and memory by part."""
        assert found.pipeline is not None
        _, price = self.found[found.setting]
        time_s = price.time_parts(found.pipeline)
        total = sum(time_s.values())
        assert abs(total - found.step_s) <= 1e-6 * total, (total, found.step_s)
        flops = price.prices[0].executed_flops(found.pipeline)
        return replace(found, step_s=total, bound_s=min(found.bound_s, total), time_s=time_s,
                       memory=price.memory(found.pipeline), executed_flops=flops)  # fmt: skip
