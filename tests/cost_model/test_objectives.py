"""Objectives other than the step, and the memory that stays free."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_model import objectives
from autopar.cost_model.least_memory import least_memory
from autopar.cost_model.objectives import search_for
from autopar.cost_model.search import Run, least_evaluation, search
from autopar.cost_model.search_result import SearchResult
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from tests import models

TRAIN = TrainSpec(global_batch=8, seq_len=16)


@pytest.fixture(scope="module")
def gpt() -> TracedModel:
    return prepare(trace(models.tiny_gpt(dtype=torch.float32), models.default_batch()))


def local(devices: int = 4, price: float | None = None) -> ClusterSpec:
    cluster = preset("local", devices)
    return replace(cluster, device=replace(cluster.device, reserved_bytes=0, price_per_hour=price))


def peak_of(plan: object) -> int:
    return max(stage["total"] for stage in plan.prediction["peak_memory_bytes"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("pins", [Pins(), Pins(tp=2), Pins(dp=4), Pins(zero=0), Pins(pp=2, schedule="gpipe")])
def test_least_memory_is_the_least_of_all_settings(gpt: TracedModel, pins: Pins) -> None:
    run = Run(gpt, local(), TRAIN, pins)
    every = [run.evaluator.lacking(s).needed_bytes for p in run.partitions for s in run.settings(p)]
    found, proven = least_memory(run.evaluator, run.partitions, run.settings)
    assert proven == found.needed_bytes
    assert found.needed_bytes == pytest.approx(min(every), rel=1e-9)


def test_objective_memory_is_the_fastest_plan_in_the_least_memory(gpt: TracedModel) -> None:
    fastest = search_for(gpt, local(), TRAIN).plan
    least = search_for(gpt, local(), TRAIN, spec=SearchSpec(objective="memory"))
    assert peak_of(least.plan) < peak_of(fastest)
    assert least.plan.prediction["step_time_s"] > fastest.prediction["step_time_s"]
    assert any("objective memory" in note for note in least.notices)
    with pytest.raises(InfeasiblePlanError):
        search(gpt, local(), TRAIN, memory_bytes=peak_of(least.plan) - 16)


def test_objective_cost_takes_as_many_devices_as_pay(gpt: TracedModel) -> None:
    """A tiny model on slow links: one device is the cheapest per token, and the others are stated."""
    spec = SearchSpec(objective="cost")
    result = search_for(gpt, local(4, price=2.0), TRAIN, spec=spec)
    each = {n: search(gpt, local(4, price=2.0).resized(n), TRAIN).plan.prediction["step_time_s"] for n in (1, 2, 4)}
    best = min(each, key=lambda n: n * each[n])
    assert result.plan.degrees.world_size == best
    tokens = 8 * 16
    expected = best * each[best] / 3600 * 2.0 / tokens * 1e6
    assert result.plan.prediction["cost_per_million_tokens"] == pytest.approx(expected)
    assert f"{best} of 4 devices" in result.notices[-1]


def test_what_a_search_of_other_devices_left_open_is_a_gap(gpt: TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the time limit ended the search over two devices, the cheapest of which could be half the best found."""
    whole, found = objectives.search, dict[int, SearchResult]()

    def cut_off(traced: TracedModel, cluster: ClusterSpec, *rest: Any) -> SearchResult:
        n, result = cluster.num_devices, whole(traced, cluster, *rest)
        if n == 2:
            bound_s = found[1].plan.prediction["step_time_s"] / 4
            result = replace(result, statistics={**result.statistics, "bound_s": bound_s})
        return found.setdefault(n, result)

    monkeypatch.setattr(objectives, "search", cut_off)
    result = search_for(gpt, local(4, price=2.0), TRAIN, spec=SearchSpec(objective="cost"))
    assert (result.plan.degrees.world_size, result.statistics["status"]) == (1, "incumbent")
    assert result.statistics["gap"] == result.plan.solver["gap"] == pytest.approx(1.0)
    assert result.plan.solver["status"] == "incumbent"
    assert found[1].statistics["status"] == "optimal"


def test_cost_needs_a_price_and_a_batch(gpt: TracedModel) -> None:
    spec = SearchSpec(objective="cost")
    with pytest.raises(SpecError, match="devices have no price"):
        search_for(gpt, local(), TRAIN, spec=spec)
    with pytest.raises(SpecError, match="no global batch is stated"):
        search_for(gpt, local(price=1.0), TrainSpec(seq_len=16), spec=spec)


def test_a_price_is_no_part_of_the_cluster_and_changes_no_plan(gpt: TracedModel) -> None:
    assert local(price=3.0).fingerprint == local().fingerprint
    free, priced = (search_for(gpt, local(price=price), TRAIN).plan for price in (None, 3.0))
    assert free.fingerprint == priced.fingerprint
    assert "cost_per_million_tokens" not in free.prediction


def test_headroom_stays_free(gpt: TracedModel) -> None:
    pins = Pins(pp=4)
    peak = peak_of(search_for(gpt, local(), TRAIN, pins).plan)
    cluster = replace(local(), device=replace(local().device, memory_bytes=peak))
    assert peak_of(search_for(gpt, cluster, TRAIN, pins).plan) == peak
    spare = search_for(gpt, cluster, TRAIN, pins, SearchSpec(memory_headroom=0.1)).plan
    assert peak_of(spare) <= 0.9 * peak
    assert spare.fingerprints == search_for(gpt, cluster, TRAIN, pins).plan.fingerprints
    with pytest.raises(InfeasiblePlanError, match="less the headroom"):
        search_for(gpt, cluster, TRAIN, pins, SearchSpec(memory_headroom=0.99))


def test_headroom_that_leaves_less_than_is_reserved_is_refused(gpt: TracedModel) -> None:
    with pytest.raises(SpecError, match=r"4.00 GiB are reserved. Try: a fraction below 0.94"):
        search_for(gpt, preset("dgx-h100", 1), TRAIN, spec=SearchSpec(memory_headroom=0.96))


@pytest.mark.parametrize(
    ("values", "text"),
    [({"objective": "speed"}, "search.objective: 'speed' is not one of step-time, memory, cost"),
     ({"memory_headroom": 1.0}, "search.memory_headroom: must be a fraction below 1"),
     ({"memory_headroom": -0.1}, "search.memory_headroom"), ({"memory_headroom": float("nan")}, "memory_headroom")],
)  # fmt: skip
def test_a_bad_objective_is_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        SearchSpec(**values)  # type: ignore[arg-type]


def test_searches_of_one_limit_share_it() -> None:
    spec = SearchSpec(time_limit_s=10.0)
    deadline_s = spec.deadline_s
    first = spec.share_of(deadline_s, 4)
    assert first.time_limit_s == pytest.approx(2.5, abs=0.5)
    assert spec.share_of(deadline_s - 20, 1).time_limit_s == pytest.approx(0.01)
    assert SearchSpec().share_of(SearchSpec().deadline_s, 3) == SearchSpec()


def test_the_least_memory_keeps_the_time_limit_and_says_what_is_proven(gpt: TracedModel) -> None:
    """Past the deadline the first setting that is looked at stands, above a bound that the exact answer keeps to."""
    run = Run(gpt, local(), TRAIN, Pins())
    least, _ = least_memory(run.evaluator, run.partitions, run.settings)
    found, proven = least_memory(run.evaluator, run.partitions, run.settings, deadline_s=0.0)
    assert 0 < proven <= least.needed_bytes <= found.needed_bytes
    hasty = search_for(gpt, local(), TRAIN, spec=SearchSpec(objective="memory", time_limit_s=1e-4))
    assert peak_of(hasty.plan) >= least.needed_bytes - 1
    if proven < found.needed_bytes:
        assert any("where the time limit ended the search for less" in note for note in hasty.notices)


def test_a_plan_is_as_proven_as_all_its_searches(gpt: TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least memory: the search for less was cut off. Least cost: so were those of other numbers of devices."""
    monkeypatch.setattr(
        SearchSpec, "share_of", lambda self, _, searches: replace(self, time_limit_s=1e-9 if searches > 1 else None)
    )
    least = search_for(gpt, local(), TRAIN, spec=SearchSpec(objective="memory"))
    assert "where the time limit ended the search for less" in least.notices[-1]
    assert least.statistics["gap"] == least.plan.solver["gap"] > 1e-6
    assert least.statistics["status"] == least.plan.solver["status"] == "incumbent"
    free = replace(local(4, price=1.0).device, launch_s=0.0)
    links = tuple(replace(link, bandwidth=1e18, latency=0.0) for link in local().links)
    cluster = replace(local(), device=free, links=links)
    cheapest = search_for(gpt, cluster, TRAIN, spec=SearchSpec(objective="cost"))
    count, bound_s = cheapest.plan.degrees.world_size, cheapest.statistics["bound_s"]
    each = {n: search(gpt, cluster.resized(n), TRAIN).plan.prediction["step_time_s"] for n in (1, 2, 4)}
    assert count * bound_s <= min(n * step_s for n, step_s in each.items()) * (1 + 1e-9)
    step_s = cheapest.plan.prediction["step_time_s"]
    assert cheapest.statistics["gap"] == pytest.approx(step_s / bound_s - 1, abs=1e-12)
    assert cheapest.statistics["status"] == ("optimal" if step_s <= bound_s * (1 + 1e-6) else "incumbent")


def test_what_does_not_fit_is_explained_within_the_time_limit(gpt: TracedModel) -> None:
    """The stage and the bytes that are missing are named; other clusters and pins are not searched for any more."""
    small = replace(local(), device=replace(local().device, memory_bytes=100_000))
    with pytest.raises(InfeasiblePlanError, match="lacks .* bytes .* on stage .*the time limit left no time"):
        search(gpt, small, TRAIN, Pins(zero=0), SearchSpec(time_limit_s=1e-4))


def test_what_would_do_does_and_less_does_not(gpt: TracedModel) -> None:
    """The memory that a shortage names, with the headroom in it, and the number of devices, which is no doubling."""
    train, pins, headroom = TrainSpec(global_batch=24, seq_len=16), Pins(cp=1, zero=3), 0.25
    spec = SearchSpec(memory_headroom=headroom)
    needs = {n: least_evaluation(gpt, of_memory(n, 2**30), train, pins, spec)[0].needed_bytes for n in (8, 12)}
    assert needs[12] < needs[8]
    memory_bytes = math.floor((needs[8] + needs[12]) / 2 / (1 - headroom))
    with pytest.raises(InfeasiblePlanError, match="or 12 of these devices") as caught:
        search_for(gpt, of_memory(4, memory_bytes), train, pins, spec)
    assert search_for(gpt, of_memory(12, memory_bytes), train, pins, spec).plan.degrees.world_size == 12
    found = re.search(r"devices of at least ([0-9.]+) KiB \(0.25 of it kept free", str(caught.value))
    assert found is not None
    enough_bytes = math.floor(float(found[1]) * 2**10)
    assert search_for(gpt, of_memory(4, enough_bytes), train, pins, spec).plan.zero == 3
    with pytest.raises(InfeasiblePlanError):
        search(gpt, of_memory(4, enough_bytes - 2**8), train, pins, spec)


def of_memory(devices: int, memory_bytes: int) -> ClusterSpec:
    four = preset("local", 4)
    device = replace(four.device, memory_bytes=memory_bytes, reserved_bytes=0)
    return replace(four, device=device).resized(devices)
