"""The search: every legal setting, best first by its bound, each priced by block ILPs and the pipeline problem.

See `branch_and_bound` for the order and the proof, `candidates` for the space.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from autopar.cost_model.branch_and_bound import BranchAndBound
from autopar.cost_model.candidates import (
    ModelLimits,
    Partition,
    Setting,
    SettingGroup,
    count_settings,
    enumerate_partitions,
    groups_of,
    settings_of,
)
from autopar.cost_model.compute import Machine
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.explain import across_slow_link, reason_it_loses
from autopar.cost_model.infeasible import Shortage, explain_shortage
from autopar.cost_model.kept_plan import check_kept, kept_as_it_is, kept_or_best, setting_of_plan
from autopar.cost_model.largest_tensors import largest_kept
from autopar.cost_model.least_memory import least_memory
from autopar.cost_model.memory import COMPUTE_DTYPES, recipe
from autopar.cost_model.model_checks import (
    check_model,
    check_pinned_dims,
    is_one_chain,
    pins_without_effect,
    shares_inside,
)
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.pinned_layers import pinned_parameters, set_apart
from autopar.cost_model.plan_writer import write_plan
from autopar.cost_model.priced_plan import laid_out
from autopar.cost_model.search_result import OF_PLAN, PROVEN, Candidate, SearchResult
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.solver import SolverPolicy
from autopar.errors import InfeasiblePlanError, PlanMismatchError, SpecError
from autopar.ir import TracedModel
from autopar.plan import Plan
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, DeviceSpec, Pins, TrainSpec

__all__ = ["Run", "least_evaluation", "search"]

BATCH_PER_DEVICE = 4
"""Sequences per device when the user states no global batch: enough to fill a short pipeline. Reported."""

_DTYPE_NAMES = {"bf16-mixed": "bf16"}


def search(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins | None = None,
    spec: SearchSpec | None = None, memory_bytes: float | None = None,
) -> SearchResult:  # fmt: skip
    """The fastest plan of `traced` on `cluster` that fits in memory and respects the pins.

    `memory_bytes` is the most a device may hold, if that is less than it has; `objectives.search_for` follows the other
    objectives of `spec`. A time limit ends the search once it has a plan; how far that can be from the best
    is `statistics["gap"]`.

    Raises SpecError (a pin or specification that cannot be) or InfeasiblePlanError (no plan fits; says what binds).
    """
    return Run(traced, cluster, train, pins or Pins(), spec or SearchSpec(), memory_bytes).result()


def least_evaluation(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins | None, spec: SearchSpec
) -> tuple[Evaluation, float]:
    """The setting that needs least device memory (`needed_bytes`), whether devices have it or not, and the bytes that
    none needs less than: as much, unless the time limit came first."""
    return Run(traced, cluster, train, pins or Pins(), spec).least()


class Run:
    """One search: what it was given, what it has priced so far. `prices` are of another run with the same arguments."""

    def __init__(
        self, traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins, spec: SearchSpec | None = None,
        memory_bytes: float | None = None, prices: ModelPrices | None = None,
    ) -> None:  # fmt: skip
        self.started = time.perf_counter()
        self.cluster, self.train, self.pins = cluster, train, pins
        self.spec = spec or SearchSpec()
        self.deadline_s = self.spec.deadline_s
        self.notices: list[str] = []
        if train.seq_len is None:
            raise SpecError("seq_len is not stated", where="train", try_="seq_len=2048")
        check_model(traced, train.seq_len)
        check_pinned_dims(traced, pins)
        self.traced = traced = set_apart(traced, pins.modules)
        if self.spec.keep is not None:
            check_kept(self.spec.keep, traced)
        self.seq_len = train.seq_len
        self.global_batch = train.global_batch or self._default_batch()
        self.precision = train.precision or ("fp32" if cluster.device.kind == "cpu" else "bf16-mixed")
        self.dtype = _DTYPE_NAMES.get(self.precision, self.precision)
        if self.dtype not in cluster.device.flops:
            raise SpecError(f"{cluster.device.name} has no {self.dtype} rate", where="train: precision",
                            try_=f"one of {', '.join(cluster.device.flops)}")  # fmt: skip
        pins.check(cluster, TrainSpec(global_batch=self.global_batch, seq_len=self.seq_len))
        machine = Machine.of(cluster.device, cluster.stack, self.dtype)
        policy = SolverPolicy(self.spec.solver, deadline_s=self.deadline_s)
        activation = COMPUTE_DTYPES[self.precision]
        if prices is None:
            prices = ModelPrices(traced, machine, activation, self.seq_len, pins.modules)
        self.prices = prices.under(policy)
        self.limits = ModelLimits(
            len(traced.layers), self.prices.tp_is_legal, self.prices.exchanges, len(self.prices.classes) == 1,
            self._splits_backward(), shares_inside(traced), self.prices.heads(),
            tuple(link.span for link in cluster.links),
        )  # fmt: skip
        self.partitions = enumerate_partitions(cluster.num_devices, self.global_batch, self.seq_len, self.limits, pins)
        self.memory_bytes = _memory_limit(cluster.device, self.spec.memory_headroom, memory_bytes)
        # Under mixed precision the runtime adds 16-bit gradients to fp32 ones of the masters (runtime/precision.py).
        gradients = "fp32" if self.precision == "bf16-mixed" else cluster.stack.gradient_dtype
        self.held = recipe(self.precision, train.optimizer, gradients)
        self.evaluator = self.chosen_in = self._evaluator(self.memory_bytes)
        bounds = {p: self.evaluator.analytic_bound_s(p) for p in self.partitions}
        self.bounds = {p: bound_s for p, bound_s in bounds.items() if bound_s < math.inf}
        self.space = BranchAndBound(self.evaluator, self.bounds, self.groups, self.deadline_s)

    def _default_batch(self) -> int:
        batch = BATCH_PER_DEVICE * self.cluster.num_devices
        self.notices.append(f"no global batch was stated: {batch} sequences, {BATCH_PER_DEVICE} a device, were taken")
        return batch

    def _splits_backward(self) -> bool:
        """Zero-bubble adds up gradients in the parameters' dtype, needs gradients in every stage, and that weights meet
        what a stage receives before one another (runtime/limits.py)."""
        sizes: Counter[str] = Counter()
        for spec in self.traced.parameters.values():
            sizes[str(spec.dtype).removeprefix("torch.")] += spec.numel
        own = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        most = sizes.most_common(1)[0][0]
        trained = all(s.requires_grad for s in self.traced.parameters.values())
        return own.get(most) == self.precision and trained and is_one_chain(self.traced)

    def groups(self, partition: Partition) -> list[SettingGroup]:
        return groups_of(partition, self.limits, self.pins)

    def settings(self, partition: Partition) -> list[Setting]:
        return settings_of(partition, self.limits, self.pins)

    def result(self) -> SearchResult:
        """Raises InfeasiblePlanError."""
        fastest = self.best()
        best = self.kept_or(fastest)
        plan = self.plan_of(best, self.chosen_in.price(best.setting))
        alternatives = tuple(self.candidate(e, best) for e in self.space.alternatives(best))
        statistics = self.statistics(best, fastest)
        plan = plan.replace(solver={name: statistics[name] for name in OF_PLAN}, prediction=self.prediction(best))
        slow_link = across_slow_link(self.cluster, self.space.best_of_layout.values(), self.space.proven_s)
        without_effect = pins_without_effect(self.pins, plan)
        notices = (*self.notices, *self.prices.counts.notes, *without_effect, *([slow_link] if slow_link else ()))
        return SearchResult(plan, alternatives, statistics, notices)

    def best(self) -> Evaluation:
        found = self.space.run()
        if found is None:
            raise self._infeasible()
        if self.space.timed_out:
            self.notices.append("the time limit ended the search")
        return found

    def kept_or(self, best: Evaluation) -> Evaluation:
        """The choices of the plan that is in use, if they are about as fast; else `best`."""
        plan = self.spec.keep
        if plan is None:
            return best
        setting = setting_of_plan(plan, self.partitions, self.settings)
        found = None if setting is None else self._kept_as_it_is(plan, setting, best)
        kept, notice = found or kept_or_best(best, plan, setting, self.evaluator, self.spec.keep_within)
        self.notices.append(notice)
        return kept

    def _kept_as_it_is(self, plan: Plan, setting: Setting, best: Evaluation) -> tuple[Evaluation, str] | None:
        try:
            own = self._evaluator(self.memory_bytes, laid_out(self.prices, self.traced, plan))
        except PlanMismatchError:
            return None
        if plan.degrees.tp > 1 and any(
            plan.parameter_placement(str(node.target)) != str(placement)
            for node, placement in pinned_parameters(self.traced, self.pins.modules).items()
        ):
            return None
        found = kept_as_it_is(best, plan, setting, own, lambda e: self.plan_of(e, own.price(setting)),
                              self.spec.keep_within)  # fmt: skip
        self.chosen_in = self.evaluator if found is None else own
        return found

    def _evaluator(self, memory_bytes: float, prices: ModelPrices | None = None) -> Evaluator:
        device = replace(self.cluster.device, memory_bytes=math.floor(memory_bytes))
        return Evaluator(prices or self.prices, replace(self.cluster, device=device), self.held, self.partitions,
                         self.pins, self.limits.splits_backward)  # fmt: skip

    def least(self, enough_bytes: float | None = None) -> tuple[Evaluation, float]:
        """The setting that needs least memory, or one for which `enough_bytes` are, and what none needs less than."""
        return least_memory(self.evaluator, self.partitions, self.settings, self.deadline_s, enough_bytes)

    def _infeasible(self) -> InfeasiblePlanError:
        least, proven_bytes = self.least()
        roomy = self._evaluator(math.ceil(least.needed_bytes) + 1)
        found = roomy.detailed(roomy.evaluate(least.setting))
        shortage = Shortage(
            least,
            found.memory[least.binding_stage],
            self._checkpoint_text(found),
            found.step_s,
            proven_bytes,
            self.spec.memory_headroom,
            self.deadline_s,
        )
        nearest = self.plan_of(found, roomy.price(found.setting))
        train = replace(self.train, global_batch=self.global_batch)

        def least_of(cluster: ClusterSpec, pins: Pins, enough_bytes: float | None) -> Evaluation:
            run = Run(self.traced, cluster, train, pins, self.spec.share_of(self.deadline_s, 1))
            return run.least(enough_bytes)[0]

        nearest = nearest.replace(prediction=self.prediction(found))
        return explain_shortage(shortage, self.cluster, self.pins, self.memory_bytes, least_of, nearest)

    def plan_of(self, found: Evaluation, price: SettingPrice) -> Plan:
        """The choice written down, without its prediction."""
        return write_plan(self.traced, found, price, self._stated())

    def _stated(self) -> dict[str, Any]:
        """What a plan says besides the choice."""
        prints = {
            "model": self.traced.fingerprint,
            "cluster": self.cluster.fingerprint,
            "train": self.train.fingerprint,
        }
        return {"seq_len": self.seq_len, "global_batch": self.global_batch, "precision": self.precision,
                "fingerprints": prints}  # fmt: skip

    def prediction(self, best: Evaluation) -> dict[str, Any]:
        useful = self.model_flops(best.setting.partition)
        devices, peak = self.cluster.num_devices, self.cluster.device.flops[self.dtype]
        tokens, price = self.global_batch * self.seq_len, self.cluster.device.price_per_hour
        cost = {} if price is None else {"cost_per_million_tokens": 1e6 * best.step_s * devices * price / 3600 / tokens}
        return {
            **cost,
            "step_time_s": best.step_s,
            "tokens_per_s_per_device": self.global_batch * self.seq_len / best.step_s / devices,
            "mfu": useful / (best.step_s * devices * peak),
            "model_flops": useful,
            "executed_flops": best.executed_flops,
            "time_s": dict(best.time_s),
            "peak_memory_bytes": [dict(stage) for stage in best.memory],
            "slowest_stage": best.slowest_stage,
            **_busy(best),
            "largest_activations": largest_kept(self.prices, self.chosen_in.price(best.setting)),
        }

    def model_flops(self, partition: Partition) -> float:
        """Of a step, over the whole model; a backward counts twice the forward."""
        repeats = self.prices.repeats
        total = 0.0
        for block in (*self.prices.blocks.values(), self.prices.glue):
            sizes = self.prices.measures(block.name, partition.micro_batch).sizes.values()
            total += repeats.get(block.name, 1) * sum(op.useful_flops for op in sizes)
        return 3 * total * self.global_batch / partition.micro_batch

    def candidate(self, e: Evaluation, best: Evaluation) -> Candidate:
        s = e.setting
        peak = max((stage["total"] for stage in e.memory), default=None)
        reason, bound_s = reason_it_loses(e, best), self.bounds.get(s.partition, 0.0)
        return Candidate(s.degrees, s.sequence_sharding, s.micro_batch, s.schedule, self._checkpoint_text(e), e.step_s,
                         bound_s, e.time_s, peak, reason, s.virtual_stages, s.zero, s.zero_group,
                         s.exchange)  # fmt: skip

    def _checkpoint_text(self, e: Evaluation) -> str:
        """The mode of all layers, or how many run in which."""
        assert e.pipeline is not None
        price, layers = self.evaluator.price(e.setting), len(self.traced.layers)
        counts = {mode: price.recomputed_layers(e.pipeline, mode) for mode in ("selective", "selective-ops", "full")}
        used = {mode: n for mode, n in counts.items() if n}
        if not used:
            return "none"
        texts = [mode if n == layers else f"{n} of {layers} {mode}" for mode, n in used.items()]
        return ", ".join(texts) + (f" by {e.pipeline.segment}" if e.pipeline.segment > 1 and counts["full"] else "")

    def statistics(self, best: Evaluation, fastest: Evaluation) -> dict[str, Any]:
        """`best` is what is chosen, `fastest` what was found."""
        ilps, counts, incumbent = self.prices.counts, self.space.counts, "incumbent" if best is fastest else "kept"
        bound = min(fastest.bound_s, self.space.proven_s) / (1 + ilps.block_gap)
        total = count_settings(self.partitions, self.limits, self.pins)
        return {
            "solver": ", ".join(ilps.solvers) or "none needed",
            "status": "optimal" if best.step_s <= bound * (1 + PROVEN) else incumbent,
            "variables": ilps.variables,
            "constraints": ilps.constraints,
            "largest_ilp_variables": ilps.largest_variables,
            "ilps": ilps.solves,
            "partitions": len(self.partitions),
            "candidates": total,
            "expanded": counts.expanded,
            "bounded": counts.bounded,
            "solved": counts.solved,
            "pruned": total - counts.solved,
            "too_big": counts.too_big,
            "search_s": time.perf_counter() - self.started,
            "ilp_s": ilps.solve_s,
            "bound_s": bound,
            "gap": max(0.0, best.step_s / bound - 1),
        }


def _busy(best: Evaluation) -> dict[str, list[float]]:
    """The part of the step that the devices of each pipeline stage compute or send."""
    s = best.setting
    if best.pipeline is None or s.degrees.pp == 1:
        return {}
    busy = [s.micro_batches * stage.time_s / best.step_s for stage in best.pipeline.stages]
    return {"stage_busy": busy * s.virtual_stages}


def _memory_limit(device: DeviceSpec, headroom: float, memory_bytes: float | None) -> float:
    """The most a device may hold. Raises SpecError if nothing is left after what is reserved."""
    limit = min((1 - headroom) * device.memory_bytes, math.inf if memory_bytes is None else memory_bytes)
    if limit <= device.reserved_bytes:
        raise SpecError(
            f"{limit / 2**30:.2f} GiB a device are left, {device.reserved_bytes / 2**30:.2f} GiB are reserved",
            where="search.memory_headroom",
            try_=f"a fraction below {math.floor(100 * (1 - device.reserved_bytes / device.memory_bytes)) / 100:g}",
        )  # fmt: skip
    return limit
