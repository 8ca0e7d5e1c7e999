"""Step time of a training run whose layout is given: pipeline with interleaving, ZeRO 0 to 3, context parallel, modes
of recomputation, and the overlaps that its stack declares.

    step = (m T_slowest + (sum_s T_s - T_slowest) / v + tail + optimizer) (1 + straggler log2 nodes) + overhead

T_s: forward, backward, recomputation, exposed communication of one micro-batch on stage s; m micro-batches; v chunks a
rank (interleaving fills a bubble with 1/v of a stage). The search prices its candidates with the same parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.cost_model.block_layout import BlockWork, LayoutPrice, price_work
from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.constant_table import GenerationConstants
from autopar.cost_model.kernels import Kernels
from autopar.cost_model.machine import Machine
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec

__all__ = [
    "RunLayout",
    "RunWork",
    "StackTraits",
    "attention_over_context",
    "exposed_reduction_s",
    "price_run",
    "stage_layers",
]


@dataclass(frozen=True, kw_only=True)
class StackTraits:
    """Declared properties of a software stack, see constants/stacks.toml."""

    attention: str = "flash"
    elementwise: str = "eager"
    gradient_bytes: float = 2
    reduce_bytes: float = 2
    gather_bytes: float = 2
    fp8_gather_bytes: float = 2
    overlap: tuple[str, ...] = ("dp",)
    zero1_gather: str = "all_gather"
    fp8: str = "fp8"
    recompute: str = "none"
    fully_sharded: bool = False
    fused_gradients: bool = False
    fused_kernels: bool = False
    gathers_again: bool = False
    loss: str = "eager"
    expandable_segments: bool = False
    keeps_stage_outputs: bool = False
    spare_gradient_bytes: float = 0


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """A run as given. `zero_shard` is the number of ranks a ZeRO shard group has (dp x cp unless it is a hybrid);
    `micro_batch` in sequences; `layers` of the whole model; recompute is none, selective, op or full."""

    degrees: Degrees
    layers: int
    seq_len: int
    micro_batch: int
    micro_batches: int
    virtual_stages: int = 1
    zero: int = 0
    zero_shard: int = 1
    recompute: str = "none"
    sequence_sharding: bool = False
    cp_exchange: str = "ring"
    fp8: str | None = None


@dataclass(frozen=True)
class RunWork:
    """What one layer and both ends do at local shapes, and what they hold. Parameters are local to a tp rank.

    key_value_bytes, query_bytes  one rank's keys and values, and queries, of a micro-batch in a layer
    logits, head_input, stream    elements on one rank; `stream` is the residual stream, whole
    weight_shapes, head_weight    elements of the weight matrices of a layer and of the head
    scores                        elements of the score matrices of a layer's attention
    attention_core_bytes          what selective recomputation of the attention core does not keep
    op_kept_bytes                 what op-level recomputation keeps: attention and every second product
    """

    layer: BlockWork
    prologue: BlockWork
    epilogue: BlockWork
    layer_parameters: float
    prologue_parameters: float
    epilogue_parameters: float
    border_bytes: float
    key_value_bytes: float
    query_bytes: float
    logits: float = 0.0
    head_input: float = 0.0
    stream: float = 0.0
    weight_shapes: tuple[float, ...] = ()
    attention_core_bytes: float = 0.0
    op_kept_bytes: float = 0.0
    scores: float = 0.0
    head_weight: float = 0.0


def stage_layers(layers: int, pp: int, virtual: int) -> tuple[int, ...]:
    """Layers of each stage: even; or with embedding and head counted as a layer each, if only that comes out even; else
    the remainder goes one each to the first stages."""
    if layers % (pp * virtual) and pp > 2 and (layers + 2) % (pp * virtual) == 0:
        each = (layers + 2) // pp
        return (each - 1, *(each for _ in range(pp - 2)), each - 1)
    return tuple(layers // pp + (s < layers % pp) for s in range(pp))


def price_run(
    work: RunWork, layout: RunLayout, cluster: ClusterSpec, traits: StackTraits, machine: Machine,
    constants: GenerationConstants,
) -> dict[str, float]:  # fmt: skip
    """Seconds of one step by part, "total" among them."""
    return _Run(work, layout, cluster, traits, machine, constants).price()


class _Run:
    def __init__(
        self, work: RunWork, layout: RunLayout, cluster: ClusterSpec, traits: StackTraits, machine: Machine,
        constants: GenerationConstants,
    ) -> None:  # fmt: skip
        self.work, self.layout, self.traits, self.machine, self.constants = work, layout, traits, machine, constants
        self.cluster, d = cluster, layout.degrees
        tp = group_cost(cluster, d, "tp")
        self.layer = price_work(work.layer, machine, tp)
        plain = machine.in_16_bits()
        self.ends = (price_work(work.prologue, plain, tp), price_work(work.epilogue, plain, tp))
        shard = max(1, layout.zero_shard)
        hybrid = Degrees(pp=d.pp, tp=d.tp, cp=shard, dp=max(1, d.dp * d.cp // shard))
        self.shard_group = group_cost(cluster, hybrid, "cp")
        self.replica_group = group_cost(cluster, hybrid, "dp")
        self.cp_group = group_cost(cluster, d, "cp")
        self.pp_group = group_cost(cluster, d, "pp")
        self.tp_exposed = 1 - (constants["tp_hidden"] if "tp" in traits.overlap else 0.0)

    def price(self) -> dict[str, float]:
        m, v = self.layout.micro_batches, self.layout.virtual_stages
        counts = stage_layers(self.layout.layers, self.layout.degrees.pp, v)
        stages = [self._stage(s, n) for s, n in enumerate(counts)]
        totals = [sum(parts.values()) for parts in stages]
        slowest = max(range(len(totals)), key=totals.__getitem__)
        parts = {name: m * seconds for name, seconds in stages[slowest].items()}
        parts["bubble"] = (sum(totals) - totals[slowest]) / v
        heaviest = max(range(len(counts)), key=lambda s: self._parameters(s, counts[s]))
        parts["dp"] += self._tail(heaviest, counts[heaviest])
        parts["optimizer"] = self._optimizer_s(self._parameters(heaviest, counts[heaviest]))
        nodes = max(1.0, self.cluster.num_devices / (self.cluster.links[0].span if self.cluster.links else 1))
        parts["straggler"] = sum(parts.values()) * self.constants["straggler"] * math.log2(nodes)
        parts["overhead"] = self.constants["step_overhead_s"]
        return parts | {"total": sum(parts.values())}

    def _stage(self, stage: int, count: int) -> dict[str, float]:
        layer, last = self.layer, self.layout.degrees.pp - 1
        glue = [end for end, here in zip(self.ends, (0, last), strict=True) if stage == here]
        again_s, again_tp_s = self._recomputed()
        forward, backward = layer.forward_s, layer.backward_s + again_s
        layer_tp_s = layer.forward_communication_s + layer.backward_communication_s
        parts = {
            "forward": count * forward + sum(g.forward_s for g in glue),
            "backward": count * layer.backward_s + sum(g.backward_s for g in glue),
            "recompute": count * again_s,
            "tp": self.tp_exposed * count * (layer_tp_s + again_tp_s - self._behind_weights_s())
            + sum(g.forward_communication_s + g.backward_communication_s for g in glue),
            "cp": count * self._exchange_s(),
            "dp": 0.0,
            "pp": self._send_s(),
            "accumulation": self._accumulation_s(self._parameters(stage, count)),
        }
        if self.layout.zero >= 2:
            parts["dp"] = count * self._sharded_s(self.work.layer_parameters, forward, backward, layer)
            for price, here, held in zip(
                self.ends, (0, last), (self.work.prologue_parameters, self.work.epilogue_parameters), strict=True
            ):
                if stage == here:
                    parts["dp"] += self._sharded_s(held, price.forward_s, price.backward_s, price)
        return parts

    def _recomputed(self) -> tuple[float, float]:
        """(compute, tp communication) in seconds that one layer repeats before its backward."""
        kernels, mode = self.work.layer.forward, self.layout.recompute
        if mode == "full":
            return self.layer.forward_s, self.layer.forward_communication_s
        if mode == "none":
            return 0.0, 0.0
        seconds = self.machine.seconds(kernels)
        if mode == "selective":
            return float(seconds[kernels.is_attention].sum()), 0.0
        # op level: attention and every second product are kept
        kept = kernels.is_attention | (kernels.is_matmul & (kernels.is_matmul.cumsum() % 2 == 1))
        return float(seconds[~kept].sum()), 0.0

    def _behind_weights_s(self) -> float:
        """Part of a layer's input-gradient reductions that runs behind its weight gradients."""
        if "tp_linear" not in self.traits.overlap or self.layout.degrees.tp == 1:
            return 0.0
        kernels = self.work.layer.backward
        weights_s = float(self.machine.seconds(kernels)[kernels.is_matmul & (kernels.backward == 2)].sum())
        return self.constants["tp_linear_hidden"] * min(self.layer.backward_reduction_s, weights_s)

    def _exchange_s(self) -> float:
        """Exposed exchange of a layer's attention over cp, forward and backward."""
        group, cp = self.cp_group, self.layout.degrees.cp
        if cp == 1:
            return 0.0
        again = 1 if self.layout.recompute in ("full", "selective") else 0
        if self.layout.cp_exchange == "all_to_all":
            moved = 2 * self.work.query_bytes + self.work.key_value_bytes
            return (2 + again) * group.seconds("all_to_all", moved * cp)
        ring_s = (cp - 1) * group.seconds("send", self.work.key_value_bytes)
        attention_s = [
            float(self.machine.seconds(k)[k.is_attention].sum())
            for k in (self.work.layer.forward, self.work.layer.backward)
        ]
        hidden = self.constants["cp_hidden"] * (cp - 1) / cp
        passes = [(1 + again, ring_s, attention_s[0]), (1, 2 * ring_s, attention_s[1])]
        return sum(n * (comm - min(comm, work) * hidden) for n, comm, work in passes)

    def _accumulation_s(self, parameters: float) -> float:
        """Adding a micro-batch's weight gradients to those of the step. Inside the matmul it costs a read and a write
        of the fp32 sum less the 16-bit write; as an op of its own a read of both and a write. FSDP adds only shards."""
        if self.layout.micro_batches == 1 or (self.traits.fully_sharded and self.layout.zero >= 2):
            return 0.0
        wide = 2 * self.traits.gradient_bytes
        return parameters * (wide - 2 if self.traits.fused_gradients else wide + 2) / self.machine.bytes_per_s

    def _send_s(self) -> float:
        """Exposed receives of one micro-batch: activations forward, gradients backward, each chunk."""
        if self.layout.degrees.pp == 1:
            return 0.0
        # A replicated stream is cut over tp for the way between stages and gathered behind it.
        tp = 1 if self.layout.sequence_sharding else self.layout.degrees.tp
        one = self.pp_group.seconds("send", self.work.border_bytes / tp)
        if tp > 1:
            one += group_cost(self.cluster, self.layout.degrees, "tp").seconds("all_gather", self.work.border_bytes)
        both = 2 * self.layout.virtual_stages * one
        return both * (1 - (self.constants["pp_hidden"] if "pp" in self.traits.overlap else 0.0))

    def _sharded_s(self, parameters: float, forward_s: float, backward_s: float, price: LayoutPrice) -> float:
        """What gathering parameters and scattering gradients adds to one unit's forward and backward."""
        gather_bytes = self.traits.fp8_gather_bytes if self.layout.fp8 else self.traits.gather_bytes
        gather_s = self.shard_group.seconds("all_gather", parameters * gather_bytes)
        reduce_s = self.shard_group.seconds("reduce_scatter", parameters * self.traits.reduce_bytes)
        reduce_s += self.replica_group.seconds(
            "all_reduce", parameters * self.traits.reduce_bytes / max(1, self.layout.zero_shard)
        )
        forward_s += price.forward_communication_s
        backward_s += price.backward_communication_s
        phases = [(gather_s, forward_s), (reduce_s + (gather_s if self.layout.zero == 3 else 0.0), backward_s)]
        if "dp" not in self.traits.overlap:
            return sum(comm for comm, _ in phases)
        back = self.constants["zero3_slowdown"]
        return sum(max(0.0, comm - work) + back * min(comm, work) for comm, work in phases)

    def _parameters(self, stage: int, count: int) -> float:
        own = count * self.work.layer_parameters
        own += self.work.prologue_parameters if stage == 0 else 0.0
        return own + (self.work.epilogue_parameters if stage == self.layout.degrees.pp - 1 else 0.0)

    def _tail(self, stage: int, count: int) -> float:
        """Exposed gradient reduction and ZeRO-1 gather after the last backward."""
        if self.layout.zero >= 2:
            return 0.0
        parameters = self._parameters(stage, count)
        reduce_bytes = parameters * self.traits.reduce_bytes
        layer = self.layer
        forward_s = count * (layer.forward_s + layer.forward_communication_s)
        backward_s = count * (layer.backward_s + layer.backward_communication_s + self._recomputed()[0])
        hides = "dp" in self.traits.overlap
        if self.layout.zero == 0:
            reduce_s = self.shard_group.seconds("all_reduce", reduce_bytes)
            reduce_s += self.replica_group.seconds("all_reduce", reduce_bytes)
            return exposed_reduction_s(reduce_s, backward_s if hides else 0.0)
        reduce_s = self.shard_group.seconds("reduce_scatter", reduce_bytes)
        reduce_s += self.replica_group.seconds("all_reduce", reduce_bytes / self.layout.zero_shard)
        gather_bytes = parameters * (self.traits.fp8_gather_bytes if self.layout.fp8 else self.traits.gather_bytes)
        gather_s = self.shard_group.seconds("all_gather", gather_bytes)
        if self.traits.zero1_gather == "broadcast" and self.layout.zero_shard > 1:
            gather_s += self.layout.zero_shard * self.constants["broadcast_s"]
            return exposed_reduction_s(reduce_s, backward_s if hides else 0.0) + gather_s
        return exposed_reduction_s(reduce_s, backward_s if hides else 0.0) + exposed_reduction_s(
            gather_s, forward_s if hides else 0.0
        )

    def _optimizer_s(self, parameters: float) -> float:
        """Adam reads gradient, master weight and two moments, writes all but the gradient; the norm reads once more."""
        bytes_ = 2 * self.traits.gradient_bytes + 24 + 2
        held = parameters / (max(1, self.layout.zero_shard) if self.layout.zero else 1)
        return held * bytes_ / self.machine.bytes_per_s


def exposed_reduction_s(reduce_s: float, hidden_behind_s: float, last_part: float = 0.02) -> float:
    """A reduction that runs bucket by bucket behind compute: what is longer than it, and always the last bucket."""
    return max(reduce_s - hidden_behind_s, reduce_s * last_part)


def attention_over_context(work: BlockWork, cp: int) -> BlockWork:
    """The work of one cp rank: its queries meet the keys of the whole sequence (balanced: causality halves it)."""

    def longer(kernels: Kernels) -> Kernels:
        return Kernels(
            row._replace(n=row.n * cp) if attends else row
            for row, attends in zip(kernels.rows, kernels.is_attention, strict=True)
        )

    return replace(work, forward=longer(work.forward), backward=longer(work.backward)) if cp > 1 else work
