"""The search over unequal groups against brute force on random groups: no bound above a price, no plan missed."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_model.candidates import SEGMENTS, Partition, SettingGroup
from autopar.cost_model.mixed_bounds import MixedBounds, shared_s, stage_shares
from autopar.cost_model.mixed_search import MixedRun
from autopar.cost_model.mixed_stages import MixedPrice
from autopar.cost_model.pipeline_ilp import step_time
from autopar.cost_model.search import Run
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.mixed_cluster import as_slowest, mixed_cluster
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, GroupSpec, Pins, StackSpec, TrainSpec
from tests.cost_model.random_runs import OVERLAPS, of_kinds, of_sizes, random_device, random_link

INSTANCES, AT_ONCE = 40, 20


@pytest.fixture(scope="module")
def traced() -> list[TracedModel]:
    """Equal layers (3 and 6 of them) with a tied head; and two or three classes."""
    found = of_sizes(3, 6)
    return [*found, of_kinds(found[1], "alternating"), of_kinds(found[1], "three")]


def random_groups(rng: random.Random) -> ClusterSpec:
    """Two groups of one, two or four devices, or three of one."""
    sizes = rng.choice([(1, 1), (1, 2), (2, 2), (2, 4), (1, 1, 1)])

    groups = tuple(
        GroupSpec(name=f"g{i}", device=random_device(rng), num_devices=n, links=(random_link(rng, n),) if n > 1 else ())
        for i, n in enumerate(sizes)
    )
    return mixed_cluster("groups", groups, random_link(rng, sum(sizes)), StackSpec(overlap=rng.choice(OVERLAPS)))


def random_run(rng: random.Random, traced: list[TracedModel]) -> MixedRun:
    cluster = random_groups(rng)
    batch = cluster.num_devices * rng.choice([2, 4])
    pins = Pins(checkpoint=rng.choice([None, "full"]), sp=rng.choice([None, False]), tp=rng.choice([1, 1, None]),
                zero=rng.choice([None, 0, 1, 3]))  # fmt: skip
    train = TrainSpec(global_batch=batch, seq_len=16, precision=rng.choice(["fp32", "bf16-mixed"]))
    return MixedRun(Run(rng.choice(traced), as_slowest(cluster), train, pins), cluster, SearchSpec())


def brute_order(run: MixedRun, price: MixedPrice, bounds: tuple[float, float, float]) -> float:
    """Over every segment and cut; `bounds` of the slowest stage, the sum of stages and the longest tail hold."""
    first, best, chunks = price.prices[0], math.inf, price.setting.virtual_stages
    one_kind_or_chunk = first.equal_layers or chunks == 1
    for segment in SEGMENTS if "full" in run.run.evaluator.modes and one_kind_or_chunk else (1,):
        table = price.table(segment)
        total = len(table.problem.layers)
        for cuts in itertools.combinations(range(1, total), len(price.owner) - 1):
            cut = list(itertools.pairwise([0, *cuts, total]))
            if min(j - i for i, j in cut) < chunks:
                continue
            numbers = table.numbers(cut)
            stages = [table.price(s, number) for s, number in enumerate(numbers)]
            fitting = [stage for stage in stages if stage is not None]
            if len(fitting) < len(stages):
                continue
            slowest_s = max(stage.time_s for stage in fitting)
            parts = slowest_s, sum(stage.flow_s for stage in fitting), max(stage.tail_s for stage in fitting)
            for part_s, bound_s in zip(parts, bounds, strict=True):
                assert bound_s <= part_s * (1 + 1e-9), (price.setting, parts, bounds)
            best = min(best, step_time(fitting, price.m, price.setting.virtual_stages))
    return price.with_overhead(best)


def brute_run(run: MixedRun, group: SettingGroup, index: int) -> float:
    """Over every order of the groups too."""
    first, setting, best = group.setting(0), group.setting(index), math.inf
    for price, price_of_first in zip(*map(run.evaluator.priced, (setting, first)), strict=True):
        of = MixedBounds(price_of_first, group)
        parts = float(of.slowest_s()[index]), float(of.flow_s()[index]), of.tail_s()
        best = min(best, brute_order(run, price, parts))
    return best


def check_bounds(run: MixedRun, partition: Partition) -> float:
    """The best step of the partition; no bound is above what it bounds."""
    evaluator, best = run.evaluator, math.inf
    rough = evaluator.rough_bound_s(partition)
    for group in run.run.groups(partition):
        quick, sharp = evaluator.bounds_s(group), evaluator.bounds_s(group, sharp=True)
        for i in range(len(group.runs)):
            exact_s = brute_run(run, group, i)
            assert quick[i] <= exact_s * (1 + 1e-9), group.setting(i)
            assert sharp[i] <= exact_s * (1 + 1e-9), group.setting(i)
            best = min(best, exact_s)
    assert evaluator.analytic_bound_s(partition) <= best * (1 + 1e-9), partition
    blocks = evaluator.block_bound_s(partition)
    assert rough <= best * (1 + 1e-9), partition
    assert blocks <= best * (1 + 1e-9), partition
    return best


def test_work_is_divided_in_proportion_to_speed() -> None:
    """Of one class exactly; classes that each suit another group are not taken to suit none."""
    one = np.array([9.0]), np.array([[1.0, 0.5]])
    assert shared_s(*one, [0, 1], stage_shares(*one, [0, 1])) == pytest.approx(3.0)
    assert shared_s(*one, [0, 1, 1], stage_shares(*one, [0, 1, 1])) == pytest.approx(9 / 5)
    two = np.array([1.0, 1.0]), np.array([[1.0, 10.0], [10.0, 1.0]])
    assert shared_s(*two, [0, 1], stage_shares(*two, [0, 1])) == pytest.approx(1.0)


def test_prices_known_from_one_size_bound_another(traced: list[TracedModel]) -> None:
    """On GPUs of two generations, whatever was priced before."""
    old, new = preset("dgx-a100-80g", 1), preset("dgx-h100", 1)
    groups = tuple(GroupSpec(name=p.name, device=p.device, num_devices=2, links=(replace(p.links[0], span=2),))
                   for p in (old, new))  # fmt: skip
    cluster = mixed_cluster("generations", groups, replace(old.links[-1], span=4), StackSpec())
    train = TrainSpec(global_batch=64, seq_len=64)
    run = MixedRun(Run(traced[1], as_slowest(cluster), train, Pins()), cluster, SearchSpec())
    order = random.Random(0).sample(run.run.partitions, len(run.run.partitions))
    told = 0
    for partition in order:
        rough, blocks = run.evaluator.rough_bound_s(partition), run.evaluator.block_bound_s(partition)
        assert rough <= blocks * (1 + 1e-9), partition
        told += rough > 0.3 * blocks
    assert told > len(order) // 2


@pytest.mark.parametrize("first", range(0, INSTANCES, AT_ONCE))
def test_random_groups_against_brute_force(traced: list[TracedModel], first: int) -> None:
    feasible = pruned = 0
    kinds: set[tuple[str, object]] = set()
    for seed in range(first, first + AT_ONCE):
        run = random_run(random.Random(seed), traced)
        expected = min((check_bounds(run, p) for p in run.run.partitions), default=math.inf)
        found = run.run.space.run()
        if expected == math.inf:
            assert found is None
            continue
        assert found is not None, f"seed {seed}"
        assert found.step_s == pytest.approx(expected, rel=1e-9), f"seed {seed}"
        feasible += 1
        pruned += run.run.space.counts.solved < run.run.space.counts.bounded
        order, price = run.evaluator.found[found.setting]
        kinds |= {("order", order), ("groups", len(set(price.owner))), ("chunks", found.setting.virtual_stages > 1)}
        kinds |= {("classes", len(price.prices[0].classes)), ("dp", found.setting.degrees.dp > 1)}
    assert feasible >= AT_ONCE // 4
    assert pruned >= feasible // 3
    assert {("groups", 2), ("order", (0, 1)), ("order", (1, 0)), ("dp", True)} <= kinds
