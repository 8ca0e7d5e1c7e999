"""Lower bounds of a partition's step, from single-rank prices up to exact prices of its blocks."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from autopar.cost_model.block_prices import BlockPrices
from autopar.cost_model.candidates import Partition
from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.cost_model.constant_table import load_constants
from autopar.cost_model.least_busy import least_busy_s, least_whole_s
from autopar.cost_model.memory import Recipe
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.own_stack import own_traits
from autopar.cost_model.setting_price import EXCHANGES
from autopar.cost_model.sharding_bounds import ShardingBounds
from autopar.cost_model.step_price import exchange_s, overhead_s, slowdown
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec, Pins

__all__ = ["PartitionBounds"]


class PartitionBounds:
    """Of one model on one cluster. Bounds never exceed the step of any setting of the partition; what has been priced
    sharpens those of others."""

    def __init__(
        self, prices: ModelPrices, cluster: ClusterSpec, recipe: Recipe, partitions: list[Partition], pins: Pins,
        splits_backward: bool = False,
    ) -> None:  # fmt: skip
        self.prices, self.cluster, self.recipe, self.partitions = prices, cluster, recipe, partitions
        self._constants = load_constants().of(cluster.device)
        trained = sum(p.numel for p in prices.traced.parameters.values() if p.requires_grad)
        self._sharding = ShardingBounds(
            cluster, recipe, pins, trained=trained, frozen=prices.traced.parameter_count - trained,
            layers=len(prices.traced.layers), bytes_per_s=prices.machine.bytes_per_s,
            passes=self._constants["zero3_traffic"],
        )  # fmt: skip
        self._whole_s: dict[tuple[int, bool], _KnownPrices] = defaultdict(_KnownPrices)
        self._singles: dict[int, tuple[float, float]] = {}
        self.splits_backward = splits_backward
        self._exchange = pins.context_parallel
        self._degrees_of_tp = sorted({p.degrees.tp for p in partitions})
        self._tp_of: dict[Degrees, list[int]] = {}

    def blocks(self, partition: Partition) -> BlockPrices:
        """Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        d = partition.degrees
        group = group_cost(self.cluster, d, "tp")
        return self.prices.at(d.tp, d.cp, partition.sequence_sharding, partition.micro_batch, group)

    def least_bytes_of(self, partition: Partition) -> float:
        """`least_bytes` of any of its settings, without prices of blocks."""
        return self._sharding.least_bytes(partition, self._least_kept_bytes(partition)) * (1 - 1e-9)

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
            group, possible = group_cost(self.cluster, d, "tp"), [tp for tp in self._degrees_of_tp if d.tp % tp == 0]
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

    def least_pace(self, slower: PartitionBounds, degrees: Degrees) -> float:
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
        self._seconds: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, size: int, cp: int, whole_s: float, batch_free_s: float) -> None:
        self._seconds.setdefault((size, cp), (whole_s, max(0.0, whole_s - batch_free_s)))

    def least(self, size: int, cp: int) -> float:
        """Lower bound; 0 where nothing is known."""
        found = 0.0
        for (known, known_cp), (whole_s, per_token_s) in self._seconds.items():
            if known_cp <= cp:
                share = size * known_cp / (cp * known)
                seconds = whole_s if known_cp == cp else per_token_s
                found = max(found, seconds * share if share < 1 else seconds)
        return found
