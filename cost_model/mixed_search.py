"""Search on a cluster of unequal groups: stages on groups, sized to their speed, or all devices as equals.

A setting whose stages each lie inside one group is priced stage by stage (`mixed_stages`), for every order of the
groups along the pipeline; tp, cp and dp then never leave a group. Every other setting spans the slow link with some
axis and is found by the ordinary search on the slowest of everything. The faster of the two is the plan, and both are
stated.

Settings wait under a lower bound that divides the layers among the stages in proportion to their speed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.cost_model.branch_and_bound import rank
from autopar.cost_model.candidates import Setting
from autopar.cost_model.compute import Machine
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.mixed_stages import MixedPrice
from autopar.cost_model.pipeline_ilp import prove_table, solve_table
from autopar.cost_model.search import Run, SearchResult, search
from autopar.errors import InfeasiblePlanError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.mixed_cluster import as_slowest, group_view, rank_ranges, reordered
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec

__all__ = ["search_groups"]


def search_groups(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins, spec: SearchSpec
) -> SearchResult:
    """Raises as `search`."""
    deadline_s = spec.deadline_s
    equal: SearchResult | None = None
    refused: InfeasiblePlanError | None = None
    try:
        equal = search(traced, as_slowest(cluster), train, pins, spec.share_of(deadline_s, 2))
    except InfeasiblePlanError as error:
        refused = error
    try:
        mixed = _MixedRun(traced, cluster, train, pins, spec.share_of(deadline_s, 1)).result()
    except InfeasiblePlanError:
        mixed = None
    if mixed is None and equal is None:
        assert refused is not None
        raise refused
    return _faster(mixed, equal, cluster)


def _faster(mixed: SearchResult | None, equal: SearchResult | None, cluster: ClusterSpec) -> SearchResult:
    """With a notice that states both."""
    texts = []
    for name, found in (("stages on groups", mixed), ("all devices as equals of the slowest", equal)):
        step = "no plan" if found is None else f"{found.plan.prediction['step_time_s']:.4g} s a step ({_text(found)})"
        texts.append(f"{name}: {step}")
    note = f"unequal groups joined by {cluster.links[-1].name}: {'; '.join(texts)}"
    if mixed is not None and (equal is None or _step_s(mixed) <= _step_s(equal) * (1 + 1e-9)):
        return replace(mixed, notices=(*mixed.notices, note))
    assert equal is not None
    prints = {**equal.plan.fingerprints, "cluster": cluster.fingerprint}
    plan = equal.plan.replace(groups=rank_ranges(cluster), fingerprints=prints)
    return replace(equal, plan=plan, notices=(*equal.notices, note))


def _step_s(result: SearchResult) -> float:
    return float(result.plan.prediction["step_time_s"])


def _text(result: SearchResult) -> str:
    d = result.plan.degrees
    return " ".join(f"{axis}={n}" for axis, n in vars(d).items() if n > 1) or "one device"


@dataclass
class _Counts:
    candidates: int = 0
    solved: int = 0
    best: dict[tuple[Degrees, bool], tuple[Evaluation, MixedPrice, ClusterSpec]] = field(default_factory=dict)
    open_s: float = np.inf


class _MixedRun:
    """Raises InfeasiblePlanError if no degrees are legal."""

    def __init__(
        self, traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins, spec: SearchSpec
    ) -> None:
        self.cluster, self.started = cluster, time.perf_counter()
        self.run = Run(traced, as_slowest(cluster), train, pins, spec)
        self.views = [group_view(cluster, group) for group in cluster.groups]
        self.evaluators = [self._evaluator(view, pins) for view in self.views]
        self.counts = _Counts()

    def _evaluator(self, view: ClusterSpec, pins: Pins) -> Evaluator:
        run = self.run
        machine = Machine.of(view.device, view.stack, run.dtype)
        headroom = run.spec.memory_headroom
        device = replace(view.device, memory_bytes=int(view.device.memory_bytes * (1 - headroom)))
        return Evaluator(run.prices.on_machine(machine), replace(view, device=device), run.held, run.partitions, pins,
                         run.limits.splits_backward)  # fmt: skip

    def result(self) -> SearchResult | None:
        """None if no setting has its stages inside groups, or none fits."""
        self._search()
        if not self.counts.best:
            return None
        found, price, ordered = min(self.counts.best.values(), key=lambda item: rank(item[0]))
        found, status = self._proven(found, price)
        plan = self.run.plan_of(found, price.prices[0])
        prediction = {**self.run.prediction(found), **self._of_groups(found, price)}
        statistics = self._statistics(found, status)
        kept = ("solver", "status", "bound_s", "gap", "candidates", "pruned")
        plan = plan.replace(
            groups=rank_ranges(ordered), prediction=prediction, solver={name: statistics[name] for name in kept},
            fingerprints={**plan.fingerprints, "cluster": self.cluster.fingerprint},
        )  # fmt: skip
        others = sorted((item for item in self.counts.best.values() if item[1] is not price), key=lambda i: rank(i[0]))
        alternatives = tuple(self.run.candidate(self._detailed(e, p), found) for e, p, _ in others[:5])
        return SearchResult(plan, alternatives, statistics, tuple(self.run.notices))

    def _search(self) -> None:
        waiting = self._bounded()
        self.counts.candidates = len(waiting)
        best_s = np.inf
        for bound_s, _, order, price in sorted(waiting, key=lambda item: item[:3]):
            if bound_s > best_s * (1 + 1e-9):
                break
            if best_s < np.inf and time.perf_counter() > self.run.deadline_s:
                self.counts.open_s = min(self.counts.open_s, bound_s)
                self.run.notices.append("the time limit ended the search over groups")
                break
            found = self._evaluate(price, best_s)
            if found is None:
                continue
            key = (found.setting.degrees, found.setting.sequence_sharding)
            if key not in self.counts.best or rank(found) < rank(self.counts.best[key][0]):
                self.counts.best[key] = (found, price, reordered(self.cluster, order))
            best_s = min(best_s, found.step_s)

    def _bounded(self) -> list[tuple[float, tuple[int, ...], tuple[int, ...], MixedPrice]]:
        """Every setting under its lower bound; of those that the time limit leaves out, what all devices could do."""
        waiting: list[tuple[float, tuple[int, ...], tuple[int, ...], MixedPrice]] = []
        for partition in self.run.partitions:
            for order in self._orders(partition.degrees):
                if waiting and time.perf_counter() > self.run.deadline_s:
                    self.counts.open_s = self.run.model_flops(partition) / self._peak_flops()
                    return waiting
                for setting in self.run.settings(partition):
                    price = self._price(setting, order)
                    waiting.append((price.bound_s(), setting.order, order, price))
        return waiting

    def _peak_flops(self) -> float:
        """Of all devices together, a second."""
        return sum(group.num_devices * group.device.flops[self.run.dtype] for group in self.cluster.groups)

    def _orders(self, degrees: Degrees) -> list[tuple[int, ...]]:
        """Orders of the groups along the pipeline, if each is a whole number of stages; equal groups count once."""
        width = self.cluster.num_devices // degrees.pp
        groups = self.cluster.groups
        if degrees.pp == 1 or any(group.num_devices % width for group in groups):
            return []
        alike = [(group.device, group.num_devices, group.links) for group in groups]
        orders = {tuple(map(alike.__getitem__, order)): order for order in itertools.permutations(range(len(groups)))}
        return sorted(orders.values())

    def _price(self, setting: Setting, order: Sequence[int]) -> MixedPrice:
        self.run.evaluator.price(setting)  # its layouts are the plan's
        width = self.cluster.num_devices // setting.degrees.pp
        owner = [g for g in order for _ in range(self.cluster.groups[g].num_devices // width)]
        return MixedPrice([evaluator.price(setting) for evaluator in self.evaluators], self.views, owner)

    def _evaluate(self, price: MixedPrice, cutoff_s: float) -> Evaluation | None:
        self.counts.solved += 1
        best: Evaluation | None = None
        cutoff = price.without_overhead(cutoff_s) * (1 + 1e-9)
        for segment in self.evaluators[0].segments_of(price.prices[0]):
            found = solve_table(price.table(segment), cutoff_s=cutoff)
            if isinstance(found, float):
                continue
            if best is None or found.step_s < cutoff * (1 - 1e-12):
                step_s = price.with_overhead(found.step_s)
                best, cutoff = Evaluation(price.setting, found, step_s, step_s), found.step_s
            if price.prices[0].recomputed_layers(found, "full") == 0:
                break
        return best

    def _proven(self, found: Evaluation, price: MixedPrice) -> tuple[Evaluation, str]:
        assert found.pipeline is not None
        table = price.table(found.pipeline.segment)
        solution = prove_table(table, found.pipeline, policy=self.run.prices.policy)
        if solution.variables:
            self.run.prices.counts.add(solution)
        bound_s = min(price.with_overhead(solution.bound_s), self.counts.open_s)
        status = "optimal" if found.step_s <= bound_s * (1 + 1e-6) else "incumbent"
        return self._detailed(replace(found, pipeline=solution, bound_s=bound_s), price), status

    def _detailed(self, found: Evaluation, price: MixedPrice) -> Evaluation:
        assert found.pipeline is not None
        time_s = price.time_parts(found.pipeline)
        total = sum(time_s.values())
        assert abs(total - found.step_s) <= 1e-6 * total, (total, found.step_s)
        flops = price.prices[0].executed_flops(found.pipeline)
        return replace(found, step_s=total, time_s=time_s, memory=price.memory(found.pipeline),
                       executed_flops=flops)  # fmt: skip

    def _of_groups(self, found: Evaluation, price: MixedPrice) -> Mapping[str, Any]:
        """Utilisation of all devices' peaks, and of each stage's devices the part of the step they compute or send."""
        assert found.pipeline is not None
        peak = self._peak_flops()
        useful = self.run.prediction(found)["model_flops"]
        busy = [price.m * stage.time_s / found.step_s for stage in found.pipeline.stages]
        chunks = price.setting.virtual_stages
        names = [self.cluster.groups[g].name for g in price.owner]
        return {"mfu": useful / (found.step_s * peak), "stage_busy": busy * chunks, "stage_group": names * chunks}

    def _statistics(self, found: Evaluation, status: str) -> dict[str, Any]:
        ilps, counts = self.run.prices.counts, self.counts
        spent = time.perf_counter() - self.started
        return {
            "solver": ", ".join(ilps.solvers) or "none needed", "status": status, "variables": ilps.variables,
            "constraints": ilps.constraints, "largest_ilp_variables": ilps.largest_variables, "ilps": ilps.solves,
            "candidates": counts.candidates, "solved": counts.solved, "pruned": counts.candidates - counts.solved,
            "search_s": spent, "ilp_s": ilps.solve_s, "bound_s": found.bound_s,
            "gap": max(0.0, found.step_s / found.bound_s - 1),
        }  # fmt: skip
