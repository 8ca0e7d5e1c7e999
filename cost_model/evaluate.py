"""Price one setting: block prices to stage costs, the pipeline problem, then time and memory by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from autopar.cost_model.candidates import SEGMENTS, Partition, Setting, lower_bound
from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.cost_model.constant_table import load_constants
from autopar.cost_model.memory import Recipe
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.pipeline_ilp import PipelineSolution, prove, solve_pipeline
from autopar.cost_model.setting_collectives import collectives_of
from autopar.cost_model.setting_price import TIME_PARTS, SettingPrice
from autopar.cost_model.stage_table import StageTable
from autopar.cost_model.step_price import Unit, overhead_s, slowdown
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec, Pins

__all__ = ["TIME_PARTS", "Evaluation", "Evaluator"]

MODES = ("none", "selective", "selective-ops", "full")


@dataclass(frozen=True)
class Evaluation:
    """A priced setting. `pipeline` is None if no cut fits: then `needed_bytes` of device memory would, and
    `binding_stage` is the stage that asks for it; or if none can beat `bound_s`, when the search has cut it off."""

    setting: Setting
    pipeline: PipelineSolution | None
    step_s: float
    bound_s: float = 0.0
    time_s: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[Mapping[str, int], ...] = ()
    collectives: tuple[Mapping[str, object], ...] = ()
    executed_flops: float = 0.0
    needed_bytes: float = 0.0
    binding_stage: int = 0


class Evaluator:
    """Prices settings of one model on one cluster."""

    def __init__(
        self, prices: ModelPrices, cluster: ClusterSpec, recipe: Recipe, partitions: list[Partition], pins: Pins,
    ) -> None:  # fmt: skip
        self.prices, self.cluster, self.recipe = prices, cluster, recipe
        self.modes = MODES if pins.checkpoint is None else (pins.checkpoint,)
        self.segments = SEGMENTS if pins.checkpoint_segment is None else (pins.checkpoint_segment,)
        self._constants = load_constants().of(cluster.device)
        self.sizes: dict[int, tuple[Fraction, ...]] = {}
        for tp in {p.degrees.tp for p in partitions}:
            mine = {Fraction(p.micro_batch, p.degrees.cp) for p in partitions if p.degrees.tp == tp}
            self.sizes[tp] = tuple(sorted(mine))

    def price(self, setting: Setting) -> SettingPrice:
        """Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        partition = setting.partition
        d = partition.degrees
        group = group_cost(self.cluster, d, "tp")
        blocks = self.prices.at(
            d.tp, d.cp, partition.sequence_sharding, partition.micro_batch, group, self.sizes.get(d.tp, ())
        )
        return SettingPrice(setting, blocks, self.prices, self.cluster, self.recipe, self.modes)

    def evaluate(self, setting: Setting, cutoff_s: float = np.inf) -> Evaluation:
        """The best stages and modes of a setting; none if they take longer than the cutoff."""
        price = self.price(setting)
        cutoff = price.without_overhead(cutoff_s)
        best, bound_s = None, np.inf
        for segment in self._segments(price):
            found = solve_pipeline(price.problem(segment), cutoff_s=cutoff)
            if isinstance(found, float):
                bound_s = min(bound_s, found)
                continue
            if best is None or found.step_s < best.step_s * (1 - 1e-12):
                best, cutoff = found, min(cutoff, found.step_s)
            if price.recomputed_layers(found, "full") == 0 and price.keeps_fastest(found):
                break  # a longer segment frees memory, and none is missing
        if best is None:
            return Evaluation(setting, None, np.inf, price.with_overhead(bound_s))
        return Evaluation(setting, best, price.with_overhead(best.step_s), price.with_overhead(best.step_s))

    def _segments(self, price: SettingPrice) -> tuple[int, ...]:
        """Segments make sense for equal layers that can be recomputed whole, and no longer than a stage."""
        if "full" not in self.modes or not price.equal_layers:
            return self.segments[:1] if len(self.segments) == 1 else (1,)
        return tuple(k for k in self.segments if k == self.segments[0] or k <= price.most_layers)

    def proven(self, found: Evaluation) -> Evaluation:
        """The evaluation with the ILP's proof, and all its figures."""
        assert found.pipeline is not None
        price = self.price(found.setting)
        solution = prove(price.problem(found.pipeline.segment), found.pipeline, policy=self.prices.policy)
        if solution.variables:
            self.prices.counts.add(solution)
        bound_s = price.with_overhead(solution.bound_s)
        return self.detailed(Evaluation(found.setting, solution, found.step_s, min(bound_s, found.step_s)))

    def detailed(self, found: Evaluation) -> Evaluation:
        """The evaluation with its time and memory by part."""
        assert found.pipeline is not None
        price = self.price(found.setting)
        time_s = price.time_parts(found.pipeline)
        total = sum(time_s.values())
        assert abs(total - found.step_s) <= 1e-6 * total, (total, found.step_s)
        return Evaluation(
            found.setting, found.pipeline, total, min(found.bound_s, total), time_s, price.memory(found.pipeline),
            collectives_of(price, found.pipeline), price.executed_flops(found.pipeline),
        )  # fmt: skip

    def lacking(self, setting: Setting) -> Evaluation:
        """The memory that a setting for which no cut fits would need."""
        price = self.price(setting)
        needs = [StageTable(price.problem(k)).memory_needed() for k in self._segments(price)]
        needed, stage = min(needs)
        return Evaluation(setting, None, np.inf, needed_bytes=needed + self.cluster.device.reserved_bytes,
                          binding_stage=stage)  # fmt: skip

    def bound_s(self, setting: Setting) -> float:
        """Lower bound of the step in seconds with exact block prices; inf if the parameters alone do not fit."""
        price = self.price(setting)
        if price.least_bytes() > self.cluster.device.memory_bytes - self.cluster.device.reserved_bytes:
            return np.inf
        return price.with_overhead(price.bound_s())

    def analytic_bound_s(self, partition: Partition) -> float:
        """Lower bound of the step in seconds from single-rank prices alone."""
        return self._with_overhead(lower_bound(partition, *self.prices.single_rank_seconds(partition.micro_batch)))

    def rough_bound_s(self, partition: Partition) -> float:
        """Lower bound in proportion, in seconds, from prices that are known; gets sharper while the search goes on.

        Every price is a sum of maxima of affine functions of a rank's tokens with non-negative constants, so the price
        per token never rises with them; and a layout over tp ranks is one over fewer, where an op takes at most so much
        longer as there are fewer ranks, and so does a collective if `GroupCost.scales_from` says so.
        """
        d, sharding = partition.degrees, partition.sequence_sharding
        own = Fraction(partition.micro_batch, d.cp)
        group = group_cost(self.cluster, d, "tp")
        best = 0.0
        for tp in self.sizes:
            if d.tp % tp or (tp != d.tp and not group.scales_from(self._tp_group(partition, tp))):
                continue
            for size, cp in self.prices.priced_sizes(tp, sharding):
                if Fraction(size, cp) >= own:
                    best = max(best, self._in_proportion(partition, tp, size, cp))
        return self._with_overhead(best)

    def _with_overhead(self, busy_s: float) -> float:
        return busy_s * slowdown(self.cluster, self._constants) + overhead_s(self.cluster, self._constants)

    def _tp_group(self, partition: Partition, tp: int) -> GroupCost:
        d = partition.degrees
        return group_cost(self.cluster, Degrees(pp=d.pp, cp=d.cp, tp=tp, dp=d.dp * d.tp // tp), "tp")

    def _in_proportion(self, partition: Partition, tp: int, size: int, cp: int) -> float:
        d, sharding = partition.degrees, partition.sequence_sharding
        blocks = self.prices.at(tp, cp, sharding, size, self._tp_group(partition, tp), self.sizes[tp])
        repeats = self.prices.repeats()
        whole_s = sum(repeats[c] * _busy_s(layer.unit) for c, layer in blocks.layers.items())
        whole_s += _busy_s(blocks.prologue) + _busy_s(blocks.epilogue)
        share = Fraction(partition.micro_batch * cp, d.cp * size) * Fraction(tp, d.tp)
        return partition.micro_batches * whole_s * float(share) / d.pp

    def surely_too_big(self, partition: Partition) -> bool:
        """True if no layout and no cut fits: parameters, gradients and optimizer spread evenly over all ranks, and
        beside them what one layer keeps for its backward, exceed the device. (A recomputed layer keeps it too, for as
        long as its backward runs.)"""
        d, device = partition.degrees, self.cluster.device
        static = self.prices.traced.parameter_count * self.recipe.total_bytes / (d.pp * d.tp * d.dp * d.cp)
        whole = self.prices.single_rank(partition.micro_batch)
        kept = min((layer.bytes.saved for layer in whole.layers.values()), default=0.0) / (d.cp * d.tp)
        return static + kept > device.memory_bytes - device.reserved_bytes


def _busy_s(unit: Unit) -> float:
    p = unit.price
    return p.forward_s + p.backward_s + p.forward_communication_s + p.backward_communication_s
