"""The whole search against brute force on random models, clusters and prices; and against the pricing of given runs."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autopar.cost_model import branch_and_bound
from autopar.cost_model.branch_and_bound import NEAR, BranchAndBound
from autopar.cost_model.candidates import SEGMENTS, Setting, settings_of
from autopar.cost_model.evaluate import MODES
from autopar.cost_model.search import Run, search
from autopar.cost_model.setting_price import SettingPrice
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.specs import ClusterSpec, Pins, StackSpec, TrainSpec
from tests.cost_model.random_runs import KINDS, OVERLAPS, of_kinds, of_sizes, random_device, random_link

INSTANCES, AT_ONCE = 300, 50


@pytest.fixture(scope="module")
def traced() -> list[TracedModel]:
    """Equal layers (2, 3 and 6 of them) with a tied head; and two or three classes."""
    found = of_sizes(2, 3, 6)
    return [*found, *(of_kinds(found[2], name) for name in KINDS)]


@pytest.fixture(scope="module")
def many_layers() -> TracedModel:
    return of_sizes(10)[0]


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
    local, device = preset("local", devices), random_device(rng)
    links = (random_link(rng, devices),) if devices > 1 else ()
    overlap = rng.choice(OVERLAPS)
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
            one_kind_or_chunk = price.equal_layers or setting.virtual_stages == 1
            for segment in SEGMENTS if "full" in run.evaluator.modes and one_kind_or_chunk else (1,):
                best = min(best, _brute_setting(price, setting, segment))
    return best


def _brute_setting(price: SettingPrice, setting: Setting, segment: int) -> float:
    problem, pp, v = price.problem(segment), setting.degrees.pp, setting.virtual_stages
    total, m, best = len(problem.layers), setting.micro_batches, math.inf
    known: dict[tuple[int, tuple[int, ...]], float] = {}

    def stage_s(stage: int, layers: tuple[int, ...]) -> float:
        key = (stage, layers if segment > 1 else tuple(sorted(layers)))
        if key not in known:
            known[key] = _brute_stage(problem, stage, layers)
        return known[key]

    for cuts in itertools.combinations(range(1, total), pp - 1):
        sizes = [j - i for i, j in itertools.pairwise([0, *cuts, total])]
        if min(sizes) < v or (v > 1 and not price.equal_layers and not _is_even(sizes[1:-1])):
            continue
        held = _held(problem.layers, sizes, v)
        times = [stage_s(s, layers) for s, layers in enumerate(held)]
        if all(t < math.inf for t in times):
            put_off = [problem.stages[s].put_off_s + sum(problem.classes[c].put_off_s for c in layers)
                       for s, layers in enumerate(held)]  # fmt: skip
            tails = []
            for s, layers in enumerate(held):
                counts = tuple(layers.count(c) for c in range(len(problem.classes)))
                tails.append(put_off[s] + sum(price.tail_parts(s, counts).values()))
            flow = sum(t - w for t, w in zip(times, put_off, strict=True))
            best = min(best, (m - 1 / v) * max(times) + flow / v + max(tails))
    return price.with_overhead(best)


def _is_even(sizes: list[int]) -> bool:
    """As many each, or the earlier ones one more."""
    return sizes == sorted(sizes, reverse=True) and (not sizes or sizes[0] - sizes[-1] <= 1)


def _held(layers: tuple[int, ...], sizes: list[int], chunks: int) -> list[tuple[int, ...]]:
    """Classes of the layers of each rank; chunk k of rank r is stage k p + r of the model."""
    held: list[tuple[int, ...]] = [() for _ in sizes]
    start = 0
    for chunk in range(chunks):
        for rank, size in enumerate(sizes):
            number = size // chunks + (chunk < size % chunks)
            held[rank] += layers[start : start + number]
            start += number
    return held


def _brute_stage(problem: Any, stage: int, layers: tuple[int, ...]) -> float:
    """Least time of a stage over all numbers of layers in each mode of each class."""
    own, best = problem.stages[stage], math.inf
    static = own.static_bytes + sum(problem.classes[c].static_bytes for c in layers)
    gradients = sum(problem.classes[c].gradient_bytes for c in layers)
    per_class = [_splits(layers.count(c), len(layer.modes)) for c, layer in enumerate(problem.classes)]
    for choice in itertools.product(*per_class):
        chosen = [(c, mode, n) for c, layer in enumerate(problem.classes)
                  for mode, n in zip(layer.modes, choice[c], strict=True)]  # fmt: skip
        whole = {c: n for c, mode, n in chosen if mode.name == "full"}
        found = _recomputed_whole(problem, layers, whole)
        if found is None:
            continue
        kept, working = found
        for _, mode, n in chosen:
            kept += n * mode.saved_bytes if mode.name != "full" else 0.0
            working = max(working, mode.transient_bytes if n and mode.name != "full" else 0.0)
        if all(
            static + at.gradients * gradients + sum(at.beside.values()) + at.in_flight * (own.saved_bytes + kept)
            + at.excess[len(layers) % len(at.excess)] * kept / max(1, len(layers)) + working * at.in_layer
            <= problem.memory_bytes
            for at in own.moments
        ):  # fmt: skip
            best = min(best, own.time_s + sum(n * mode.time_s for _, mode, n in chosen))
    return best


def _recomputed_whole(problem: Any, layers: tuple[int, ...], whole: dict[int, int]) -> tuple[float, float] | None:
    """(bytes kept, working set) of so many layers of each class; None if segments make them be the first of a stage,
    and those are others."""
    v, size, number = problem.virtual_stages, problem.segment, sum(whole.values())
    if size == 1 or problem.is_uniform:
        order = [c for c in sorted(whole) for _ in range(whole[c])]
    else:
        order = list(layers[:number])
        if any(order.count(c) != n for c, n in whole.items()):
            return None
    kept = working = 0.0
    each = [number // v + (k < number % v) for k in range(v)] if problem.is_uniform else [number]
    for in_chunk in each:
        mine, order = order[:in_chunk], order[in_chunk:]
        for start in range(0, in_chunk, size):
            segment = [(problem.classes[c], _full(problem.classes[c])) for c in mine[start : start + size]]
            kept += segment[0][1].saved_bytes
            beside = max(mode.transient_bytes - layer.whole_bytes for layer, mode in segment)
            working = max(working, sum(layer.whole_bytes for layer, _ in segment) + beside)
    return kept, working


def _full(layer: Any) -> Any:
    return next(mode for mode in layer.modes if mode.name == "full")


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
        kinds |= {("classes", len(price.classes))}
        if len(price.classes) > 1:
            kinds |= {("chunks of classes", s.virtual_stages > 1)}
    assert feasible >= AT_ONCE // 3
    assert pruned >= feasible // 3
    assert recomputed >= 1
    assert {("dp", True), ("pp", True), ("zero", 0), ("classes", 2), ("classes", 3)} <= kinds
    assert ("chunks of classes", True) in kinds


@pytest.mark.parametrize(("memory_bytes", "segment"), [(1_320_000, 4), (1_380_000, 2)])
def test_memory_that_only_segments_leave_room_in(traced: list[TracedModel], memory_bytes: int, segment: int) -> None:
    """Where all of 64 micro-batches are in flight, inputs of single layers are too much."""
    local = preset("local", 2)
    cluster = replace(local, device=replace(local.device, memory_bytes=memory_bytes, reserved_bytes=0))
    train = TrainSpec(global_batch=64, seq_len=16, precision="fp32")
    run = Run(traced[2], cluster, train, Pins.parse(["pp=2", "schedule=gpipe", "microbatch=1"]))
    found = BranchAndBound(run.evaluator, run.bounds, run.groups).run()
    assert found is not None
    assert found.step_s == pytest.approx(brute_force(run), rel=1e-9)
    assert found.pipeline is not None
    assert found.pipeline.segment == segment
    assert run.evaluator.least_s(found.setting) <= found.step_s


def test_no_bound_is_above_a_solved_setting(many_layers: TracedModel) -> None:
    """Of more layers than are solved by brute force, so that ranks have several chunks, equal and unequal ones; where
    memory is short, as far as bounds can tell what does not fit or takes longer."""
    told = {"too big": 0, "in whole layers": 0, "sharper": 0, "chunks": 0}
    for seed in range(40):
        rng = random.Random(seed)
        cluster = random_cluster(rng, rng.choice([2, 4]))
        device = replace(cluster.device, memory_bytes=int(10 ** rng.uniform(5.6, 6.2)))
        pins = Pins(tp=1, cp=1, zero=rng.choice([0, 1, 2, 3]))
        train = TrainSpec(global_batch=8, seq_len=16, precision=rng.choice(["fp32", "bf16-mixed"]))
        run = Run(many_layers, replace(cluster, device=device), train, pins)
        for group in (group for p in run.partitions for group in run.groups(p)):
            quick, sharp = run.evaluator.bounds_s(group), run.evaluator.bounds_s(group, sharp=True)
            for i in range(len(group.runs)):
                setting = group.setting(i)
                exact_s, least_s = run.evaluator.evaluate(setting).step_s, run.evaluator.least_s(setting)
                assert max(quick[i], sharp[i], least_s) <= exact_s * (1 + 1e-9), (seed, setting)
                told["too big"] += exact_s == math.inf and sharp[i] == math.inf
                told["in whole layers"] += sharp[i] * (1 + 1e-6) < least_s
                told["sharper"] += quick[i] * (1 + 1e-6) < sharp[i] < math.inf
                told["chunks"] += setting.virtual_stages > 1 and exact_s < math.inf
    assert min(told.values()) >= 20, told


def test_alternatives_are_as_near_as_is_said(traced: list[TracedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """None is slower than the best of its layout, and the last than the best of any layout left out, but for `NEAR`."""
    monkeypatch.setattr(branch_and_bound, "ALTERNATIVES", 2)
    left_out = not_best = 0
    for seed in range(8):
        rng = random.Random(seed)
        train = TrainSpec(global_batch=4, seq_len=16, precision="fp32")
        run = Run(traced[1], random_cluster(rng, 4), train, Pins(zero=rng.choice([0, 1, 2])))
        space = BranchAndBound(run.evaluator, run.bounds, run.groups)
        best = space.run()
        if best is None:
            continue
        found = {(e.setting.degrees, e.setting.sequence_sharding): e.step_s for e in space.alternatives(best)}
        own, exact_s = (best.setting.degrees, best.setting.sequence_sharding), dict[object, float]()
        for setting in (s for p in run.partitions for s in run.settings(p)):
            layout = (setting.degrees, setting.sequence_sharding)
            exact_s[layout] = min(exact_s.get(layout, math.inf), run.evaluator.evaluate(setting).step_s)
        others = {layout: s for layout, s in exact_s.items() if layout != own and s < math.inf}
        assert list(found.values()) == sorted(found.values())
        assert len(found) == min(2, len(others)), f"seed {seed}"
        for layout, step_s in found.items():
            assert others[layout] >= NEAR * step_s * (1 - 1e-9), f"seed {seed}"
            not_best += others[layout] < step_s * (1 - 1e-9)
        for layout in others.keys() - found.keys():
            assert others[layout] >= NEAR * max(found.values()) * (1 - 1e-9), f"seed {seed}"
            left_out += 1
    assert left_out >= 24, left_out
    assert not_best >= 1


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
