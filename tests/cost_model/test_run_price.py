"""Steps and memory of given layouts: closed forms that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.block_layout import BlockWork
from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.constant_table import load_constants
from autopar.cost_model.kernels import ATTENTION, MATMUL, Kernel, Kernels
from autopar.cost_model.machine import Machine
from autopar.cost_model.run_memory import in_flight, run_memory
from autopar.cost_model.run_price import RunLayout, RunWork, StackTraits, price_run, stage_layers
from autopar.hardware import preset
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec

NOTHING = BlockWork(Kernels(()), Kernels(()), (), 0.0, 0.0)
LAYER = BlockWork(
    Kernels([Kernel(MATMUL, m=4096, n=4096, k=4096)]),
    Kernels([Kernel(MATMUL, m=4096, n=4096, k=4096, backward=i) for i in (1, 2)]),
    (("all_reduce", 32e6, 0), ("all_reduce", 32e6, 1)), saved_bytes=100e6, working_bytes=10e6,
)  # fmt: skip
WORK = RunWork(LAYER, NOTHING, NOTHING, 16e6, 0.0, 0.0, 1e6, 0.0, 0.0)
LAYOUT = RunLayout(degrees=Degrees(pp=4, dp=2), layers=16, seq_len=4096, micro_batch=1, micro_batches=8, zero_shard=2)
CLUSTER = preset("dgx-h100", 1)


def step(layout: RunLayout, cluster: ClusterSpec = CLUSTER, work: RunWork = WORK, **traits: object) -> dict[str, float]:
    constants = load_constants()
    machine = Machine.of(cluster.device, cluster.stack, "bf16" if cluster is CLUSTER else "fp32")
    table = constants.of(cluster.device)
    return price_run(work, layout, cluster, StackTraits(**traits), machine, table)  # type: ignore[arg-type]


def test_parts_add_up() -> None:
    parts = step(LAYOUT)
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"))


def test_interleaving_divides_the_bubble_and_multiplies_the_sends() -> None:
    plain, twice = step(LAYOUT), step(replace(LAYOUT, virtual_stages=2))
    assert plain["bubble"] / plain["forward"] > 3 / 8  # (p - 1) / m of a step that is more than its forward
    work = ("forward", "backward", "accumulation")
    busy = sum(plain[k] for k in work)
    assert plain["bubble"] == pytest.approx(3 / 8 * (busy + plain["pp"]))
    assert twice["bubble"] == pytest.approx(3 / 8 / 2 * (busy + twice["pp"]))
    assert twice["pp"] == pytest.approx(2 * plain["pp"])


def test_full_recomputation_repeats_the_forward() -> None:
    again = step(replace(LAYOUT, recompute="full"))
    assert again["recompute"] == pytest.approx(again["forward"])
    assert step(LAYOUT)["recompute"] == 0.0


def test_what_hides_depends_on_what_the_stack_declares() -> None:
    layout = replace(LAYOUT, degrees=Degrees(dp=8), zero_shard=8, zero=3)
    assert step(layout, overlap=("dp",), fully_sharded=True)["dp"] < step(layout, overlap=(), fully_sharded=True)["dp"]
    tensor = replace(LAYOUT, degrees=Degrees(tp=8), zero_shard=1)
    plain, linear = step(tensor, overlap=())["tp"], step(tensor, overlap=("tp_linear",))["tp"]
    assert plain / 2 <= linear < plain  # the backward half at most


@pytest.mark.parametrize(
    ("part", "axis", "declared", "zero"),
    [("dp", "dp", "dp", 0), ("dp", "dp", "dp", 1), ("dp", "dp", "dp", 3), ("tp", "tp", "tp", 0),
     ("tp", "tp", "tp_linear", 0), ("pp", "pp", "pp", 0)],
)  # fmt: skip
def test_on_a_cpu_nothing_hides(part: str, axis: str, declared: str, zero: int) -> None:
    layout = replace(LAYOUT, degrees=Degrees(**{axis: 8}), zero=zero, zero_shard=8 if zero else 1)
    for cluster, hides in ((CLUSTER, True), (preset("local", 8), False)):
        declares, bare = (step(layout, cluster, overlap=overlap, fully_sharded=True) for overlap in ((declared,), ()))
        assert (declares[part] < bare[part]) == hides
        assert declares[part] == pytest.approx(bare[part]) or hides


def test_a_ring_over_cp_hides_behind_attention_on_a_gpu_alone() -> None:
    core = Kernel(ATTENTION, m=4096, n=4096, k=128, batch=32)
    layer = replace(LAYER, forward=Kernels([core]), backward=Kernels([core._replace(backward=1)]))
    work = RunWork(layer, NOTHING, NOTHING, 16e6, 0.0, 0.0, 1e6, 8e6, 8e6)
    layout = replace(LAYOUT, degrees=Degrees(cp=8), zero_shard=1)
    for cluster, hides in ((CLUSTER, True), (preset("local", 8), False)):
        group = group_cost(cluster, layout.degrees, "cp")
        exchanges = (7 + 7 + 8) * group.seconds("send", 8e6)  # keys forward; keys, and their gradients home, backward
        whole = 16 * 8 * exchanges  # layers, micro-batches
        assert step(layout, cluster, work)["cp"] == pytest.approx(whole * (1 - 0.8 * 7 / 8 if hides else 1))


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(float("inf"), 1), (64e6, 8), (512e6, 1), (500e6, 2)])
def test_sums_without_zero_pay_latency_for_each_bucket(bucket_bytes: float, messages: int) -> None:
    """16 layers of 16e6 parameters, in 2 bytes: 512 MB."""
    layout = replace(LAYOUT, degrees=Degrees(dp=8), zero=0, zero_shard=1)
    group = group_cost(CLUSTER, layout.degrees, "dp")
    parts = step(layout, overlap=(), bucket_bytes=bucket_bytes)
    assert parts["dp"] == pytest.approx(messages * group.seconds("all_reduce", 512e6 / messages))


@pytest.mark.parametrize(("fully_sharded", "messages"), [(True, 17), (False, 1)])
def test_sums_with_zero_pay_latency_for_each_unit(fully_sharded: bool, messages: int) -> None:
    """16 layers and the ends are units of FSDP."""
    layout = replace(LAYOUT, degrees=Degrees(dp=8), zero=1, zero_shard=8)
    group = group_cost(CLUSTER, layout.degrees, "dp")
    parts = step(layout, overlap=(), bucket_bytes=1e6, fully_sharded=fully_sharded)
    each = (group.seconds(kind, 512e6 / messages) for kind in ("reduce_scatter", "all_gather"))
    assert parts["dp"] == pytest.approx(messages * sum(each))


@pytest.mark.parametrize(
    ("layers", "pp", "virtual", "expected"),
    [(8, 4, 1, (2, 2, 2, 2)), (78, 12, 1, (7,) * 6 + (6,) * 6), (82, 12, 1, (6, *(7,) * 10, 6)),
     (126, 8, 4, (15, *(16,) * 6, 15)), (5, 2, 1, (3, 2))],
)  # fmt: skip
def test_layers_of_stages(layers: int, pp: int, virtual: int, expected: tuple[int, ...]) -> None:
    counts = stage_layers(layers, pp, virtual)
    assert counts == expected
    assert sum(counts) == layers


def test_micro_batches_in_flight() -> None:
    """Field case pm-03: 1F1B with 4 stages holds 4, 3, 2, 1; interleaving holds more."""
    assert [in_flight(LAYOUT, s) for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(replace(LAYOUT, micro_batches=2), s) for s in range(4)] == [2, 2, 2, 1]
    assert in_flight(replace(LAYOUT, virtual_stages=2), 0) == (3 * 2 + 4 + 1) / 2


def test_mixed_adam_takes_16_to_18_bytes_a_parameter() -> None:
    """175B on 256 devices as 8 x 8 x 4: 2.7 billion parameters a rank, 43 to 49 GB of state before ZeRO."""
    layout = replace(LAYOUT, degrees=Degrees(tp=8, pp=8, dp=4), layers=96, zero_shard=4)
    work = replace(WORK, layer_parameters=175e9 / 96 / 8)
    constants = load_constants().of(CLUSTER.device)
    for gradient_bytes, per_parameter in ((2, 16), (4, 18)):
        parts = run_memory(work, layout, StackTraits(gradient_bytes=gradient_bytes), constants).parts
        state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        assert state == pytest.approx(per_parameter * 175e9 / 64)
    sharded = run_memory(work, replace(layout, zero=1), StackTraits(), constants).parts
    assert sharded["optimizer"] == pytest.approx(12 * 175e9 / 64 / 4)


def test_full_recomputation_keeps_inputs_only() -> None:
    constants = load_constants().of(CLUSTER.device)
    kept = run_memory(WORK, LAYOUT, StackTraits(), constants)
    again = run_memory(WORK, replace(LAYOUT, recompute="full"), StackTraits(), constants)
    assert kept.parts["activations"] == pytest.approx(4 * 4 * 100e6)
    assert again.parts["activations"] == pytest.approx(4 * 4 * 1e6)
    assert again.parts["working"] - kept.parts["working"] == pytest.approx(100e6)
    assert kept.allocated < kept.reserved < kept.device
