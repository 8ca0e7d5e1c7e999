"""Price one setting: block prices to stage costs, the pipeline problem, then time and memory by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_model.candidates import SEGMENTS, Partition, Setting, SettingGroup
from autopar.cost_model.memory import Recipe, frozen_bytes, state_bytes
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.partition_bounds import PartitionBounds
from autopar.cost_model.pipeline_ilp import PipelineSolution, prove, solve_table
from autopar.cost_model.setting_bounds import SettingBounds
from autopar.cost_model.setting_price import TIME_PARTS, SettingPrice
from autopar.cost_model.stage_cuts import least_cut_s
from autopar.cost_model.stage_table import Floats, StageTable
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
    executed_flops: float = 0.0
    needed_bytes: float = 0.0
    binding_stage: int = 0

    @property
    def slowest_stage(self) -> int:
        stages = self.pipeline.stages if self.pipeline is not None else ()
        return max(range(len(stages)), key=lambda s: stages[s].time_s, default=0)


class Evaluator(PartitionBounds):
    """Prices settings of one model on one cluster."""

    def __init__(
        self, prices: ModelPrices, cluster: ClusterSpec, recipe: Recipe, partitions: list[Partition], pins: Pins,
        splits_backward: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(prices, cluster, recipe, partitions, pins, splits_backward)
        self.modes = MODES if pins.checkpoint is None else (pins.checkpoint,)
        self.segments = SEGMENTS if pins.checkpoint_segment is None else (pins.checkpoint_segment,)

    def price(self, setting: Setting) -> SettingPrice:
        """Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        blocks = self.blocks(setting.partition)
        return SettingPrice(setting, blocks, self.prices, self.cluster, self.recipe, self.modes)

    def evaluate(self, setting: Setting, cutoff_s: float = np.inf) -> Evaluation:
        """The best stages and modes of a setting; none if they take longer than the cutoff."""
        price = self.price(setting)
        cutoff = price.without_overhead(cutoff_s)
        best, bound_s = None, np.inf
        for segment in self.segments_of(price):
            table = StageTable(price.problem(segment))
            found = solve_table(table, cutoff_s=cutoff)
            if isinstance(found, float):
                bound_s = min(bound_s, found)
            elif best is None or found.step_s < best.step_s * (1 - 1e-12):
                best, cutoff = found, min(cutoff, found.step_s * (1 - 1e-12))
            if not table.memory_binds:  # longer segments only free memory
                break
        if best is None:
            return Evaluation(setting, None, np.inf, price.with_overhead(bound_s))
        return Evaluation(setting, best, price.with_overhead(best.step_s), price.with_overhead(best.step_s))

    def least_s(self, setting: Setting, cutoff_s: float = np.inf) -> float:
        """Lower bound of the step of a setting, in seconds, with the memory of its stages at every moment; only a bound
        past the cutoff, if it is one."""
        price = self.price(setting)
        segments = self.segments_of(price)
        problem = price.least_problem(segments[0], segments[-1])
        return price.with_overhead(least_cut_s(StageTable(problem), price.without_overhead(cutoff_s)))

    def segments_of(self, price: SettingPrice) -> tuple[int, ...]:
        """Segments make sense for layers that can be recomputed whole, and no longer than a chunk; those over several
        classes have one chunk a rank."""
        if "full" not in self.modes or (price.setting.virtual_stages > 1 and not price.equal_layers):
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
            price.executed_flops(found.pipeline),
        )  # fmt: skip

    def lacking(self, setting: Setting) -> Evaluation:
        """The memory that a setting for which no cut fits would need."""
        price = self.price(setting)
        needs = [StageTable(price.problem(k)).memory_needed() for k in self.segments_of(price)]
        needed, stage = min(needs)
        return Evaluation(setting, None, np.inf, needed_bytes=needed + self.cluster.device.reserved_bytes,
                          binding_stage=stage)  # fmt: skip

    def bounds_s(self, group: SettingGroup, *, sharp: bool = False) -> Floats:
        """Lower bounds of the step of every run of a group, in seconds, with exact block prices; inf where the states
        of the average stage, and what one layer keeps, do not fit. `sharp`: with the memory of every stage."""
        first = group.setting(0)
        if self.least_bytes(first) > self.cluster.device.memory_bytes - self.cluster.device.reserved_bytes:
            return np.full(len(group.runs), np.inf)
        price = self.price(first)
        bounds = SettingBounds(price, group)
        busy_s = bounds.sharp(self.longest_segment(price)) if sharp else bounds.quick()
        found: Floats = busy_s * price.step.slowdown + price.step.overhead_s
        return found

    def longest_segment(self, price: SettingPrice) -> int:
        """Of any setting with the partition of this one's."""
        return max(self.segments) if "full" in self.modes else 1

    def least_bytes(self, setting: Setting) -> float:
        """No cut needs less on its fullest rank."""
        trained, frozen, kept = self._held(setting.partition)
        own = frozen_bytes(self.recipe, setting.zero, setting.zero_shard)
        return trained * self._state_bytes(setting) + frozen * own + kept

    def _held(self, partition: Partition) -> tuple[float, float, float]:
        """Trained and frozen parameters of the mean stage, and bytes that the leanest layer keeps beside all gradients
        (a lone micro-batch has given up its own by then)."""
        blocks, pp = self.blocks(partition), partition.degrees.pp
        units = [(n, blocks.layers[c].unit) for c, n in self.prices.repeats.items()]
        units += [(1, blocks.prologue), (1, blocks.epilogue)]
        held = sum(n * unit.parameters for n, unit in units) - (blocks.tied_parameters if pp == 1 else 0.0)
        frozen = sum(n * unit.frozen for n, unit in units) - (blocks.tied_frozen if pp == 1 else 0.0)
        kept = min((layer.bytes.saved for layer in blocks.layers.values()), default=0.0)
        return (held - frozen) / pp, frozen / pp, kept if partition.micro_batches > 1 else 0.0

    def _state_bytes(self, setting: Setting) -> float:
        single = setting.micro_batches == 1
        held = state_bytes(self.recipe, setting.zero, setting.zero_shard, fully_sharded=True, single=single)
        return sum(held.values())
