"""Search on a cluster of unequal groups: stages on groups, sized to their speed, or all devices as equals.

A setting whose stages each lie inside one group is priced stage by stage (`mixed_stages`), for every order of the
groups along the pipeline; tp, cp and dp then never leave a group. Every other setting spans the slow link with some
axis and is found by the ordinary search on the slowest of everything. The faster of the two is the plan, and both are
stated.

Both are searched by `branch_and_bound`, the former with the prices and bounds of `mixed_evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.cost_model.branch_and_bound import BranchAndBound
from autopar.cost_model.compute import Machine
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.mixed_evaluate import MixedEvaluator, group_orders
from autopar.cost_model.mixed_infeasible import Fitting, explain_groups
from autopar.cost_model.mixed_stages import MixedPrice
from autopar.cost_model.model_checks import pins_without_effect
from autopar.cost_model.search import Run
from autopar.cost_model.search_result import SearchResult
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.ir import TracedModel
from autopar.mixed_cluster import as_slowest, group_view, rank_ranges, reordered
from autopar.plan import Plan
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec

__all__ = ["MixedRun", "search_groups"]


def search_groups(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins, spec: SearchSpec
) -> SearchResult:
    """Raises as `search`."""
    deadline_s = spec.deadline_s
    equal: SearchResult | None = None
    refused: InfeasiblePlanError | None = None
    run = Run(traced, as_slowest(cluster), train, pins, spec.share_of(deadline_s, 2))
    try:
        equal = run.result()
    except InfeasiblePlanError as error:
        refused = error
    stages = MixedRun(run, cluster, spec.share_of(deadline_s, 1))
    mixed = stages.result()
    if mixed is None and equal is None:
        assert refused is not None

        def first_fit(changed: ClusterSpec, freed: Pins) -> Fitting | None:
            prices = run.prices if freed.modules == pins.modules else None
            try:
                own = run if freed == pins else Run(traced, run.cluster, train, freed, spec, prices=prices)
                return MixedRun(own, changed, spec).first_fit()
            except (InfeasiblePlanError, SpecError):
                return None

        raise explain_groups(refused, cluster, pins, spec.memory_headroom, first_fit, deadline_s)
    return _faster(mixed, equal, cluster, (*run.notices, *stages.run.notices))


def _faster(
    mixed: SearchResult | None, equal: SearchResult | None, cluster: ClusterSpec, notices: tuple[str, ...]
) -> SearchResult:
    """With a notice that states both, and those that hold for both. It is only as good as both searches prove."""
    texts = []
    for name, found in (("stages on groups", mixed), ("all devices as equals of the slowest", equal)):
        step = "no plan" if found is None else f"{found.plan.prediction['step_time_s']:.4g} s a step ({_text(found)})"
        texts.append(f"{name}: {step}")
    note = f"unequal groups joined by {cluster.links[-1].name}: {'; '.join(texts)}"
    both = [found for found in (mixed, equal) if found is not None]
    bound_s = min(found.statistics["bound_s"] for found in both)
    if mixed is not None and (equal is None or _step_s(mixed) <= _step_s(equal) * (1 + 1e-9)):
        best, bound_s = mixed, min(bound_s, _step_s(mixed))
    else:
        assert equal is not None
        prints = {**equal.plan.fingerprints, "cluster": cluster.fingerprint}
        best = replace(equal, plan=equal.plan.replace(groups=rank_ranges(cluster), fingerprints=prints))
    told = tuple(dict.fromkeys((*best.notices, *notices, note)))
    return replace(best, notices=told).against(bound_s)


def _step_s(result: SearchResult) -> float:
    return float(result.plan.prediction["step_time_s"])


def _text(result: SearchResult) -> str:
    d = result.plan.degrees
    return " ".join(f"{axis}={n}" for axis, n in vars(d).items() if n > 1) or "one device"


class MixedRun:
    """`equal` has searched the devices as equals: its layouts and prices are the start."""

    def __init__(self, equal: Run, cluster: ClusterSpec, spec: SearchSpec) -> None:
        self.cluster, pins = cluster, equal.pins
        self.run = run = Run(equal.traced, equal.cluster, equal.train, pins, spec, prices=equal.prices)
        run.partitions = [p for p in run.partitions if group_orders(cluster, p.degrees)]
        evaluators = [self._evaluator(group_view(cluster, group), pins) for group in cluster.groups]
        self.evaluator = MixedEvaluator(cluster, run.evaluator, evaluators)
        run.bounds = {p: self.evaluator.analytic_bound_s(p) for p in run.partitions}
        run.space = BranchAndBound(self.evaluator, run.bounds, run.groups, run.deadline_s)

    def _evaluator(self, view: ClusterSpec, pins: Pins) -> Evaluator:
        run = self.run
        machine = Machine.of(view.device, view.stack, run.dtype)
        headroom = run.spec.memory_headroom
        device = replace(view.device, memory_bytes=int(view.device.memory_bytes * (1 - headroom)))
        return Evaluator(run.prices.on_machine(machine), replace(view, device=device), run.held, run.partitions, pins,
                         run.limits.splits_backward)  # fmt: skip

    def first_fit(self) -> Fitting | None:
        """Any plan that fits; None if there is none."""
        found = BranchAndBound(self.evaluator, self.run.bounds, self.run.groups, deadline=-math.inf).run()
        if found is None:
            return None
        plan, peaks = self._plan_of(found), dict[str, int]()
        for name, stage in zip(plan.prediction["stage_group"], found.memory, strict=True):
            peaks[name] = max(peaks.get(name, 0), stage["total"])
        return Fitting(plan, peaks)

    def result(self) -> SearchResult | None:
        """None if no setting has its stages inside groups, or none fits."""
        run = self.run
        found = run.space.run()
        if found is None:
            return None
        if run.space.timed_out:
            run.notices.append("the time limit ended the search over groups")
        plan = self._plan_of(found)
        alternatives = tuple(run.candidate(e, found) for e in run.space.alternatives(found))
        statistics = run.statistics(found, found)
        without_effect = pins_without_effect(run.pins, plan)
        notices = (*run.notices, *run.prices.counts.notes, *without_effect)
        return SearchResult(plan, alternatives, statistics, notices).against(statistics["bound_s"])

    def _plan_of(self, found: Evaluation) -> Plan:
        order, price = self.evaluator.found[found.setting]
        plan = self.run.plan_of(found, price.prices[0])
        return plan.replace(
            groups=rank_ranges(reordered(self.cluster, order)),
            prediction={**self.run.prediction(found), **self._of_groups(found, price)},
            fingerprints={**plan.fingerprints, "cluster": self.cluster.fingerprint},
        )  # fmt: skip

    def _peak_flops(self) -> float:
        """Of all devices together, a second."""
        return sum(group.num_devices * group.device.flops[self.run.dtype] for group in self.cluster.groups)

    def _of_groups(self, found: Evaluation, price: MixedPrice) -> Mapping[str, Any]:
        """Utilisation of all devices' peaks, and whose devices each stage has."""
        peak = self._peak_flops()
        useful = self.run.prediction(found)["model_flops"]
        names = [self.cluster.groups[g].name for g in price.owner]
        return {"mfu": useful / (found.step_s * peak), "stage_group": names * price.setting.virtual_stages}
