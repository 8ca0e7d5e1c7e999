"""A plan in use is given up only for more than a change is worth; without one, the plan is the best there is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autopar.cost_model.kept_plan import setting_of_plan
from autopar.cost_model.objectives import search_for
from autopar.cost_model.search import Run, search
from autopar.errors import PlanMismatchError, SpecError
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.mixed_cluster import mixed_cluster
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, GroupSpec, Pins, StackSpec, TrainSpec
from autopar.trace import trace
from tests import models

TRAIN, PINS = TrainSpec(global_batch=16, seq_len=16), Pins(tp=1, cp=1, checkpoint="none")


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    return prepare(trace(models.TinyGPT(layers=3).to(torch.float32), models.default_batch()))


@pytest.fixture(scope="module")
def near_tie(traced: TracedModel) -> tuple[ClusterSpec, ClusterSpec]:
    """Two clusters whose links differ by 1 % and whose best plans differ: found by halving between far ones."""

    def best(bandwidth: float) -> tuple[object, ...]:
        return choices(search(traced, linked(bandwidth), TRAIN, PINS).plan)

    slow, fast = 1e6, 1e12
    assert best(slow) != best(fast)
    while fast > slow * 1.01:
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if best(middle) == best(slow) else (slow, middle)
    return linked(slow), linked(fast)


def linked(bandwidth: float) -> ClusterSpec:
    local = preset("local", 4)
    return replace(local, links=(replace(local.links[0], bandwidth=bandwidth, latency=1e-6),))


def choices(plan: Plan) -> tuple[object, ...]:
    return (plan.degrees, plan.sequence_sharding, plan.micro_batch, plan.schedule, plan.virtual_stages, plan.zero,
            plan.zero_group, plan.context_parallel)  # fmt: skip


def test_near_a_tie_the_plan_in_use_stays(traced: TracedModel, near_tie: tuple[ClusterSpec, ClusterSpec]) -> None:
    plans = [search(traced, cluster, TRAIN, PINS).plan for cluster in near_tie]
    assert choices(plans[0]) != choices(plans[1])
    for cluster, other, own in (near_tie[1], *plans), (near_tie[0], *reversed(plans)):
        result = search(traced, cluster, TRAIN, PINS, SearchSpec(keep=other))
        assert choices(result.plan) == choices(other)
        cost = result.plan.prediction["step_time_s"] / own.prediction["step_time_s"] - 1
        assert 0 <= cost <= 0.01
        assert result.statistics["gap"] == pytest.approx(cost, abs=1e-9)
        assert result.statistics["status"] == ("kept" if cost > 1e-6 else "optimal")
        assert any("is kept" in notice for notice in result.notices)


def test_a_change_of_one_price_turns_over_only_what_it_pays_for(
    traced: TracedModel, near_tie: tuple[ClusterSpec, ClusterSpec]
) -> None:
    """Prices change one at a time by 1 %; the plan before is re-priced by itself."""
    rng, cluster, stateless = random.Random(0), near_tie[0], set()
    plan, turned = search(traced, cluster, TRAIN, PINS).plan, 0
    for _ in range(24):
        cluster = rng.choice(CHANGES)(cluster, rng.choice([1.01, 1 / 1.01]))
        found = search(traced, cluster, TRAIN, PINS, SearchSpec(keep=plan)).plan
        stateless.add(choices(search(traced, cluster, TRAIN, PINS).plan))
        if choices(found) != choices(plan):
            run = Run(traced, cluster, TRAIN, PINS)
            setting = setting_of_plan(plan, run.partitions, run.settings)
            before_s = run.evaluator.evaluate(setting).step_s if setting else float("inf")
            assert before_s > 1.01 * found.prediction["step_time_s"]
            turned += 1
        plan = found
    assert len(stateless) > 1
    assert turned < len(stateless)


def _device(field: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    def change(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        value = getattr(cluster.device, field)
        changed = {k: v * factor for k, v in value.items()} if field == "flops" else type(value)(value * factor)
        return replace(cluster, device=replace(cluster.device, **{field: changed}))

    return change


def _link(field: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    def change(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        link = cluster.links[0]
        return replace(cluster, links=(replace(link, **{field: getattr(link, field) * factor}),))

    return change


CHANGES = [
    *(_device(field) for field in ("flops", "memory_bandwidth", "memory_bytes", "launch_s")),
    *(_link(field) for field in ("bandwidth", "latency")),
]


def test_what_is_much_slower_or_impossible_is_given_up(traced: TracedModel) -> None:
    best = search(traced, linked(1e9), TRAIN, PINS).plan
    slow = search(traced, linked(1e9), TRAIN, replace(PINS, pp=2, microbatch=1, schedule="1f1b")).plan
    free, whole = PINS, replace(PINS, pp=1)
    for keep, pins, said in ((slow, free, "longer than this one"), (slow, whole, "is not possible"),
                             (best, free, "it is the best one")):  # fmt: skip
        result = search(traced, linked(1e9), TRAIN, pins, SearchSpec(keep=keep))
        assert pins is whole or choices(result.plan) == choices(best)
        assert result.statistics["status"] == "optimal"
        assert any(said in notice for notice in result.notices), result.notices
    small = replace(linked(1e9), device=replace(preset("local", 4).device, memory_bytes=900_000, reserved_bytes=0))
    result = search(traced, small, TRAIN, PINS, SearchSpec(keep=best.replace(zero=0)))
    assert any("does not fit in memory" in notice for notice in result.notices), result.notices


def test_the_fraction_that_is_stated_decides(traced: TracedModel) -> None:
    """A plan that is slower by a known part is kept within a little more, and given up within a little less."""
    best = search(traced, linked(1e9), TRAIN, PINS).plan
    slow = search(traced, linked(1e9), TRAIN, replace(PINS, pp=2, microbatch=1, schedule="1f1b")).plan
    slower = slow.prediction["step_time_s"] / best.prediction["step_time_s"] - 1
    for factor, kept in ((1.001, slow), (0.999, best)):
        found = search(traced, linked(1e9), TRAIN, PINS, SearchSpec(keep=slow, keep_within=slower * factor)).plan
        assert choices(found) == choices(kept)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plan_in_use_stays_to_the_letter(traced: TracedModel, tp: int) -> None:
    """Memory that leaves room for one layer less recomputed changes the best plan, not by what a change has to pay."""
    pins = Pins(tp=tp, dp=4 // tp, microbatch=4, zero=0)

    def with_room(nbytes: float) -> ClusterSpec:
        device = replace(linked(1e9).device, memory_bytes=int(nbytes), reserved_bytes=0)
        return replace(linked(1e9), device=device)

    (stage,) = search(traced, with_room(1 << 30), TRAIN, pins).plan.prediction["peak_memory_bytes"]
    little, more = (with_room(stage["total"] * share) for share in (0.9, 0.97))
    before = search(traced, little, TRAIN, pins).plan
    after = search(traced, more, TRAIN, pins).plan
    assert letters(after) != letters(before)
    kept = search(traced, more, TRAIN, pins, SearchSpec(keep=before, keep_within=0.2))
    assert letters(kept.plan) == letters(before)
    assert kept.plan.prediction["step_time_s"] == pytest.approx(before.prediction["step_time_s"], rel=1e-9)
    assert kept.plan.prediction["peak_memory_bytes"] == before.prediction["peak_memory_bytes"]
    assert kept.statistics["status"] == "kept"
    moved = SearchSpec(keep=before, keep_within=kept.statistics["gap"] / 2)
    assert letters(search(traced, more, TRAIN, pins, moved).plan) == letters(after)


def letters(plan: Plan) -> str:
    """All that runs, whatever the cluster."""
    return plan.replace(fingerprints={}).fingerprint


def test_keeping_is_by_step_time_on_equal_devices(traced: TracedModel) -> None:
    plan = search(traced, linked(1e9), TRAIN, PINS).plan
    with pytest.raises(SpecError, match="kept by its step time"):
        SearchSpec(keep=plan, objective="memory")
    with pytest.raises(SpecError, match="keep_within"):
        SearchSpec(keep=plan, keep_within=-0.1)
    device = preset("local", 1).device
    groups = tuple(GroupSpec(name=n, device=device, num_devices=1, links=()) for n in ("a", "b"))
    mixed = mixed_cluster("mixed", groups, replace(linked(1e9).links[0], span=2), StackSpec())
    with pytest.raises(SpecError, match="kept on equal devices"):
        search_for(traced, mixed, TRAIN, PINS, SearchSpec(keep=plan))


def test_a_plan_of_another_model_is_not_kept(traced: TracedModel) -> None:
    """By fingerprint; without one, by its layers."""
    plan = search(traced, linked(1e9), TRAIN, PINS).plan
    other = prepare(trace(models.TinyGPT(layers=2).to(torch.float32), models.default_batch()))
    strange = plan.replace(fingerprints={}, stages=(("decoder.0-2",),))
    for model, keep, said in (
        (other, plan, "made for another model"),
        (other, plan.replace(fingerprints={}), "not of this model"),
        (traced, strange, "has the layer decoder.0"),
    ):
        with pytest.raises(PlanMismatchError, match=said):
            search(model, linked(1e9), TRAIN, PINS, SearchSpec(keep=keep))
    kept = search(traced, linked(1e9), TRAIN, PINS, SearchSpec(keep=plan.replace(fingerprints={})))
    assert choices(kept.plan) == choices(plan)
