"""The search: every legal setting, best first by its bound, each priced by block ILPs and the pipeline ILP.

A setting whose lower bound is above the incumbent ends the search, so the plan is optimal over the whole space for the
closed-form step time. For the report it goes on until the five nearest other layouts are known as exactly.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost_model.candidates import Setting, check_pins, enumerate_settings, lower_bound
from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.compute import Machine
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.explain import reason_it_loses
from autopar.cost_model.memory import COMPUTE_DTYPES, recipe
from autopar.cost_model.model_checks import check_model, check_pinned_dims, pins_without_effect
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.plan_writer import checkpoint_patterns, layer_ranges, parameter_patterns, with_overrides
from autopar.cost_model.solver import SolverPolicy
from autopar.cost_model.strategy_table import strategy_table
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec

__all__ = ["Candidate", "SearchResult", "search"]

ALTERNATIVES = 5
BATCH_PER_DEVICE = 4
"""Sequences per device when the user states no global batch: enough to fill a short pipeline. Reported."""

_DTYPE_NAMES = {"bf16-mixed": "bf16"}


@dataclass(frozen=True)
class Candidate:
    """A setting that was not chosen. `step_time_s` is None if it does not fit; `bound_s` is its analytic lower bound.
    Candidates with cp > 1 are priced by their bound only and not executed yet."""

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
    executable: bool = True


@dataclass(frozen=True)
class SearchResult:
    """`alternatives`: the nearest other layouts (degrees and sequence sharding), fastest first; `not_executable`:
    cp > 1, by bound; `statistics`: counts and times of the search; `notices`: what was assumed."""

    plan: Plan
    alternatives: tuple[Candidate, ...]
    statistics: Mapping[str, Any]
    not_executable: tuple[Candidate, ...] = ()
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
    best = run.best_first()
    plan = run.plan(best)
    alternatives = run.alternatives(best)
    statistics = run.statistics(best, time.perf_counter() - started)
    kept = ("solver", "status", "bound_s", "gap", "candidates", "pruned")
    plan = plan.replace(solver={name: statistics[name] for name in kept})
    notices = (*run.notices, *run.prices.counts.notes, *pins_without_effect(run.pins, plan.degrees.tp, plan.degrees.pp))
    return SearchResult(plan, alternatives, statistics, run.not_executable(), notices)


class _Run:
    """One search: what it was given, what it has priced so far."""

    def __init__(
        self, traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins, spec: SearchSpec | None = None
    ) -> None:
        self.traced, self.cluster, self.train, self.pins = traced, cluster, train, pins
        self.spec = spec or SearchSpec()
        self.deadline_s = time.perf_counter() + (self.spec.time_limit_s or math.inf)
        self.open_bound_s = math.inf
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
        check_pins(pins, cluster.num_devices, self.global_batch, self.seq_len)
        machine = Machine.of(cluster.device, cluster.stack, self.dtype)
        policy = SolverPolicy(self.spec.solver, deadline_s=self.deadline_s)
        self.prices = ModelPrices(traced, machine, COMPUTE_DTYPES[self.precision], self.seq_len, pins.modules, policy)
        layers, legal = len(traced.layers), self.prices.tp_is_legal
        self.settings = enumerate_settings(
            cluster.num_devices, self.global_batch, self.seq_len, layers, pins, legal, self.prices.heads()
        )
        sizes = sorted({s.micro_batch for s in self.settings})
        single = {b: self.prices.single_rank_seconds(b) for b in sizes}
        self.bounds = {s: lower_bound(s, *single[s.micro_batch]) for s in self.settings}
        held = recipe(self.precision, train.optimizer, cluster.stack.gradient_dtype)
        self.evaluator = Evaluator(self.prices, cluster, held, self.settings, pins.checkpoint)
        self.done: list[Evaluation] = []

    def _default_batch(self) -> int:
        batch = BATCH_PER_DEVICE * self.cluster.num_devices
        self.notices.append(f"no global batch was stated: {batch} sequences, {BATCH_PER_DEVICE} a device, were taken")
        return batch

    def best_first(self) -> Evaluation:
        """Evaluate settings in order of their bounds until none left can beat the fifth alternative."""
        queue = [(self.bounds[s], s.order, "analytic", s) for s in self.settings
                 if s.degrees.cp == 1 and not self.evaluator.surely_too_big(s)]  # fmt: skip
        heapq.heapify(queue)
        while queue:
            bound, order, kind, setting = heapq.heappop(queue)
            if bound > self._cutoff():
                break
            if time.perf_counter() > self.deadline_s and self._best_of_each_layout():
                self.open_bound_s = bound
                self.notices.append(f"the time limit of {self.spec.time_limit_s:g} s ended the search")
                break
            if kind == "exact prices":
                self.done.append(self.evaluator.evaluate(setting))
                continue
            sharper, kind = self.evaluator.rough_bound(setting, bound), "in proportion"
            if sharper <= bound:
                sharper, kind = self.evaluator.bound(setting), "exact prices"
            heapq.heappush(queue, (max(bound, sharper), order, kind, setting))
        feasible = [e for e in self.done if e.pipeline is not None]
        if not feasible:
            raise self._infeasible()
        return min(feasible, key=_rank)

    def _cutoff(self) -> float:
        times = sorted(e.step_s for e in self._best_of_each_layout())
        return times[ALTERNATIVES] if len(times) > ALTERNATIVES else float("inf")

    def _best_of_each_layout(self) -> list[Evaluation]:
        layouts: dict[tuple[Degrees, bool], Evaluation] = {}
        for e in self.done:
            key = (e.setting.degrees, e.setting.sequence_sharding)
            if e.pipeline is not None and (key not in layouts or _rank(e) < _rank(layouts[key])):
                layouts[key] = e
        return list(layouts.values())

    def _infeasible(self) -> InfeasiblePlanError:
        device = self.cluster.device
        tried = {e.setting for e in self.done}
        frugal: dict[tuple[Degrees, bool], Setting] = {}  # memory grows with the micro-batch
        for s in sorted((s for s in self.settings if s.degrees.cp == 1), key=lambda s: s.micro_batch):
            frugal.setdefault((s.degrees, s.sequence_sharding), s)
        self.done += [self.evaluator.evaluate(s) for s in frugal.values() if s not in tried]
        nearest = min(self.done, key=lambda e: (e.needed_bytes, e.setting.order))
        missing = nearest.needed_bytes - device.memory_bytes
        d = nearest.setting.degrees
        names = ("dp", "tp", "pp", "sp", "microbatch", "schedule", "checkpoint")
        pinned = [f"{name}={getattr(self.pins, name)}" for name in names if getattr(self.pins, name) is not None]
        return InfeasiblePlanError(
            f"no plan fits in {device.memory_bytes / 2**30:.1f} GiB a device: even the most frugal (dp={d.dp} "
            f"tp={d.tp} pp={d.pp}, micro-batch {nearest.setting.micro_batch}) lacks {missing:.0f} bytes "
            f"({missing / 2**30:.2f} GiB) on stage {nearest.binding_stage}"
            + (f" under the pins {', '.join(pinned)}" if pinned else ""),
            where="memory",
            try_=f"devices of at least {nearest.needed_bytes / 2**30:.1f} GiB, more devices, "
            + ("or fewer pins" if pinned else "or a shorter sequence"),
        )

    def plan(self, best: Evaluation) -> Plan:
        assert best.pipeline is not None
        setting, traced = best.setting, self.traced
        group = group_cost(self.cluster, setting.degrees, "tp")
        layout = self.prices.at(setting.degrees.tp, setting.sequence_sharding, setting.micro_batch, group).layout
        plan = Plan(
            degrees=setting.degrees,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            micro_batch=setting.micro_batch,
            stages=tuple(layer_ranges(s.path for s in traced.layers[i:j]) for i, j in best.pipeline.runs),
            schedule=setting.schedule,
            sequence_sharding=setting.sequence_sharding,
            parameters=parameter_patterns(traced, layout) if setting.degrees.tp > 1 else {},
            checkpoint=checkpoint_patterns(traced, best, self.evaluator.class_ids, self.pins.checkpoint == "full"),
            precision=self.precision,
            overlap=("dp_reduce",) if "dp_reduce" in self.cluster.stack.overlap and setting.degrees.dp > 1 else (),
            prediction=self._prediction(best),
            fingerprints={"model": traced.fingerprint, "cluster": self.cluster.fingerprint,
                          "train": self.train.fingerprint},
        )  # fmt: skip
        if setting.degrees.tp == 1:
            return plan
        return with_overrides(traced, plan, layout, strategy_table(traced, setting.degrees.tp, self.seq_len))

    def _prediction(self, best: Evaluation) -> dict[str, Any]:
        setting, devices = best.setting, self.cluster.num_devices
        useful = 3 * self._useful_forward_flops(setting) * self.global_batch / setting.micro_batch
        peak = self.cluster.device.flops[self.dtype]
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
        repeats = self.prices.repeats()
        total = 0.0
        for block in (*self.prices.blocks.values(), self.prices.glue):
            sizes = self.prices.measures(block.name, setting.micro_batch).sizes.values()
            total += repeats.get(block.name, 1) * sum(op.useful_flops for op in sizes)
        return total

    def alternatives(self, best: Evaluation) -> tuple[Candidate, ...]:
        """The nearest other layouts, and settings that would have been faster had they fitted."""
        same = (best.setting.degrees, best.setting.sequence_sharding)
        rest = [e for e in self._best_of_each_layout() if (e.setting.degrees, e.setting.sequence_sharding) != same]
        rest.sort(key=_rank)
        return tuple(self._candidate(e, best) for e in rest[:ALTERNATIVES])

    def _candidate(self, e: Evaluation, best: Evaluation) -> Candidate:
        s = e.setting
        peak = max((stage["total"] for stage in e.memory), default=None)
        reason = reason_it_loses(e, best, self.cluster.device.memory_bytes)
        return Candidate(s.degrees, s.sequence_sharding, s.micro_batch, s.schedule, self._checkpoint_text(e),
                         e.step_s if e.pipeline else None, self.bounds[s], e.time_s, peak, reason)  # fmt: skip

    def _checkpoint_text(self, e: Evaluation) -> str:
        layers = len(self.traced.layers)
        if e.pipeline is None or self.pins.checkpoint == "full":
            return "full"
        again = e.pipeline.recomputed_layers
        return {0: "none", layers: "full"}.get(again, f"{again} of {layers} full")

    def not_executable(self) -> tuple[Candidate, ...]:
        """Per degrees with cp > 1, the setting of the least bound."""
        least: dict[Degrees, Setting] = {}
        for s in sorted((s for s in self.settings if s.degrees.cp > 1), key=lambda s: (self.bounds[s], s.order)):
            least.setdefault(s.degrees, s)
        return tuple(
            Candidate(s.degrees, s.sequence_sharding, s.micro_batch, s.schedule, "none", None, self.bounds[s], {}, None,
                      f"cp={s.degrees.cp} is priced (bound {self.bounds[s]:.3g} s) but not executed yet", False)
            for s in list(least.values())[:ALTERNATIVES]
        )  # fmt: skip

    def statistics(self, best: Evaluation, search_s: float) -> dict[str, Any]:
        counts = self.prices.counts
        assert best.pipeline is not None
        executable = sum(s.degrees.cp == 1 for s in self.settings)
        bound = min([best.step_s, self.open_bound_s, *(e.pipeline.bound_s for e in self.done if e.pipeline)])
        bound /= 1 + counts.block_gap
        return {
            "solver": ", ".join(counts.solvers) or "none needed",
            "status": "optimal" if best.step_s <= bound * (1 + 1e-6) else "incumbent",
            "variables": counts.variables,
            "constraints": counts.constraints,
            "largest_ilp_variables": counts.largest_variables,
            "ilps": counts.solves,
            "candidates": executable,
            "not_executable": len(self.settings) - executable,
            "solved": len(self.done),
            "pruned": executable - len(self.done),
            "too_big": sum(e.pipeline is None for e in self.done),
            "search_s": search_s,
            "ilp_s": counts.solve_s,
            "bound_s": bound,
            "gap": max(0.0, best.step_s / bound - 1),
        }


def _rank(e: Evaluation) -> tuple[Any, ...]:
    """Faster first; equal to nine digits goes to fewer axes (see `Setting.order`)."""
    return (float(f"{e.step_s:.9e}"), e.setting.order)
