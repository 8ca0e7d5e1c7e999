"""Price one setting: block prices to stage costs, the pipeline problem, then time and memory by part."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_model.block_prices import BlockPrices
from autopar.cost_model.candidates import SEGMENTS, Partition, Setting, SettingGroup
from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.cost_model.constant_table import load_constants
from autopar.cost_model.least_busy import least_busy_s, least_whole_s
from autopar.cost_model.memory import Recipe, frozen_bytes, state_bytes
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.own_stack import own_traits
from autopar.cost_model.pipeline_ilp import PipelineSolution, prove, solve_table
from autopar.cost_model.setting_bounds import SettingBounds
from autopar.cost_model.setting_price import EXCHANGES, TIME_PARTS, SettingPrice
from autopar.cost_model.sharding_bounds import ShardingBounds
from autopar.cost_model.stage_cuts import least_cut_s
from autopar.cost_model.stage_table import Floats, StageTable
from autopar.cost_model.step_price import exchange_s, overhead_s, slowdown
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
    executed_flops: float = 0.0
    needed_bytes: float = 0.0
    binding_stage: int = 0

    @property
    def slowest_stage(self) -> int:
        stages = self.pipeline.stages if self.pipeline is not None else ()
        return max(range(len(stages)), key=lambda s: stages[s].time_s, default=0)


class Evaluator:
    """Prices settings of one model on one cluster."""

    def __init__(
        self, prices: ModelPrices, cluster: ClusterSpec, recipe: Recipe, partitions: list[Partition], pins: Pins,
        splits_backward: bool = False,
    ) -> None:  # fmt: skip
        self.prices, self.cluster, self.recipe, self.partitions = prices, cluster, recipe, partitions
        self.modes = MODES if pins.checkpoint is None else (pins.checkpoint,)
        self.segments = SEGMENTS if pins.checkpoint_segment is None else (pins.checkpoint_segment,)
        self._constants = load_constants().of(cluster.device)
        self._trained_count = sum(p.numel for p in prices.traced.parameters.values() if p.requires_grad)
        self._frozen_count = prices.traced.parameter_count - self._trained_count
        self._sharding = ShardingBounds(
            cluster, recipe, pins, trained=self._trained_count, frozen=self._frozen_count,
            layers=len(prices.traced.layers), bytes_per_s=prices.machine.bytes_per_s,
            passes=self._constants["zero3_traffic"],
        )  # fmt: skip
        self._whole_s: dict[tuple[int, bool], _KnownPrices] = defaultdict(_KnownPrices)
        self._singles: dict[int, tuple[float, float]] = {}
        self.splits_backward = splits_backward
        self._exchange = pins.context_parallel
        self.degrees_of_tp = sorted({p.degrees.tp for p in partitions})
        self._tp_of: dict[Degrees, list[int]] = {}

    def blocks(self, partition: Partition) -> BlockPrices:
        """Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        d = partition.degrees
        group = group_cost(self.cluster, d, "tp")
        return self.prices.at(d.tp, d.cp, partition.sequence_sharding, partition.micro_batch, group)

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

    def least_bytes_of(self, partition: Partition) -> float:
        """`least_bytes` of any of its settings, without prices of blocks."""
        return self._sharding.least_bytes(partition, self._least_kept_bytes(partition)) * (1 - 1e-9)

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

    def analytic_bound_s(self, partition: Partition) -> float:
        """Lower bound of the step in seconds from single-rank prices alone; infinite if no level of ZeRO fits."""
        return self._least_step_s(partition, least_whole_s(partition, *self._single_rank(partition.micro_batch)))

    def _single_rank(self, micro_batch: int) -> tuple[float, float]:
        if micro_batch not in self._singles:
            self._singles[micro_batch] = self.prices.single_rank_seconds(micro_batch)
        return self._singles[micro_batch]

    def rough_bound_s(self, partition: Partition) -> float:
        """Lower bound from prices that are known, in seconds; gets sharper while the search goes on.

        Every price is a sum of maxima of affine functions of a rank's tokens with non-negative constants, so it never
        falls with them, and the price per token never rises. (Where cp differs: of tensors without a sequence more cp
        makes no less, and what has no batch, such as positions, is left out.) So prices over as much cp or less bound
        it from both sides. And a layout over tp ranks is one over fewer, where an
        op takes at most so much longer as there are fewer ranks, and so does a collective if `GroupCost.scales_from`
        says so.
        """
        return self._least_step_s(partition, self.known_whole_s(partition) + self._least_exchange_s(partition))

    def known_whole_s(self, partition: Partition) -> float:
        """Of `rough_bound_s`, the seconds of a micro-batch through the whole model, without exchanges over cp."""
        d, whole_s = partition.degrees, 0.0
        for tp in self._bounding_tp(d):
            known = self._whole_s[tp, partition.sequence_sharding]
            whole_s = max(whole_s, known.least(partition.micro_batch, d.cp) * tp / d.tp)
        return whole_s

    def block_bound_s(self, partition: Partition) -> float:
        """Lower bound with exact prices of the blocks, in seconds.

        Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        return self._least_step_s(partition, self.learned_s(partition) + self._least_exchange_s(partition))

    def learned_s(self, partition: Partition) -> float:
        """Seconds of a micro-batch through the whole model by exact prices of its blocks, which are known from now on.

        Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        d, sharding = partition.degrees, partition.sequence_sharding
        whole_s = self._busy_s(self.blocks(partition), sharding)
        self._whole_s[d.tp, sharding].add(partition.micro_batch, d.cp, whole_s, self.prices.batch_free_s(d.cp))
        return whole_s

    def _least_exchange_s(self, partition: Partition) -> float:
        """Lower bound of a micro-batch's exchanges over cp: keys cut over all of tp, rings hidden as far as can be."""
        d = partition.degrees
        if d.cp == 1:
            return 0.0
        group, hidden = group_cost(self.cluster, d, "cp"), self._constants["cp_hidden"]
        share, work = partition.micro_batch / (d.cp * d.tp), (np.inf, np.inf)
        totals = []
        for name in self.prices.exchanges(d.cp, d.tp):
            if self._exchange not in (None, name):
                continue
            kind = EXCHANGES[name]
            each = [n * exchange_s(kind, group, hidden, keys * share, queries * share, work, again=False)
                    for n, keys, queries in self.prices.attention_bytes]  # fmt: skip
            totals.append(sum(each))
        return min(totals, default=0.0)

    @property
    def slowdown(self) -> float:
        """Factor on the busy seconds of a step."""
        return slowdown(self.cluster, self._constants)

    def with_overhead(self, busy_s: float) -> float:
        """Seconds of a step, straggler factor and overhead included."""
        return busy_s * self.slowdown + overhead_s(self.cluster, self._constants)

    def _bounding_tp(self, d: Degrees) -> list[int]:
        """Degrees of tp whose prices bound those of `d`."""
        if d not in self._tp_of:
            group, possible = group_cost(self.cluster, d, "tp"), [tp for tp in self.degrees_of_tp if d.tp % tp == 0]
            self._tp_of[d] = [tp for tp in possible if tp == d.tp or group.scales_from(self._tp_group(d, tp))]
        return self._tp_of[d]

    def _tp_group(self, d: Degrees, tp: int) -> GroupCost:
        return group_cost(self.cluster, Degrees(pp=d.pp, cp=d.cp, tp=tp, dp=d.dp * d.tp // tp), "tp")

    def busy_parts(self, blocks: BlockPrices, sequence_sharding: bool) -> dict[str, float]:
        """Compute and exposed communication over tp of a micro-batch: of a layer of each class, "prologue" and
        "epilogue"; of the sums that weight gradients can hide, no more than what is never hidden."""
        overlap = own_traits(self.cluster.stack, self.recipe, 0, sequence_sharding=sequence_sharding,
                             schedule="1f1b").overlap  # fmt: skip
        exposed = 1 - (self._constants["tp_hidden"] if "tp" in overlap else 0.0)
        behind = self._constants["tp_linear_hidden"] if "tp_linear" in overlap else 0.0
        parts = {}
        for c in self.prices.repeats:
            p = blocks.layers[c].unit.price
            tp_s = p.forward_communication_s + p.backward_communication_s - behind * p.backward_reduction_s
            parts[c] = p.forward_s + p.backward_s + exposed * tp_s
        for name, end in (("prologue", blocks.prologue), ("epilogue", blocks.epilogue)):
            p = end.price
            parts[name] = p.forward_s + p.backward_s + p.forward_communication_s + p.backward_communication_s
        return parts

    def least_pace(self, slower: Evaluator, degrees: Degrees) -> float:
        """Every layout of a block takes at least this part of its seconds on the devices and tp links of `slower`."""
        group, other = (group_cost(of.cluster, degrees, "tp") for of in (self, slower))
        pace = self.prices.machine.least_pace(slower.prices.machine)
        if degrees.tp > 1:
            hidden = 1 - self._constants["tp_hidden"], 1 - self._constants["tp_linear_hidden"]
            pace = min(pace, group.least_pace(other) * math.prod(hidden) if self._hides_tp else group.least_pace(other))
        return pace

    @property
    def _hides_tp(self) -> bool:
        return not {"tp_ring", "tp_linear"}.isdisjoint(self.cluster.stack.overlap)

    def _busy_s(self, blocks: BlockPrices, sequence_sharding: bool) -> float:
        """`busy_parts` of the whole model."""
        repeats = self.prices.repeats
        return sum(repeats.get(name, 1) * s for name, s in self.busy_parts(blocks, sequence_sharding).items())

    def _least_step_s(self, partition: Partition, whole_s: float) -> float:
        """Lower bound of the step, if a micro-batch takes `whole_s` through the whole model."""
        pp, layers = partition.degrees.pp, len(self.prices.traced.layers)
        whole_s = self._sharding.whole_s(partition, whole_s, self._least_kept_bytes(partition))
        chunks = layers // pp if partition.fills_rounds else 1
        if partition.fills_rounds and self.splits_backward:
            chunks = 0
        return self.with_overhead(least_busy_s(partition, whole_s, chunks, self._sends_s(partition)))

    def _sends_s(self, partition: Partition) -> tuple[float, float]:
        """Receives of a micro-batch by a stage of one chunk, hidden as far as can be, and by each of several."""
        d = partition.degrees
        if d.pp == 1:
            return 0.0, 0.0
        border = self.prices.border_bytes(partition.micro_batch, d.cp) / (d.tp if partition.sequence_sharding else 1)
        both_s = group_cost(self.cluster, d, "pp").between_neighbours(border)
        hidden = self._constants["pp_hidden"] if "pp_send" in self.cluster.stack.overlap else 0.0
        return both_s * (1 - hidden), both_s

    def _least_kept_bytes(self, partition: Partition) -> float:
        """What the leanest layer keeps for its backward beside all gradients, cut over all of cp and tp."""
        if partition.micro_batches == 1:
            return 0.0
        whole, d = self.prices.single_rank(partition.micro_batch), partition.degrees
        return min((layer.bytes.saved for layer in whole.layers.values()), default=0.0) / (d.cp * d.tp)


class _KnownPrices:
    """Seconds of a micro-batch through the whole model, by its size and cp."""

    def __init__(self) -> None:
        self._size, self._cp, self._whole_s, self._per_token_s = (np.zeros(0) for _ in range(4))
        self._keys: set[tuple[int, int]] = set()

    def add(self, size: int, cp: int, whole_s: float, batch_free_s: float) -> None:
        if (size, cp) not in self._keys:
            self._keys.add((size, cp))
            self._size, self._cp = np.append(self._size, size), np.append(self._cp, cp)
            self._whole_s = np.append(self._whole_s, whole_s)
            self._per_token_s = np.append(self._per_token_s, max(0.0, whole_s - batch_free_s))

    def least(self, size: int, cp: int) -> float:
        """Lower bound; 0 where nothing is known."""
        share = np.minimum(1.0, size * self._cp / (cp * self._size))
        known_s = np.where(self._cp == cp, self._whole_s, np.where(self._cp < cp, self._per_token_s, 0.0))
        return float((known_s * share).max(initial=0.0))
