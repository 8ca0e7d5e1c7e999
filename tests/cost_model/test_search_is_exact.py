"""The whole search against brute force on random models, clusters and prices; and against the pricing of given runs."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.cost_model.branch_and_bound import BranchAndBound
from autopar.cost_model.candidates import SEGMENTS, Setting, settings_of
from autopar.cost_model.evaluate import MODES
from autopar.cost_model.search import Run, search
from autopar.cost_model.setting_price import SettingPrice
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.specs import ClusterSpec, LinkSpec, Pins, StackSpec, TrainSpec
from autopar.trace import trace
from tests import models

INSTANCES, AT_ONCE = 300, 50


@pytest.fixture(scope="module")
def traced() -> list[TracedModel]:
    """Equal layers (2, 3 and 6 of them) with a tied head; and two classes."""
    found = []
    for layers in (2, 3, 6):
        model = models.TinyGPT(layers=layers).to(torch.float32)
        found.append(prepare(trace(model, models.default_batch())))
    first = min(s.index for s in found[2].segments if s.kind == "layer")
    classes = tuple(replace(s, class_id="second") if s.kind == "layer" and s.index > first + 1 else s
                    for s in found[2].segments)  # fmt: skip
    return [*found, replace(found[2], segments=classes)]


def random_run(rng: random.Random, traced: list[TracedModel]) -> Run:
    """Up to 6 devices and 6 layers; rates, links and memory drawn over decades."""
    model, devices = rng.choice(traced), rng.choice([1, 2, 3, 4, 6])
    cluster = random_cluster(rng, devices)
    batch = devices * rng.choice([1, 2, 4])
    precision = rng.choice(["fp32", "fp32", "bf16-mixed"])
    zero = rng.choice([None, 0, 1, 2, 3]) if devices > 1 else None
    pins = Pins(checkpoint=rng.choice([None, None, "full"]), sp=rng.choice([None, False, False]), zero=zero,
                tp=rng.choice([1, 1, 1, 1, None]))  # fmt: skip
    return Run(model, cluster, TrainSpec(global_batch=batch, seq_len=16, precision=precision), pins)


def random_cluster(rng: random.Random, devices: int) -> ClusterSpec:
    local = preset("local", devices)
    rate = 10 ** rng.uniform(9, 11)
    device = replace(
        local.device, memory_bytes=int(10 ** rng.uniform(5.3, 6.6)), reserved_bytes=0,
        flops={"fp32": rate, "bf16": rate},
        memory_bandwidth=10 ** rng.uniform(9, 11), launch_s=10 ** rng.uniform(-7, -5),
    )  # fmt: skip
    link = LinkSpec(name="net", span=devices, bandwidth=10 ** rng.uniform(7, 10), latency=10 ** rng.uniform(-7, -4))
    overlap = rng.choice([(), ("dp_reduce",), ("dp_reduce", "tp_linear", "tp_ring", "pp_send")])
    links = (link,) if devices > 1 else ()
    if len(overlap) > 1:  # a GPU, on which it hides, and chains are fused
        device = replace(device, kind="cuda")
    stack = StackSpec(overlap=overlap, elementwise="compiled" if device.kind == "cuda" else "eager")
    return replace(local, device=device, links=links, stack=stack)


def brute_force(run: Run) -> float:
    """Every setting, segment, cut and mix of modes; the step worked out by time_parts of the plainest kind."""
    best = math.inf
    for partition in run.partitions:
        for setting in settings_of(partition, run.limits, run.pins):
            price = run.evaluator.price(setting)
            segments = SEGMENTS if price.equal_layers and "full" in run.evaluator.modes else (1,)
            for segment in segments:
                best = min(best, _brute_setting(price, setting, segment))
    return best


def _brute_setting(price: SettingPrice, setting: Setting, segment: int) -> float:
    problem, pp, v = price.problem(segment), setting.degrees.pp, setting.virtual_stages
    total, m, best = len(problem.layers), setting.micro_batches, math.inf
    known: dict[tuple[int, tuple[int, ...]], float] = {}

    def stage_s(stage: int, layers: tuple[int, ...]) -> float:
        key = (stage, tuple(sorted(layers)))
        if key not in known:
            known[key] = _brute_stage(problem, stage, layers)
        return known[key]

    for cuts in itertools.combinations(range(1, total), pp - 1):
        borders = [0, *cuts, total]
        runs = list(itertools.pairwise(borders))
        if any(j - i < v for i, j in runs):
            continue
        times = [stage_s(s, problem.layers[i:j]) for s, (i, j) in enumerate(runs)]
        if all(t < math.inf for t in times):
            put_off = [problem.stages[s].put_off_s + sum(problem.classes[c].put_off_s for c in problem.layers[i:j])
                       for s, (i, j) in enumerate(runs)]  # fmt: skip
            tails = []
            for s, (i, j) in enumerate(runs):
                counts = tuple(problem.layers[i:j].count(c) for c in range(len(problem.classes)))
                tails.append(put_off[s] + sum(price.tail_parts(s, counts).values()))
            flow = sum(t - w for t, w in zip(times, put_off, strict=True))
            best = min(best, (m - 1 / v) * max(times) + flow / v + max(tails))
    return price.with_overhead(best)


def _brute_stage(problem: Any, stage: int, layers: tuple[int, ...]) -> float:
    """Least time of a stage over all numbers of layers in each mode of each class."""
    own, best, v = problem.stages[stage], math.inf, problem.virtual_stages
    static = own.static_bytes + sum(problem.classes[c].static_bytes for c in layers)
    per_class = []
    for c, layer in enumerate(problem.classes):
        n = layers.count(c)
        per_class.append(_splits(n, len(layer.modes)))
    for choice in itertools.product(*per_class):
        time_s, kept, working = own.time_s, own.saved_bytes, own.transient_bytes
        for layer, numbers in zip(problem.classes, choice, strict=True):
            for mode, n in zip(layer.modes, numbers, strict=True):
                time_s += n * mode.time_s
                chunks = [n // v + (k < n % v) for k in range(v)]
                size = problem.segment if mode.name == "full" else 1
                kept += mode.saved_bytes * sum(-(-k // size) for k in chunks)
                if n:
                    working = max(working, mode.transient_bytes + (min(size, max(chunks)) - 1) * layer.whole_bytes)
        if static + own.in_flight * kept + working <= problem.memory_bytes:
            best = min(best, time_s)
    return best


@cache
def _splits(number: int, parts: int) -> list[tuple[int, ...]]:
    return [k for k in itertools.product(range(number + 1), repeat=parts) if sum(k) == number]


@pytest.mark.parametrize("first", range(0, INSTANCES, AT_ONCE))
def test_random_instances_against_brute_force(traced: list[TracedModel], first: int) -> None:
    feasible = pruned = recomputed = 0
    kinds: set[tuple[str, object]] = set()
    for seed in range(first, first + AT_ONCE):
        run = random_run(random.Random(seed), traced)
        expected = brute_force(run)
        space = BranchAndBound(run.evaluator, run.bounds, run.groups)
        found = space.run()
        if expected == math.inf:
            assert found is None
            continue
        assert found is not None, f"seed {seed}"
        assert found.step_s == pytest.approx(expected, rel=1e-9), f"seed {seed}"
        feasible += 1
        pruned += space.counts.solved < space.counts.bounded
        s = found.setting
        kinds |= {
            ("schedule", s.schedule),
            ("zero", s.zero),
            ("exchange", s.exchange),
            ("chunks", s.virtual_stages > 1),
        }
        kinds |= {(axis, getattr(s.degrees, axis) > 1) for axis in ("dp", "cp", "tp", "pp")}
        price = run.evaluator.price(s)
        assert found.pipeline is not None
        recomputed += price.recomputed_layers(found.pipeline, *MODES[1:]) > 0
    assert feasible >= AT_ONCE // 3
    assert pruned >= feasible // 3
    assert recomputed >= 1
    assert {("dp", True), ("pp", True), ("zero", 0)} <= kinds


def test_the_plan_is_priced_as_a_run_that_is_given(traced: list[TracedModel]) -> None:
    """Read back from the plan alone: degrees, stages, modes, levels; the step worked out by price_run."""
    from autopar.cost_model.run_layout import RunLayout
    from autopar.cost_model.run_price import RunWork, price_run

    train = TrainSpec(global_batch=48, seq_len=32, precision="bf16-mixed")
    for text in (
        "dp=8 checkpoint=none",
        "pp=2 dp=2 tp=2 checkpoint=full schedule=1f1b",
        "pp=2 dp=4 zero=1 checkpoint=none",
        "pp=3 schedule=interleaved dp=2 checkpoint=selective",
        "dp=4 cp=2 zero=3 checkpoint=selective-ops",
    ):
        cluster = preset("dgx-h100", 1)
        if "pp=3" in text:
            cluster = replace(cluster, num_devices=6, links=(replace(cluster.links[0], span=6),))
        pins = Pins.parse(text.split())
        run = Run(traced[2], cluster, train, pins)
        plan = search(traced[2], cluster, train, pins).plan
        counts = [len(stage) for stage in plan.layer_paths()]
        assert len(set(counts)) == 1, "price_run takes even stages"
        setting = next(
            s for p in run.partitions if p.micro_batch == plan.micro_batch and p.degrees == plan.degrees
            and p.sequence_sharding == plan.sequence_sharding for s in settings_of(p, run.limits, pins)
            if (s.schedule, s.virtual_stages, s.zero, s.exchange)
            == (plan.schedule, plan.virtual_stages, plan.zero, plan.context_parallel)
        )  # fmt: skip
        price = run.evaluator.price(setting)
        blocks, layer = price.blocks, price.classes[0]
        work = RunWork(
            layer.unit.work, blocks.prologue.work, blocks.epilogue.work, layer.unit.parameters,
            blocks.prologue.parameters,
            price.ends[1][1].parameters, blocks.border_bytes, layer.unit.key_value_bytes, layer.unit.query_bytes,
        )  # fmt: skip
        mode = plan.checkpoint_mode(plan.layer_paths()[0][0])
        layout = RunLayout(
            degrees=plan.degrees, layers=sum(counts), seq_len=plan.seq_len, micro_batch=plan.micro_batch,
            micro_batches=plan.micro_batches, virtual_stages=plan.virtual_stages, zero=plan.zero,
            zero_shard=plan.degrees.dp * plan.degrees.cp if plan.zero else 1, recompute=mode,
            sequence_sharding=plan.sequence_sharding, cp_exchange=plan.context_parallel.replace("-", "_"),
            schedule=plan.schedule,
        )  # fmt: skip
        given = price_run(work, layout, cluster, price.step.traits, price.step.machine, price.step.constants)
        assert plan.prediction["step_time_s"] == pytest.approx(given["total"], rel=1e-6), text
