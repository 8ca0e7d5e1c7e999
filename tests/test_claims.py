"""Every number of docs/claims.md, recomputed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar import passes
from autopar.cost_model.comm_cost import GroupCost
from autopar.cost_model.memory import recipe
from autopar.cost_model.schedule_sim import StageTime, Timeline, simulate
from autopar.cost_model.search import search
from autopar.dryrun import dry_run_captured
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.models import example_from_config, resolve
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

DOCUMENT = Path(__file__).parent.parent / "docs" / "claims.md"
LAYERS, WIDTH, LAYER_PATHS = 6, 4096, "model.layers.0-5"


def row(number: int) -> str:
    """The computed column of a line."""
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {number} |")]
    assert len(lines) == 1
    return lines[0].split("|")[4]


def assert_stated(number: int, *texts: str) -> None:
    assert [text for text in texts if text not in row(number)] == []


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=WIDTH, intermediate_size=11008, num_hidden_layers=LAYERS, num_attention_heads=32
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train().to(torch.bfloat16)
    return passes.prepare(trace(model, example_from_config(config)))


@pytest.fixture(scope="module")
def parameters_of_175b() -> int:
    return sum(p.numel() for p in resolve("gpt3-175b").build(device="meta").parameters())


def test_1_bytes_of_adam(parameters_of_175b: int) -> None:
    pure, mixed = recipe("bf16", "adamw"), recipe("bf16-mixed", "adamw")
    wide = recipe("bf16-mixed", "adamw", gradient_dtype="fp32")
    without_master = pure.parameter_bytes + pure.gradient_bytes + 2 * 4
    sizes = (pure.total_bytes, without_master, mixed.total_bytes, wide.total_bytes)
    names = ("pure 16-bit", "the list", "mixed precision", "with fp32 gradients")
    for name, size in zip(names, sizes, strict=True):
        assert_stated(1, f"{name} {size} bytes, {size * parameters_of_175b / 1e12:.2f} TB")


def test_2_flops_of_training(llama: TracedModel) -> None:
    seq, batch = 4096, 4
    single = dataclasses.replace(ClusterSpec.preset("dgx-a100-80g"), num_devices=1, links=())
    plan = search(llama, single, TrainSpec(global_batch=batch, seq_len=seq), Pins(microbatch=1)).plan
    counted = plan.prediction["model_flops"]
    matrices = [p for name, p in llama.parameters.items() if len(p.shape) == 2 and "embed" not in name]
    linear = 6 * sum(p.numel for p in matrices) * seq * batch
    attention = 6 * LAYERS * WIDTH * seq * seq * batch
    claimed = 6 * sum(p.numel for p in matrices) * seq * seq * batch
    assert_stated(
        2, f"6 N T is {100 * linear / counted:.1f} %", f"with attention {100 * (linear + attention) / counted:.1f} %"
    )
    assert_stated(2, f"the claim is {claimed / counted:.0f} times too much")


def test_3_bytes_of_an_all_reduce() -> None:
    ring = GroupCost(8, 1.0, 0.0).seconds("all_reduce", 1.0)
    in_network = GroupCost(8, 1.0, 0.0, reduces_in_network=True).seconds("all_reduce", 1.0)
    assert_stated(3, f"{ring:.2f} of the tensor a rank", f"in the network {in_network:.2f}")


def test_4_bubbles() -> None:
    def run(schedule: str, chunks: int = 1) -> Timeline:
        stage = StageTime(1.0 / chunks, 2.0 / chunks, 1.0 / chunks)
        return simulate(schedule, [stage] * (8 * chunks), 32, virtual_stages=chunks)

    gpipe, eager = run("gpipe"), run("1f1b")
    assert gpipe.step_s == eager.step_s
    assert_stated(
        4, f"idle {100 * eager.idle_fraction:.1f} % both", f"{100 * (1 - eager.step_s / gpipe.step_s):.1f} % saved"
    )
    assert_stated(4, f"of {eager.peak_in_flight(0)} instead of {gpipe.peak_in_flight(0)} micro-batches")
    assert_stated(4, f"(4 chunks) {100 * run('interleaved', 4).idle_fraction:.1f} %")
    assert_stated(4, f"zero-bubble {100 * run('zero-bubble').idle_fraction:.1f} %")


def held(traced: TracedModel, category: str, **changes: object) -> int:
    """Bytes of a category, or in total, at the peak of rank 0."""
    values = {
        "global_batch": 1, "seq_len": 4096, "micro_batch": 1, "stages": ((LAYER_PATHS,),), "precision": "bf16",
    } | changes  # fmt: skip
    memory = dry_run_captured(Plan(**values), traced, [0]).ranks[0].memory  # type: ignore[arg-type]
    return next(r.measured for r in memory if r.category == category)


def test_5_checkpoints(llama: TracedModel) -> None:
    """What one more recomputed layer saves is what it keeps less its input."""
    two, three = (held(llama, "activations", checkpoint={f"model.layers.0-{n}": "full"}) for n in (1, 2))
    border = 4096 * WIDTH * 2
    layer = two - three + border
    layers, every = 32, 3
    saved = 1 - (-(-layers // every) * border + every * layer) / (layers * layer)
    assert_stated(5, f"{100 * saved:.0f} % of the activations saved")
    single = dataclasses.replace(ClusterSpec.preset("dgx-a100-80g"), num_devices=1, links=())
    pins = Pins(microbatch=1, checkpoint="full", checkpoint_segment=every)
    parts = search(llama, single, TrainSpec(global_batch=4, seq_len=4096), pins).plan.prediction["time_s"]
    # Neither run again: the ends (1 % of the forward here), and of every third layer the product that nothing reads.
    again = 100 * parts["recompute"] / parts["forward"]
    assert again == pytest.approx(_number(5, r"([\d.]+) % more forward, "), abs=1.0)
    share = 100 * parts["recompute"] / (parts["recompute"] + parts["forward"] + parts["backward"])
    assert share == pytest.approx(_number(5, r"([\d.]+) % of the executed work"), abs=1.5)


def test_6_memory_of_175b_on_8_8_4(parameters_of_175b: int) -> None:
    mixed = recipe("bf16-mixed", "adamw")
    whole = mixed.total_bytes * parameters_of_175b / 1e9
    sharded = (mixed.parameter_bytes + mixed.gradient_bytes + mixed.optimizer_bytes / 4) * parameters_of_175b / 1e9 / 64
    assert_stated(6, f"whole {whole:.0f} GB", f"{whole / 64:.1f} GB a GPU", f"with ZeRO-1 over dp {sharded:.1f} GB")


@pytest.mark.parametrize(("kind", "says"), [("ring", "with the ring"), ("all-gather", "with all-gather")])
def test_7_context_parallel(llama: TracedModel, kind: str, says: str) -> None:
    short = held(llama, "total", seq_len=8192)
    long = held(llama, "total", seq_len=65536, degrees=Degrees(cp=8), context_parallel=kind)
    stated = _number(7, rf"([\d.]+) % (?:more )?{says}")
    assert 100 * (long / short - 1) == pytest.approx(stated, abs=0.3)


def test_8_overlap_fusion_accumulation(llama: TracedModel) -> None:
    def rate(elementwise: str, overlap: tuple[str, ...], micro_batches: int) -> float:
        cluster = ClusterSpec.preset("dgx-a100-80g", nodes=2)
        stack = dataclasses.replace(cluster.stack, elementwise=elementwise, overlap=overlap)
        train = TrainSpec(global_batch=16 * micro_batches, seq_len=2048)
        pins = Pins(dp=16, microbatch=1, checkpoint="none", zero=0)
        plan = search(llama, dataclasses.replace(cluster, stack=stack), train, pins).plan
        return float(plan.prediction["tokens_per_s_per_device"])

    plain = rate("eager", (), 1)
    for says, choices in {
        "overlap": ("eager", ("dp_reduce",), 1),
        "fusion": ("te", (), 1),
        "8 micro-batches": ("eager", (), 8),
        "all three": ("te", ("dp_reduce",), 8),
    }.items():
        gain = 100 * (rate(*choices) / plain - 1)  # type: ignore[arg-type]
        assert gain == pytest.approx(_number(8, rf"{says} ([\d.]+) %"), abs=5.0), says


def _number(line: int, pattern: str) -> float:
    found = re.search(pattern, row(line))
    assert found is not None, pattern
    return float(found.group(1))
