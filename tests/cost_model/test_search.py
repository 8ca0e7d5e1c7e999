"""The search as a whole: optimal over its space, within its pins, clear when nothing fits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from autopar.cost_model.candidates import groups_of, settings_of
from autopar.cost_model.evaluate import TIME_PARTS
from autopar.cost_model.propagation import propagate
from autopar.cost_model.search import Run, search
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, StackSpec, TrainSpec
from autopar.trace import trace
from tests import models
from tests.cost_model.random_runs import of_kinds

TRAIN = TrainSpec(global_batch=8, seq_len=16)


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    return prepare(trace(models.llama_tiny(dtype=torch.float32), models.default_batch()))


@pytest.fixture(scope="module")
def gpt() -> TracedModel:
    return prepare(trace(models.tiny_gpt(dtype=torch.float32), models.default_batch()))


def cluster_of(memory_bytes: int, processes: int = 4) -> ClusterSpec:
    local = preset("local", processes)
    return replace(local, device=replace(local.device, memory_bytes=memory_bytes, reserved_bytes=0))


def bound_by_launches(elementwise: str) -> ClusterSpec:
    """GPUs on which nothing takes as long as a launch."""
    gpus = preset("dgx-h100", 1)
    links = (replace(gpus.links[0], span=4, latency=1e-7),)
    return replace(gpus, num_devices=4, links=links, device=replace(gpus.device, launch_s=1e-4),
                   stack=StackSpec(elementwise=elementwise))  # fmt: skip


CLUSTERS = {
    **{f"{memory_bytes} bytes": cluster_of(memory_bytes) for memory_bytes in (1 << 30, 2_400_000, 1_800_000, 600_000)},
    **{f"{stack} launches": bound_by_launches(stack) for stack in ("eager", "compiled")},
}


@pytest.mark.parametrize("kind", [None, "alternating", "first"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_pruning_never_loses_the_optimum(gpt: TracedModel, name: str, kind: str | None) -> None:
    """Every setting solved without any bound gives the same best step; no bound is above what it bounds."""
    cluster, model = CLUSTERS[name], of_kinds(gpt, kind) if kind else gpt
    exhaustive = Run(model, cluster, TRAIN, Pins())
    expected = float("inf")
    for partition in exhaustive.partitions:
        analytic = exhaustive.evaluator.analytic_bound_s(partition)
        rough, blocks = exhaustive.evaluator.rough_bound_s(partition), exhaustive.evaluator.block_bound_s(partition)
        for group in groups_of(partition, exhaustive.limits, Pins()):
            quick = exhaustive.evaluator.bounds_s(group)
            sharp = exhaustive.evaluator.bounds_s(group, sharp=True)
            for i in range(len(group.runs)):
                found = exhaustive.evaluator.evaluate(group.setting(i)).step_s * (1 + 1e-9)
                assert max(analytic, rough, blocks) * (1 - 1e-9) <= quick[i] <= found
                assert quick[i] * (1 - 1e-9) <= sharp[i] <= found
                assert exhaustive.evaluator.least_s(group.setting(i)) <= found
                expected = min(expected, found / (1 + 1e-9))
    result = search(model, cluster, TRAIN)
    assert result.plan.prediction["step_time_s"] == pytest.approx(expected, rel=1e-9)
    assert result.statistics["status"] == "optimal"
    assert result.statistics["solved"] < result.statistics["candidates"]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_never_bounds_too_high(llama: TracedModel, seed: int) -> None:
    """Whatever partitions were priced before, over more cp or less, larger or smaller, with all overlap there is."""
    stack = StackSpec(overlap=("dp_reduce", "tp_linear", "tp_ring", "pp_send"))
    cluster = replace(preset("dgx-a100-80g", 1), stack=stack)
    run = Run(llama, cluster, TrainSpec(global_batch=16, seq_len=4096), Pins())
    order = random.Random(seed).sample(run.partitions, len(run.partitions))
    told = 0
    for partition in order:
        rough = run.evaluator.rough_bound_s(partition)
        quick = min(float(run.evaluator.bounds_s(group).min()) for group in run.groups(partition))
        assert rough <= run.evaluator.block_bound_s(partition) * (1 + 1e-9)
        assert run.evaluator.block_bound_s(partition) <= quick * (1 + 1e-9)
        told += rough > 0.5 * quick
    assert told > len(order) // 3


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_weight_is_held_once_on_each_stage_that_uses_it(gpt: TracedModel, pp: int) -> None:
    plan = search(gpt, preset("local", pp), TRAIN, Pins(pp=pp)).plan
    held = sum(stage["parameters"] for stage in plan.prediction["peak_memory_bytes"])
    again = gpt.parameters["tokens.weight"].numel if pp > 1 else 0
    assert held == 4 * (gpt.parameter_count + again)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_frozen_parameters_have_neither_gradients_nor_state(gpt: TracedModel, zero: int) -> None:
    """Against the same model with nothing frozen; below ZeRO 3 they stay whole. At the peak of the second micro-batch,
    which finds the gradients of the first."""
    model = models.tiny_gpt(dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn" in name or name.startswith("blocks.0"))
    traced = prepare(trace(model, models.default_batch()))
    trained = sum(p.numel for p in traced.parameters.values() if p.requires_grad)
    total = traced.parameter_count
    assert 0 < trained < total
    pins = Pins(dp=4, zero=zero, microbatch=1, checkpoint="none")
    plans = [search(model, cluster_of(1 << 30), TRAIN, pins).plan for model in (traced, gpt)]
    (frozen,), (full,) = (plan.prediction["peak_memory_bytes"] for plan in plans)
    assert full["gradients"] > 0
    ranks = 4 if zero else 1
    assert full["optimizer"] == pytest.approx(8 * total / ranks, rel=1e-3)
    assert frozen["optimizer"] == pytest.approx(8 * trained / ranks, rel=1e-3)
    assert frozen["gradients"] == pytest.approx(full["gradients"] * trained / total, rel=1e-3)
    own = 4 * trained / ranks + (4 * trained if zero == 1 else 0)
    assert frozen["parameters"] == pytest.approx(own + 4 * (total - trained) / (ranks if zero == 3 else 1), rel=1e-3)
    assert plans[0].prediction["time_s"]["optimizer"] < plans[1].prediction["time_s"]["optimizer"]


def test_same_input_same_plan(gpt: TracedModel) -> None:
    first, second = (search(gpt, preset("local", 4), TRAIN, Pins(tp=2)).plan for _ in range(2))
    assert first.dumps() == second.dumps()


def test_prediction_adds_up(llama: TracedModel) -> None:
    plan = search(llama, preset("local", 4), TRAIN, Pins(tp=2, pp=2)).plan
    prediction = plan.prediction
    assert set(prediction["time_s"]) == set(TIME_PARTS)
    assert sum(prediction["time_s"].values()) == pytest.approx(prediction["step_time_s"])
    for stage in prediction["peak_memory_bytes"]:
        parts = sum(value for name, value in stage.items() if name != "total")
        assert parts == pytest.approx(stage["total"], abs=8)
    # 2 x 16 x 8 tokens through 4 layers and the head, forward and twice that backward; attention is causal
    tokens, hidden, ffn, vocab = 128, 32, 64, 64
    kv = sum(p.numel for name, p in llama.parameters.items() if "layers.0" in name and len(p.shape) == 2)
    matmul = 4 * kv + hidden * vocab
    attention = 4 * 8 * 4 * (hidden // 4) * 16 * 16  # layers x batch x heads x head_dim x seq^2, two matmuls, half
    assert ffn < hidden * 4
    assert prediction["model_flops"] == pytest.approx(6 * matmul * tokens + 3 * 2 * attention)


@pytest.mark.parametrize(
    "pins",
    [Pins(tp=2, sp=True), Pins(tp=2, sp=False), Pins(pp=2, checkpoint="full"), Pins(dp=4, microbatch=1),
     Pins(tp=2, pp=2, schedule="gpipe"), Pins(tp=4)],
)  # fmt: skip
def test_pins_are_kept_and_the_plan_propagates(llama: TracedModel, pins: Pins) -> None:
    plan = search(llama, preset("local", 4), TRAIN, pins).plan
    for axis in ("dp", "tp", "pp"):
        if getattr(pins, axis) is not None:
            assert getattr(plan.degrees, axis) == getattr(pins, axis)
    assert pins.sp in (None, plan.sequence_sharding)
    assert pins.microbatch in (None, plan.micro_batch)
    assert pins.schedule in (None, plan.schedule)
    if pins.checkpoint == "full":
        assert {plan.checkpoint_mode(s.path) for s in llama.layers} == {"full"}
    assert Plan.loads(plan.dumps()) == plan
    assert [path for stage in plan.layer_paths() for path in stage] == [s.path for s in llama.layers]
    if plan.degrees.tp > 1:
        assert propagate(llama, plan).strategy  # raises if the plan names what the rules do not allow


def test_module_pin_decides_the_weight(llama: TracedModel) -> None:
    free = search(llama, preset("local", 4), TRAIN, Pins(tp=2)).plan
    pins = Pins(tp=2, modules={"model.layers.*.mlp.down_proj": "replicate"})
    pinned = search(llama, preset("local", 4), TRAIN, pins).plan
    path = "model.layers.1.mlp.down_proj.weight"
    assert (free.parameter_placement(path), pinned.parameter_placement(path)) == ("S(1)", "R")


def test_a_pin_of_one_layer_is_of_that_layer_alone(llama: TracedModel) -> None:
    """Equal layers are set apart by it; where several pins name a weight the most specific one places it."""
    one, rest, every = (f"model.layers.{layers}.mlp.down_proj" for layers in ("1", "2-3", "*"))
    for modules, replicated in (
        ({one: "replicate"}, [1]),
        ({every: "replicate", rest: "shard(1)"}, [0, 1]),
        ({f"{every}.weight": "replicate", every: "shard(1)", one: "shard(1)"}, [0, 2, 3]),
    ):
        plan = search(llama, preset("local", 4), TRAIN, Pins(tp=2, modules=modules)).plan
        placed = [plan.parameter_placement(f"{s.path}.mlp.down_proj.weight") for s in llama.layers]
        assert placed == ["R" if i in replicated else "S(1)" for i in range(4)], modules
        assert propagate(llama, plan).strategy


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        (Pins(tp=3), "tp 3 does not divide the 4 devices"),
        (Pins(dp=1, tp=1, pp=1, cp=1), "uses 1 of the 4 devices"),
        (Pins(microbatch=3), "microbatch 3 does not divide the global batch of 8"),
    ],
)
def test_impossible_pins_are_refused_by_name(llama: TracedModel, pins: Pins, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        search(llama, preset("local", 4), TRAIN, pins)


def test_a_tp_that_cannot_shard_heads_lists_the_legal_ones(llama: TracedModel) -> None:
    with pytest.raises(InfeasiblePlanError, match=r"tp=8 cannot shard.*tp one of 1, 2, 4"):
        search(llama, preset("local", 8), TRAIN, Pins(tp=8))


def test_too_little_memory_says_what_is_missing(gpt: TracedModel) -> None:
    with pytest.raises(InfeasiblePlanError, match=r"lacks (\d+) bytes .* on stage \d") as caught:
        search(gpt, cluster_of(100_000), TRAIN)
    missing = int(str(caught.value).split("lacks ")[1].split(" bytes")[0])
    assert search(gpt, cluster_of(100_000 + missing + 1), TRAIN).plan.prediction["step_time_s"] > 0
    with pytest.raises(InfeasiblePlanError):
        search(gpt, cluster_of(100_000 + missing - 64), TRAIN)


def test_less_memory_costs_recompute_not_feasibility(gpt: TracedModel) -> None:
    pins = Pins(dp=4, microbatch=2)
    roomy = search(gpt, cluster_of(1 << 30), TRAIN, pins).plan
    peak = roomy.prediction["peak_memory_bytes"][0]["total"]
    tight = search(gpt, cluster_of(peak - 1), TRAIN, pins).plan
    assert not roomy.checkpoint
    assert tight.checkpoint
    assert tight.prediction["peak_memory_bytes"][0]["total"] < peak
    assert tight.prediction["time_s"]["recompute"] > 0


def test_the_heaviest_stage_counts() -> None:
    """Field case pm-01: stages of 1, 2 and 1 layers hold 11328, 18560 and 11360 parameters; 18560 decides."""
    traced = prepare(trace(models.llama_tiny(dtype=torch.float32), models.default_batch()))
    assert traced.parameter_count == 41248
    run = Run(traced, preset("local", 3), TrainSpec(global_batch=6, seq_len=16), Pins(pp=3))
    partition = next(p for p in run.partitions if p.micro_batch == 1)
    setting = next(s for s in settings_of(partition, run.limits, run.pins) if s.zero == 0 and s.virtual_stages == 1)
    evaluation = run.evaluator.detailed(run.evaluator.evaluate(setting))
    held = sorted(stage["parameters"] // 4 for stage in evaluation.memory)
    assert held == [11328, 11360, 18560]


def test_alternatives_are_slower_and_say_why(llama: TracedModel) -> None:
    result = search(llama, preset("local", 4), TRAIN)
    chosen = result.plan.prediction["step_time_s"]
    assert len(result.alternatives) == 5
    times = [a.step_time_s for a in result.alternatives]
    assert all(t is not None and t >= chosen * (1 - 1e-9) for t in times)
    assert times == sorted(times)
    assert all(a.reason for a in result.alternatives)
