"""Price one setting: block prices to stage costs, the pipeline ILP, then time and memory by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.cost_model.block_layout import LayoutPrice
from autopar.cost_model.candidates import Setting
from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.memory import Recipe, in_flight
from autopar.cost_model.model_prices import BlockPrices, ModelPrices
from autopar.cost_model.pipeline_ilp import PipelineSolution, solve_pipeline
from autopar.cost_model.stage_table import LayerClass, LayerMode, PipelineProblem, StageCost, StagePrice, StageTable
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec

__all__ = ["TIME_PARTS", "Evaluation", "Evaluator"]

TIME_PARTS = (
    "forward", "backward", "recompute", "tp_communication", "cp_communication", "dp_communication",
    "pp_communication", "bubble", "optimizer",
)  # fmt: skip

BUCKET_BYTES = 25 << 20
"""Gradient reduction goes bucket by bucket; the last one has no backward left to hide behind."""


@dataclass(frozen=True)
class Evaluation:
    """A priced setting. `pipeline` is None if no cut fits: then `needed_bytes` of device memory would, and
    `binding_stage` is the stage that asks for it."""

    setting: Setting
    pipeline: PipelineSolution | None
    step_s: float
    time_s: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[Mapping[str, int], ...] = ()
    collectives: tuple[Mapping[str, object], ...] = ()
    executed_flops: float = 0.0
    needed_bytes: float = 0.0
    binding_stage: int = 0


@dataclass(frozen=True)
class _Stage:
    """Parts of one stage per micro-batch, in the names of TIME_PARTS, and its parameters."""

    parts: Mapping[str, float]
    parameters: float
    step_communication_s: float
    flops: float


class Evaluator:
    """Prices settings of one model on one cluster."""

    def __init__(
        self, prices: ModelPrices, cluster: ClusterSpec, recipe: Recipe, settings: Sequence[Setting],
        checkpoint: str | None,
    ) -> None:  # fmt: skip
        self.prices, self.cluster, self.recipe, self.checkpoint = prices, cluster, recipe, checkpoint
        possible = [s for s in settings if s.degrees.cp == 1]
        possible = [s for s in possible if not self.surely_too_big(s)] or possible
        self.micro_batches = {
            tp: tuple(sorted({s.micro_batch for s in possible if s.degrees.tp == tp}))
            for tp in {s.degrees.tp for s in settings}
        }
        self.class_ids = list(prices.classes)

    def evaluate(self, setting: Setting) -> Evaluation:
        """Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        return _Pricing(self, setting).evaluate()

    def bound(self, setting: Setting) -> float:
        """Lower bound of the step in seconds with exact block prices: stages of equal time, nothing recomputed that
        need not be, no tail."""
        return _step_bound(setting, _Pricing(self, setting).whole_s())

    def rough_bound(self, setting: Setting, floor_s: float) -> float:
        """Lower bound in proportion from prices that are known, gets sharper while the search goes on. If these do not
        lift the bound above `floor_s`, the largest micro-batch of the same tp is priced for it.

        Every price is a sum of maxima of affine functions of the micro-batch with non-negative constants, so the price
        per sequence never rises with it; and a layout over tp ranks is one over fewer, where an op takes at most so
        much longer as there are fewer ranks, and so does a collective if `GroupCost.scales_from` says so.
        """
        d, size, sharding = setting.degrees, setting.micro_batch, setting.sequence_sharding
        group = group_cost(self.cluster, d, "tp")
        best = 0.0
        for tp in self.micro_batches:
            if d.tp % tp:
                continue
            smaller = replace(d, tp=tp, dp=d.dp * d.tp // tp)
            if tp != d.tp and not group.scales_from(group_cost(self.cluster, smaller, "tp")):
                continue
            for priced in self.prices.priced_sizes(tp, sharding):
                if priced >= size:
                    best = max(best, self._in_proportion(setting, smaller, priced))
        if best > floor_s:
            return best
        return max(best, self._in_proportion(setting, d, max(size, self.micro_batches[d.tp][-1])))

    def _in_proportion(self, setting: Setting, degrees: Degrees, priced: int) -> float:
        whole_s = _Pricing(self, replace(setting, degrees=degrees, micro_batch=priced)).block_s()
        return _step_bound(setting, whole_s * setting.micro_batch / priced * degrees.tp / setting.degrees.tp)

    def surely_too_big(self, setting: Setting) -> bool:
        """True if no layout and no cut fits: parameters, gradients and optimizer spread evenly over tp and pp, and
        beside them what one layer keeps for its backward, exceed the device. (A recomputed layer keeps it too, for as
        long as its backward runs.)"""
        d, device = setting.degrees, self.cluster.device
        static = self.prices.traced.parameter_count * self.recipe.total_bytes
        whole = self.prices.single_rank(setting.micro_batch)
        kept = min(price.saved_bytes for price in whole.layers.values())
        return (static / d.pp + kept) / d.tp > device.memory_bytes - device.reserved_bytes


class _Pricing:
    """One setting's numbers, kept together while it is priced."""

    def __init__(self, owner: Evaluator, setting: Setting) -> None:
        self.owner, self.setting, self.recipe = owner, setting, owner.recipe
        d = setting.degrees
        self.pp = d.pp
        self.dp_group = group_cost(owner.cluster, d, "dp")
        self.pp_group = group_cost(owner.cluster, d, "pp")
        tp_group = group_cost(owner.cluster, d, "tp")
        self.blocks: BlockPrices = owner.prices.at(
            d.tp, setting.sequence_sharding, setting.micro_batch, tp_group, owner.micro_batches[d.tp]
        )
        self.send_s = 2 * self.pp_group.seconds("send", self.blocks.border_bytes) if d.pp > 1 else 0.0
        self.parameters = {c: self._parameters(owner.prices.blocks[c].nodes) for c in owner.class_ids}
        first, last = (self._parameters(n) for n in (owner.prices.prologue, owner.prices.epilogue))
        if d.pp == 1:  # a tied weight is one tensor
            last = {name: n for name, n in last.items() if name not in first}
        self.glue_parameters = (first, last)

    def evaluate(self) -> Evaluation:
        problem = self._problem()
        solution = solve_pipeline(problem, policy=self.owner.prices.policy)
        if solution is None:
            needed, stage = StageTable(problem).memory_needed()
            missing = needed + self.owner.cluster.device.reserved_bytes
            return Evaluation(self.setting, None, float("inf"), needed_bytes=missing, binding_stage=stage)
        if solution.variables:
            self.owner.prices.counts.add(solution)
        stages = [self._stage(s, stage) for s, stage in enumerate(solution.stages)]
        time_s = self._time(solution, stages)
        m, d = self.setting.micro_batches, self.setting.degrees
        flops = sum(stage.flops for stage in stages) * m * d.tp * d.dp
        memory = tuple(self._memory(s, stage) for s, stage in enumerate(solution.stages))
        return Evaluation(
            self.setting, solution, sum(time_s.values()), time_s, memory, self._collectives(solution, stages), flops
        )

    def whole_s(self) -> float:
        """Seconds of one micro-batch through all stages, sends included."""
        return self.block_s() + self.pp * self.send_s

    def block_s(self) -> float:
        """Seconds of one micro-batch through all blocks, each layer in its fastest mode."""
        repeats = self.owner.prices.repeats()
        whole = sum(repeats[c] * self._layer_class(c).modes[0].time_s for c in self.owner.class_ids)
        return whole + _seconds(self.blocks.prologue) + _seconds(self.blocks.epilogue)

    def _problem(self) -> PipelineProblem:
        owner, m = self.owner, self.setting.micro_batches
        index = {c: i for i, c in enumerate(owner.class_ids)}
        layers = tuple(index[s.class_id] for s in owner.prices.traced.layers)
        classes = tuple(self._layer_class(c) for c in owner.class_ids)
        stages = tuple(self._stage_cost(s) for s in range(self.pp))
        device = owner.cluster.device
        return PipelineProblem(layers, classes, stages, m, device.memory_bytes - device.reserved_bytes, self._tail)

    def _layer_class(self, class_id: str) -> LayerClass:
        price = self.blocks.layers[class_id]
        none = LayerMode("none", _seconds(price), price.saved_bytes, price.working_bytes)
        again = price.forward_s + price.forward_communication_s
        full = LayerMode(
            "full", _seconds(price) + again, self.blocks.border_bytes, price.saved_bytes + price.working_bytes
        )
        modes = {"none": (none,), "full": (full,), None: (none, full)}[self.owner.checkpoint]
        return LayerClass(modes, sum(self.parameters[class_id].values()) * self.recipe.total_bytes)

    def _glue(self, stage: int) -> list[tuple[LayoutPrice, Mapping[str, float]]]:
        """Prologue with the first stage, epilogue with the last."""
        parts: list[tuple[LayoutPrice, Mapping[str, float]]] = []
        if stage == 0:
            parts.append((self.blocks.prologue, self.glue_parameters[0]))
        if stage == self.pp - 1:
            parts.append((self.blocks.epilogue, self.glue_parameters[1]))
        return parts

    def _stage_cost(self, stage: int) -> StageCost:
        glue = self._glue(stage)
        parameters = sum(sum(held.values()) for _, held in glue)
        return StageCost(
            time_s=sum(_seconds(price) for price, _ in glue) + self.send_s,
            static_bytes=parameters * self.recipe.total_bytes + self._communication_bytes(stage),
            saved_bytes=sum(price.saved_bytes for price, _ in glue),
            transient_bytes=max((price.working_bytes for price, _ in glue), default=0.0),
            in_flight=self._in_flight(stage),
        )

    def _in_flight(self, stage: int) -> int:
        return int(in_flight(self.setting.schedule, stage, self.pp, self.setting.micro_batches))

    def _communication_bytes(self, stage: int) -> float:
        """Two reduction buckets in flight, and per micro-batch in flight the stage's output kept for its backward."""
        buckets = 2 * BUCKET_BYTES if self.setting.degrees.dp > 1 else 0
        return buckets + (self.blocks.border_bytes * (self._in_flight(stage) + 1) if self.pp > 1 else 0.0)

    def _stage_parameters(self, stage: int, counts: tuple[int, ...]) -> float:
        own = sum(sum(held.values()) for _, held in self._glue(stage))
        per_class = (sum(self.parameters[c].values()) for c in self.owner.class_ids)
        return own + sum(n * each for n, each in zip(counts, per_class, strict=True))

    def _tail(self, stage: int, counts: tuple[int, ...]) -> float:
        return sum(self._tail_parts(stage, counts))

    def _tail_parts(self, stage: int, counts: tuple[int, ...]) -> tuple[float, float, float]:
        """(exposed gradient reduction over dp, replicated parameters' reduction over tp, optimizer) in seconds."""
        local = self._stage_parameters(stage, counts)
        gradient_bytes = local * self.recipe.gradient_bytes
        reduce_s = self.dp_group.seconds("all_reduce", gradient_bytes)
        exposed = reduce_s
        if reduce_s and "dp_reduce" in self.owner.cluster.stack.overlap:
            prices = [self.blocks.layers[c] for c in self.owner.class_ids]
            backward_s = sum(n * (p.backward_s + p.backward_communication_s)
                             for n, p in zip(counts, prices, strict=True))  # fmt: skip
            last_bucket = reduce_s * min(1.0, BUCKET_BYTES / max(gradient_bytes, 1.0))
            exposed = max(reduce_s - backward_s, last_bucket)
        step_s = sum(n * self.blocks.layers[c].step_communication_s
                     for n, c in zip(counts, self.owner.class_ids, strict=True))  # fmt: skip
        step_s += sum(price.step_communication_s for price, _ in self._glue(stage))
        update_s = local * self.recipe.update_traffic_bytes / self.owner.prices.machine.bytes_per_s
        return exposed, step_s, update_s

    def _parameters(self, nodes: tuple[fx.Node, ...]) -> dict[str, float]:
        """Local elements of the parameters that `nodes` read, on one rank."""
        traced, tp = self.owner.prices.traced, self.setting.degrees.tp
        found = {}
        for node in dict.fromkeys(n for user in nodes for n in (*user.all_input_nodes, user)):
            spec = traced.parameters.get(str(node.target)) if node.op == "get_attr" else None
            if spec is not None:
                placed = self.blocks.layout.get(node)
                found[spec.name] = spec.numel / (tp if placed is not None and placed[1].is_shard else 1)
        return found

    def _stage(self, stage: int, price: StagePrice) -> _Stage:
        parts = dict.fromkeys(TIME_PARTS, 0.0)
        flops = 0.0
        pieces = [(self.blocks.layers[c], n, again) for c, n, again in
                  zip(self.owner.class_ids, price.counts, self._recomputed(price), strict=True)]  # fmt: skip
        pieces += [(glue, 1, 0) for glue, _ in self._glue(stage)]
        for p, n, again in pieces:
            parts["forward"] += n * p.forward_s
            parts["backward"] += n * p.backward_s
            parts["recompute"] += again * p.forward_s
            parts["tp_communication"] += n * (p.forward_communication_s + p.backward_communication_s)
            parts["tp_communication"] += again * p.forward_communication_s
            flops += n * (p.forward_flops + p.backward_flops) + again * p.forward_flops
        parts["pp_communication"] = self.send_s
        _, step_s, _ = self._tail_parts(stage, price.counts)
        return _Stage(parts, self._stage_parameters(stage, price.counts), step_s, flops)

    def _recomputed(self, price: StagePrice) -> tuple[int, ...]:
        return price.counts if self.owner.checkpoint == "full" else price.recomputed

    def _time(self, solution: PipelineSolution, stages: list[_Stage]) -> dict[str, float]:
        """Step time by part, read off the slowest stage; what the others make it wait is bubble."""
        m = self.setting.micro_batches
        slowest = max(range(self.pp), key=lambda s: solution.stages[s].time_s)
        latest = max(range(self.pp), key=lambda s: solution.stages[s].tail_s)
        parts = {name: m * seconds for name, seconds in stages[slowest].parts.items()}
        parts["bubble"] = sum(s.time_s for s in solution.stages) - solution.stages[slowest].time_s
        exposed, step_s, update_s = self._tail_parts(latest, solution.stages[latest].counts)
        parts["dp_communication"] += exposed
        parts["tp_communication"] += step_s
        parts["optimizer"] += update_s
        assert abs(sum(parts.values()) - solution.step_s) <= 1e-6 * solution.step_s, (parts, solution.step_s)
        return parts

    def _memory(self, stage: int, price: StagePrice) -> dict[str, int]:
        """Peak bytes by category, summing to what the pipeline ILP held against the limit plus what is reserved."""
        local = self._stage_parameters(stage, price.counts)
        layers = 0.0
        transient = max((p.working_bytes for p, _ in self._glue(stage)), default=0.0)
        in_glue = transient
        for c, n, again in zip(self.owner.class_ids, price.counts, self._recomputed(price), strict=True):
            p = self.blocks.layers[c]
            layers += (n - again) * p.saved_bytes + again * self.blocks.border_bytes
            if n > again:
                transient = max(transient, p.working_bytes)
            if again:
                transient = max(transient, p.saved_bytes + p.working_bytes)
        flight = self._in_flight(stage)
        prologue = self.blocks.prologue.saved_bytes if stage == 0 else 0.0
        epilogue = self.blocks.epilogue.saved_bytes if stage == self.pp - 1 else 0.0
        at_loss = transient == in_glue and epilogue > 0
        parts = {
            "parameters": local * self.recipe.parameter_bytes,
            "gradients": local * self.recipe.gradient_bytes,
            "optimizer": local * self.recipe.optimizer_bytes,
            "activations": flight * (layers + prologue) + (0.0 if at_loss else transient),
            "logits": flight * epilogue + (transient if at_loss else 0.0),
            "communication": self._communication_bytes(stage),
            "reserved": float(self.owner.cluster.device.reserved_bytes),
        }
        total = sum(parts.values())
        expected = price.memory_bytes + self.owner.cluster.device.reserved_bytes
        assert abs(total - expected) <= 1e-6 * expected + 8, (total, expected)
        return {name: round(value) for name, value in parts.items()} | {"total": round(total)}

    def _collectives(self, solution: PipelineSolution, stages: list[_Stage]) -> tuple[Mapping[str, object], ...]:
        """Collectives of the slowest stage's ranks in one step; bytes are those of the whole tensor."""
        slowest = max(range(self.pp), key=lambda s: solution.stages[s].time_s)
        price, m = solution.stages[slowest], self.setting.micro_batches
        tally: dict[tuple[str, str, int], int] = {}

        def count(kind: str, axis: str, whole_bytes: float, times: int) -> None:
            key = (kind, axis, round(whole_bytes))
            tally[key] = tally.get(key, 0) + times

        for c, n in zip(self.owner.class_ids, price.counts, strict=True):
            for kind, whole in self.blocks.layers[c].collectives:
                count(kind, "tp", whole, m * n)
        for glue, _ in self._glue(slowest):
            for kind, whole in glue.collectives:
                count(kind, "tp", whole, m)
        if self.pp > 1:
            sides = (slowest > 0) + (slowest < self.pp - 1)
            count("send", "pp", self.blocks.border_bytes, m * sides)
        if self.setting.degrees.dp > 1:
            count("all_reduce", "dp", stages[slowest].parameters * self.recipe.gradient_bytes, 1)
        return tuple({"kind": k, "axis": a, "bytes": b, "count": n} for (k, a, b), n in tally.items())


def _step_bound(setting: Setting, whole_s: float) -> float:
    """The slowest stage takes at least the mean."""
    return (setting.micro_batches - 1) * whole_s / setting.degrees.pp + whole_s


def _seconds(price: LayoutPrice) -> float:
    return price.forward_s + price.backward_s + price.forward_communication_s + price.backward_communication_s
