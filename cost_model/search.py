"""The search: every legal setting, best first by its bound, each priced by block ILPs and the pipeline problem.

See `branch_and_bound` for the order and the proof, `candidates` for the space.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost_model.branch_and_bound import BranchAndBound
from autopar.cost_model.candidates import (
    ModelLimits,
    Partition,
    Setting,
    count_settings,
    enumerate_partitions,
    settings_of,
)
from autopar.cost_model.compute import Machine
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.explain import reason_it_loses
from autopar.cost_model.memory import COMPUTE_DTYPES, recipe
from autopar.cost_model.model_checks import check_model, check_pinned_dims, pins_without_effect
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.plan_writer import write_plan
from autopar.cost_model.solver import SolverPolicy
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec

__all__ = ["Candidate", "SearchResult", "search"]

BATCH_PER_DEVICE = 4
"""Sequences per device when the user states no global batch: enough to fill a short pipeline. Reported."""

_FRUGAL = 12
"""Settings whose need of memory is worked out when none fits: those whose states take least."""

_DTYPE_NAMES = {"bf16-mixed": "bf16"}


@dataclass(frozen=True)
class Candidate:
    """A layout that was not chosen, in its best setting. `bound_s` is its analytic lower bound."""

    degrees: Degrees
    sp: bool
    micro_batch: int
    schedule: str
    checkpoint: str
    step_time_s: float | None
    bound_s: float
    time_s: Mapping[str, float]
    peak_memory_bytes: int | None
    reason: str
    virtual_stages: int = 1
    zero: int = 0
    zero_group: int = 0
    context_parallel: str = "ring"


@dataclass(frozen=True)
class SearchResult:
    """`alternatives`: the nearest other layouts (degrees and sequence sharding), fastest first; `statistics`: counts
    and times of the search; `notices`: what was assumed."""

    plan: Plan
    alternatives: tuple[Candidate, ...]
    statistics: Mapping[str, Any]
    notices: tuple[str, ...] = ()


def search(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins | None = None,
    spec: SearchSpec | None = None,
) -> SearchResult:  # fmt: skip
    """The fastest plan of `traced` on `cluster` that fits in memory and respects the pins.

    A time limit in `spec` ends the search once it has a plan; how far that can be from the best is `statistics["gap"]`.

    Raises SpecError (a pin or specification that cannot be) or InfeasiblePlanError (no plan fits; says what binds).
    """
    started = time.perf_counter()
    run = _Run(traced, cluster, train, pins or Pins(), spec or SearchSpec())
    best = run.best()
    plan = write_plan(traced, best, run.evaluator.price(best.setting), run.stated())
    alternatives = tuple(run.candidate(e, best) for e in run.space.alternatives(best))
    statistics = run.statistics(best, time.perf_counter() - started)
    kept = ("solver", "status", "bound_s", "gap", "candidates", "pruned")
    plan = plan.replace(solver={name: statistics[name] for name in kept}, prediction=run.prediction(best))
    notices = (*run.notices, *run.prices.counts.notes, *pins_without_effect(run.pins, plan.degrees.tp, plan.degrees.pp))
    return SearchResult(plan, alternatives, statistics, notices)


class _Run:
    """One search: what it was given, what it has priced so far."""

    def __init__(
        self, traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins, spec: SearchSpec | None = None
    ) -> None:
        self.traced, self.cluster, self.train, self.pins = traced, cluster, train, pins
        self.spec = spec or SearchSpec()
        self.deadline_s = time.perf_counter() + (self.spec.time_limit_s or math.inf)
        self.notices: list[str] = []
        if train.seq_len is None:
            raise SpecError("seq_len is not stated", where="train", try_="seq_len=2048")
        check_model(traced, train.seq_len)
        check_pinned_dims(traced, pins)
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
        self.prices = ModelPrices(traced, machine, COMPUTE_DTYPES[self.precision], self.seq_len, pins.modules, policy)
        self.limits = ModelLimits(
            len(traced.layers), self.prices.tp_is_legal, self.prices.exchanges, len(self.prices.classes) == 1,
            self._splits_backward(), self.prices.heads(), tuple(link.span for link in cluster.links),
        )  # fmt: skip
        self.partitions = enumerate_partitions(cluster.num_devices, self.global_batch, self.seq_len, self.limits, pins)
        # Under mixed precision the runtime adds 16-bit gradients to fp32 ones of the masters (runtime/precision.py).
        gradients = "fp32" if self.precision == "bf16-mixed" else cluster.stack.gradient_dtype
        held = recipe(self.precision, train.optimizer, gradients)
        self.evaluator = Evaluator(self.prices, cluster, held, self.partitions, pins, self.limits.splits_backward)
        fit = [p for p in self.partitions if not self.evaluator.surely_too_big(p)]
        self.bounds = {p: self.evaluator.analytic_bound_s(p) for p in fit}
        self.space = BranchAndBound(self.evaluator, self.bounds, self._settings, self.deadline_s)

    def _default_batch(self) -> int:
        batch = BATCH_PER_DEVICE * self.cluster.num_devices
        self.notices.append(f"no global batch was stated: {batch} sequences, {BATCH_PER_DEVICE} a device, were taken")
        return batch

    def _splits_backward(self) -> bool:
        """Zero-bubble adds up gradients in the parameters' dtype and needs gradients in every stage."""
        sizes: Counter[str] = Counter()
        for spec in self.traced.parameters.values():
            sizes[str(spec.dtype).removeprefix("torch.")] += spec.numel
        own = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        most = sizes.most_common(1)[0][0]
        return own.get(most) == self.precision and all(s.requires_grad for s in self.traced.parameters.values())

    def _settings(self, partition: Partition) -> list[Setting]:
        return settings_of(partition, self.limits, self.pins)

    def best(self) -> Evaluation:
        found = self.space.run()
        if found is None:
            raise self._infeasible()
        if self.space.timed_out:
            self.notices.append(f"the time limit of {self.spec.time_limit_s:g} s ended the search")
        return found

    def _infeasible(self) -> InfeasiblePlanError:
        """Names the most frugal setting, its stage, and the bytes that are missing."""
        device = self.cluster.device
        frugal: dict[Degrees, Setting] = {}  # memory grows with the micro-batch, falls with every level of sharding
        for partition in sorted(self.partitions, key=lambda p: (p.micro_batch, not p.sequence_sharding)):
            if partition.degrees not in frugal:
                frugal[partition.degrees] = max(
                    self._settings(partition), key=lambda s: (s.zero, s.zero_shard, -s.virtual_stages)
                )
        near = sorted(frugal.values(), key=lambda s: self.evaluator.least_bytes(s))
        found = [self.evaluator.lacking(s) for s in near[:_FRUGAL]]
        nearest = min(found, key=lambda e: (e.needed_bytes, e.setting.order))
        missing, s = nearest.needed_bytes - device.memory_bytes, nearest.setting
        d = s.degrees
        pinned = [text for text in self.pins.texts() if "." not in text]
        return InfeasiblePlanError(
            f"no plan fits in {device.memory_bytes / 2**30:.1f} GiB a device: even the most frugal (dp={d.dp} "
            f"tp={d.tp} pp={d.pp}{f' cp={d.cp}' if d.cp > 1 else ''}, micro-batch {s.micro_batch}, zero {s.zero}) "
            f"lacks {missing:.0f} bytes ({missing / 2**30:.2f} GiB) on stage {nearest.binding_stage}"
            + (f" under the pins {', '.join(pinned)}" if pinned else ""),
            where="memory",
            try_=f"devices of at least {nearest.needed_bytes / 2**30:.1f} GiB, more devices, "
            + ("or fewer pins" if pinned else "or a shorter sequence"),
        )

    def stated(self) -> dict[str, Any]:
        """What a plan says besides the choice."""
        prints = {
            "model": self.traced.fingerprint,
            "cluster": self.cluster.fingerprint,
            "train": self.train.fingerprint,
        }
        return {"seq_len": self.seq_len, "global_batch": self.global_batch, "precision": self.precision,
                "fingerprints": prints}  # fmt: skip

    def prediction(self, best: Evaluation) -> dict[str, Any]:
        useful = 3 * self._useful_forward_flops(best.setting) * self.global_batch / best.setting.micro_batch
        devices, peak = self.cluster.num_devices, self.cluster.device.flops[self.dtype]
        return {
            "step_time_s": best.step_s,
            "tokens_per_s_per_device": self.global_batch * self.seq_len / best.step_s / devices,
            "mfu": useful / (best.step_s * devices * peak),
            "model_flops": useful,
            "executed_flops": best.executed_flops,
            "time_s": dict(best.time_s),
            "peak_memory_bytes": [dict(stage) for stage in best.memory],
            "collectives": [dict(c) for c in best.collectives],
        }

    def _useful_forward_flops(self, setting: Setting) -> float:
        """Model flops of one micro-batch's forward over the whole model (a backward counts twice it)."""
        repeats = self.prices.repeats
        total = 0.0
        for block in (*self.prices.blocks.values(), self.prices.glue):
            sizes = self.prices.measures(block.name, setting.micro_batch).sizes.values()
            total += repeats.get(block.name, 1) * sum(op.useful_flops for op in sizes)
        return total

    def candidate(self, e: Evaluation, best: Evaluation) -> Candidate:
        s = e.setting
        peak = max((stage["total"] for stage in e.memory), default=None)
        reason = reason_it_loses(e, best)
        return Candidate(s.degrees, s.sequence_sharding, s.micro_batch, s.schedule, self._checkpoint_text(e), e.step_s,
                         self.bounds[s.partition], e.time_s, peak, reason, s.virtual_stages, s.zero, s.zero_group,
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

    def statistics(self, best: Evaluation, search_s: float) -> dict[str, Any]:
        ilps, counts = self.prices.counts, self.space.counts
        bound = min(best.bound_s, self.space.proven_s) / (1 + ilps.block_gap)
        total = sum(count_settings(p, self.limits, self.pins) for p in self.partitions)
        return {
            "solver": ", ".join(ilps.solvers) or "none needed",
            "status": "optimal" if best.step_s <= bound * (1 + 1e-6) else "incumbent",
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
            "search_s": search_s,
            "ilp_s": ilps.solve_s,
            "bound_s": bound,
            "gap": max(0.0, best.step_s / bound - 1),
        }
