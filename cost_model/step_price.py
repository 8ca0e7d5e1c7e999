"""Seconds of one training step from the work of its layers: the one formula of the search and of runs as given.

    step = ((m - 1/v) max_s T_s + (1/v) sum_s U_s + max_s tail_s) (1 + straggler log2 nodes) + overhead

T_s     forward, backward, recomputation and exposed communication of one micro-batch on stage (rank) s
m, v    micro-batches; chunks a rank (interleaving fills a bubble with 1/v of a stage)
U_s     T_s; zero-bubble: T_s less twice the weight gradients W_s, which move into the bubble
tail_s  what follows the last backward: put-off weight gradients (zero-bubble, 2 W_s), exposed gradient reduction,
        parameter gather, optimizer

T_s and tail_s are sums over the units (layers and ends) of a stage, each at its mode of recomputation; what a reduction
hides behind counts no recomputation, so that a tail depends on the layers of a stage alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.cost_model.block_layout import BlockWork, LayoutPrice
from autopar.cost_model.comm_cost import GroupCost, group_cost
from autopar.cost_model.constant_table import GenerationConstants
from autopar.cost_model.machine import Machine
from autopar.cost_model.memory import Recipe
from autopar.cost_model.run_layout import RunLayout, StackTraits, Unit
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec

__all__ = [
    "StepPrice",
    "add_parts",
    "exchange_s",
    "exposed_reduction_s",
    "overhead_s",
    "slowdown",
]


class _Shares(NamedTuple):
    """Seconds of some of a layer's kernels: attention forward and backward, weight gradients, by mode what is
    computed again, and of a whole layer what is computed until all that backward reads is there."""

    attention_forward_s: float
    attention_backward_s: float
    weights_s: float
    again_s: Mapping[str, float]
    early_s: float


@lru_cache(maxsize=4096)
def _shares(work: BlockWork, machine: Machine) -> _Shares:
    forward, backward = work.forward, work.backward
    seconds, back = machine.seconds(forward), machine.seconds(backward)
    products = forward.is_matmul
    every_second = products & (products.cumsum() % 2 == 1)
    core_s = float(seconds[forward.is_attention].sum())
    again = {
        "none": 0.0,
        "selective": core_s,
        "op": float(seconds[~(forward.is_attention | every_second)].sum()),
        "selective-ops": float(seconds[~(forward.is_attention | products | forward.is_product)].sum()),
        "full": float(seconds.sum()),
    }
    weights_s = float(back[backward.is_matmul & (backward.backward == 2)].sum())
    return _Shares(core_s, float(back[backward.is_attention].sum()), weights_s, again,
                   float(seconds[: work.again].sum()))  # fmt: skip


class StepPrice:
    """Prices the parts of a step under one layout, in seconds."""

    def __init__(
        self, layout: RunLayout, cluster: ClusterSpec, traits: StackTraits, machine: Machine,
        constants: GenerationConstants, recipe: Recipe,
    ) -> None:  # fmt: skip
        self.layout, self.cluster, self.traits, self.machine = layout, cluster, traits, machine
        self.constants, self.recipe = constants, recipe
        d, shard = layout.degrees, max(1, layout.zero_shard)
        hybrid = Degrees(pp=d.pp, tp=d.tp, cp=shard, dp=max(1, d.dp * d.cp // shard))
        self.shard_group = group_cost(cluster, hybrid, "cp")
        self.replica_group = group_cost(cluster, hybrid, "dp")
        self.tp_group, self.cp_group, self.pp_group = (group_cost(cluster, d, axis) for axis in ("tp", "cp", "pp"))
        self.tp_exposed = 1 - (constants["tp_hidden"] if "tp" in traits.overlap else 0.0)
        self.hides_dp = "dp" in traits.overlap and constants.hides

    # --- every micro-batch --------------------------------------------------------------------------------------------

    def layer(self, unit: Unit, mode: str, together: int = 1) -> dict[str, float]:
        """One layer, recomputed by `mode`; where `together` are recomputed whole, all but the last run to their end."""
        price, shares = unit.price, _shares(unit.work, self.machine)
        again_s, again_tp_s = shares.again_s[mode], self._tp_again_s(unit, mode)
        if mode == "full" and self.traits.stops_early:
            again_s -= (again_s - shares.early_s) / together
            again_tp_s -= (again_tp_s - price.repeated_communication_s) / together
        tp_s = price.forward_communication_s + price.backward_communication_s + again_tp_s
        return {
            "forward": price.forward_s,
            "backward": price.backward_s,
            "recompute": again_s,
            "tp": self.tp_exposed * (tp_s - self._behind_weights_s(price, shares)),
            "cp": self._exchange_s(unit, shares, mode),
            "dp": self._sharded_s(unit, again_s),
            "accumulation": self._accumulation_s(unit.trained),
        }

    def end(self, unit: Unit) -> dict[str, float]:
        """Embedding, or head and loss."""
        price = unit.price
        return {
            "forward": price.forward_s,
            "backward": price.backward_s,
            "tp": price.forward_communication_s + price.backward_communication_s,
            "dp": self._sharded_s(unit, 0.0),
            "accumulation": self._accumulation_s(unit.trained),
        }

    def send_s(self, border_bytes: float) -> float:
        """Exposed receives of one micro-batch: activations forward, gradients backward, each chunk."""
        hidden = self.constants["pp_hidden"] if "pp" in self.traits.overlap else 0.0
        return self.layout.virtual_stages * self.receives_s(border_bytes) * (1 - hidden)

    def receives_s(self, border_bytes: float) -> float:
        """Receives of one micro-batch by a chunk, if nothing hides them."""
        if self.layout.degrees.pp == 1:
            return 0.0
        cut = self.traits.scatters_stage_outputs and not self.layout.sequence_sharding
        tp = self.layout.degrees.tp if cut else 1
        gather_s = self.tp_group.seconds("all_gather", border_bytes) if tp > 1 else 0.0
        return self.pp_group.between_neighbours(border_bytes / tp) + 2 * gather_s

    def weights_s(self, unit: Unit) -> float:
        """Weight gradients of a unit, which zero-bubble puts off."""
        return self.all_weights_s(unit) if self.layout.schedule == "zero-bubble" else 0.0

    def all_weights_s(self, unit: Unit) -> float:
        """Weight gradients of a unit."""
        return _shares(unit.work, self.machine).weights_s

    def _tp_again_s(self, unit: Unit, mode: str) -> float:
        """Communication over tp that recomputation repeats: op-level modes keep sums behind products, not gathers."""
        if mode == "full":
            return unit.price.forward_communication_s
        if mode != "selective-ops":
            return 0.0
        return sum(self.tp_group.seconds(kind, whole) for kind, whole, when in unit.work.collectives
                   if when == 0 and kind == "all_gather")  # fmt: skip

    def _behind_weights_s(self, price: LayoutPrice, shares: _Shares) -> float:
        """Part of a layer's input-gradient reductions that runs behind its weight gradients."""
        if "tp_linear" not in self.traits.overlap or self.layout.degrees.tp == 1:
            return 0.0
        return self.constants["tp_linear_hidden"] * min(price.backward_reduction_s, shares.weights_s)

    def _exchange_s(self, unit: Unit, shares: _Shares, mode: str) -> float:
        """Exposed exchange of a layer's attention over cp, forward and backward. A second run of the attention core
        alone ends, where it stops early, before the result's exchange, which keeps nothing."""
        work, again = (shares.attention_forward_s, shares.attention_backward_s), mode in ("full", "selective")
        kind, queries = self.layout.cp_exchange, unit.query_bytes
        seconds = exchange_s(kind, self.cp_group, self.constants["cp_hidden"], unit.key_value_bytes, queries, work,
                             again=again)  # fmt: skip
        if kind == "all_to_all" and mode == "selective" and self.traits.stops_early:
            seconds -= self.cp_group.seconds("all_to_all", queries * self.cp_group.size)
        return seconds

    def _accumulation_s(self, parameters: float) -> float:
        """Adding a micro-batch's weight gradients to those of the step. Inside the matmul it costs a read and a write
        of the fp32 sum less the 16-bit write; as an op of its own a read of both and a write. FSDP adds only shards."""
        if self.layout.micro_batches == 1 or (self.traits.fully_sharded and self.layout.zero >= 2):
            return 0.0
        wide = 2 * self.traits.gradient_bytes
        own = self.recipe.parameter_bytes
        return parameters * (wide - own if self.traits.fused_gradients else wide + own) / self.machine.bytes_per_s

    def _sharded_s(self, unit: Unit, again_s: float) -> float:
        """What gathering parameters and scattering gradients adds to one unit's forward and backward (ZeRO 2 and 3)."""
        zero = self.layout.zero
        if zero < 2:
            return 0.0
        price, gathered = unit.price, unit.parameters if zero == 3 else unit.trained
        gather_s = self.shard_group.seconds("all_gather", gathered * self._gather_bytes)
        reduce_s = self.shard_group.seconds("reduce_scatter", unit.trained * self.traits.reduce_bytes)
        between_s = 0.0 if self.traits.sums_replicas_once else self._between_replicas_s(unit.trained)
        in_forward = 0.0 if zero == 2 and self.traits.keeps_gathered else gather_s
        in_backward = reduce_s + (gather_s if zero == 3 else 0.0)
        if not self.hides_dp:
            return in_forward + in_backward + between_s
        forward_s = price.forward_s + price.forward_communication_s
        backward_s = price.backward_s + price.backward_communication_s + again_s
        shards, replicas = self.shard_group, self.replica_group
        return self._behind_s(forward_s, (in_forward, shards)) + self._behind_s(
            backward_s, (in_backward, shards), (between_s, replicas)
        )

    def _behind_s(self, work_s: float, *collectives: tuple[float, GroupCost]) -> float:
        """What collectives add to the work that they hide behind: what is longer than it, and what the rest slows."""
        passes, whole_s = self.constants["zero3_traffic"], sum(seconds for seconds, _ in collectives)
        back_s = sum(s * group.comes_back(passes, self.machine.bytes_per_s) for s, group in collectives)
        return back_s if whole_s <= work_s else whole_s - work_s + back_s * work_s / whole_s

    # --- once a step --------------------------------------------------------------------------------------------------

    def tail(
        self, parameters: float, forward_s: float, backward_s: float, step_tp_s: float = 0.0, units: int = 1
    ) -> dict[str, float]:
        """What a stage that trains `parameters` does after its last backward. forward_s, backward_s: its layers,
        communication over tp included; step_tp_s: gradients of replicated parameters over tp; units: parts that ZeRO
        gathers and reduces one by one."""
        buckets = math.ceil(parameters * self.traits.reduce_bytes / self.traits.bucket_bytes)
        messages = max(1, units if self.layout.zero else buckets)
        return {"tp": step_tp_s, "dp": self._exposed_dp_s(parameters, forward_s, backward_s, messages=messages),
                "optimizer": self.optimizer_s(parameters)}  # fmt: skip

    def least_tail_s(self, parameters: float, forward_s: float, backward_s: float) -> float:
        """Lower bound of the longest tail of stages that hold `parameters` and take these times on average: a tail is
        convex in them but for the choice of ring or tree, whose rates differ by (n - 1) / n, and messages, of which
        there is at least one."""
        n = self.replica_group.size
        share = (n - 1) / n if n > 1 else 1.0
        return self._exposed_dp_s(parameters, forward_s, backward_s, share) + self.optimizer_s(parameters)

    def optimizer_s(self, parameters: float) -> float:
        held = parameters / (max(1, self.layout.zero_shard) if self.layout.zero else 1)
        return held * self.recipe.update_traffic_bytes / self.machine.bytes_per_s

    def _exposed_dp_s(
        self, parameters: float, forward_s: float, backward_s: float, share: float = 1.0, messages: int = 1
    ) -> float:
        """Exposed gradient reduction and parameter gather; share: factor on the all-reduce between replicas."""
        zero, traits = self.layout.zero, self.traits
        behind_backward_s, behind_forward_s = (backward_s, forward_s) if self.hides_dp else (0.0, 0.0)
        gather_s = self.shard_group.in_messages("all_gather", parameters * self._gather_bytes, messages)
        if zero >= 2:
            exposed_s = exposed_reduction_s(gather_s, behind_forward_s) if zero == 2 and traits.keeps_gathered else 0.0
            if traits.sums_replicas_once:
                sum_s = share * self._between_replicas_s(parameters, messages)
                exposed_s += exposed_reduction_s(sum_s, behind_backward_s)
            return exposed_s
        if zero == 0:
            nbytes = parameters * traits.reduce_bytes
            reduce_s = self.shard_group.in_messages("all_reduce", nbytes, messages)
            reduce_s += share * self.replica_group.in_messages("all_reduce", nbytes, messages)
            return exposed_reduction_s(reduce_s, behind_backward_s)
        reduce_s = exposed_reduction_s(self._scatter_s(parameters, share, messages), behind_backward_s)
        if traits.zero1_gather == "broadcast" and self.layout.zero_shard > 1:
            return reduce_s + gather_s + self.layout.zero_shard * self.constants["broadcast_s"]
        return reduce_s + exposed_reduction_s(gather_s, behind_forward_s)

    @property
    def _gather_bytes(self) -> float:
        return self.traits.fp8_gather_bytes if self.layout.fp8 else self.traits.gather_bytes

    def _scatter_s(self, parameters: float, share: float = 1.0, messages: int = 1) -> float:
        inside_s = self.shard_group.in_messages("reduce_scatter", parameters * self.traits.reduce_bytes, messages)
        return inside_s + share * self._between_replicas_s(parameters, messages)

    def _between_replicas_s(self, parameters: float, messages: int = 1) -> float:
        shards = max(1, self.layout.zero_shard)
        return self.replica_group.in_messages("all_reduce", parameters * self.traits.reduce_bytes / shards, messages)

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(
        self, stages: Sequence[Mapping[str, float]], tails: Sequence[Mapping[str, float]], weights_s: Sequence[float]
    ) -> dict[str, float]:
        """Seconds of the step by part. stages: a micro-batch's parts on each stage; tails: their `tail`; weights_s:
        their weight gradients under zero-bubble, else 0. The parts are those of the slowest stage."""
        m, v = self.layout.micro_batches, self.layout.virtual_stages
        totals = [sum(parts.values()) for parts in stages]
        ends = [2 * w + sum(tail.values()) for w, tail in zip(weights_s, tails, strict=True)]
        slowest = max(range(len(totals)), key=totals.__getitem__)
        latest = max(range(len(ends)), key=ends.__getitem__)
        parts = {name: m * seconds for name, seconds in stages[slowest].items()}
        for name, seconds in tails[latest].items():
            parts[name] = parts.get(name, 0.0) + seconds
        in_bubble = sum(t - 2 * w for t, w in zip(totals, weights_s, strict=True))
        parts["bubble"] = (in_bubble - totals[slowest]) / v + 2 * weights_s[latest]
        busy = sum(parts.values())
        parts["straggler"] = busy * (self.slowdown - 1)
        parts["overhead"] = self.overhead_s
        return parts

    @property
    def slowdown(self) -> float:
        return slowdown(self.cluster, self.constants)

    @property
    def overhead_s(self) -> float:
        return overhead_s(self.cluster, self.constants)


def exchange_s(
    kind: str, group: GroupCost, hidden: float, keys: float, queries: float, work: tuple[float, float], *, again: bool
) -> float:
    """Exposed exchange of one attention over cp; `keys` and `queries` in bytes of one rank, `work`: seconds of its
    kernels forward and backward, `again`: it is recomputed. Rises with the bytes, and never falls with less work."""
    if group.size == 1:
        return 0.0
    if kind == "all_to_all":
        return (2 + again) * group.seconds("all_to_all", (2 * queries + keys) * group.size)
    if kind == "all_gather":
        gather_s, scatter_s = (group.seconds(kind, keys * group.size) for kind in ("all_gather", "reduce_scatter"))
        return (2 + again) * gather_s + scatter_s
    hop_s, steps = group.seconds("send", keys), group.size - 1
    hidden *= steps / group.size
    passes = [
        (1 + again, steps * hop_s, work[0]),
        (1, (2 * steps + 1) * hop_s, work[1]),
    ]  # gradients go all the way home
    return sum(n * (comm - min(comm, seconds) * hidden) for n, comm, seconds in passes)


def slowdown(cluster: ClusterSpec, constants: GenerationConstants) -> float:
    """Factor on a synchronous step by the slowest of many nodes. A CPU's processes share one."""
    if cluster.device.kind != "cuda":
        return 1.0
    nodes = max(1.0, cluster.num_devices / (cluster.links[0].span if cluster.links else 1))
    return 1 + constants["straggler"] * math.log2(nodes)


def overhead_s(cluster: ClusterSpec, constants: GenerationConstants) -> float:
    """Seconds of a step outside the model. A calibrated CPU shows none."""
    return constants["step_overhead_s"] if cluster.device.kind == "cuda" else 0.0


def add_parts(*parts: Mapping[str, float] | tuple[float, Mapping[str, float]]) -> dict[str, float]:
    """Sum by name; a pair (n, parts) counts n times."""
    total: dict[str, float] = {}
    for entry in parts:
        times, named = entry if isinstance(entry, tuple) else (1.0, entry)
        for name, seconds in named.items():
            total[name] = total.get(name, 0.0) + times * seconds
    return total


def exposed_reduction_s(reduce_s: float, hidden_behind_s: float, last_part: float = 0.02) -> float:
    """A reduction that runs bucket by bucket behind compute: what is longer than it, and always the last bucket."""
    return max(reduce_s - hidden_behind_s, reduce_s * last_part)
