"""The space of the search: every pin is kept, and every plan is one that passes and runtime take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cost_model.candidates import enumerate_partitions, settings_of
from autopar.cost_model.search import Run, search
from autopar.errors import AutoparError, InfeasiblePlanError, SpecError
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.runtime.limits import refuse_unbuilt
from autopar.specs import Pins, TrainSpec
from autopar.trace import trace
from tests import models

TRAIN = TrainSpec(global_batch=16, seq_len=16)


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    return prepare(trace(models.llama4kv_tiny(dtype=torch.float32), models.default_batch()))


PINS = [
    "cp=2 context_parallel=ring", "cp=2 context_parallel=all-gather", "cp=2 context_parallel=all-to-all tp=2",
    "dp=4 zero=1", "dp=2 zero=2 tp=2", "dp=2 cp=2 zero=3", "pp=2 schedule=interleaved", "pp=2 virtual_stages=2 zero=1",
    "pp=2 schedule=zero-bubble", "pp=4 schedule=zero-bubble checkpoint=none", "checkpoint=selective",
    "checkpoint=selective-ops tp=2", "checkpoint=full checkpoint_segment=2 pp=2", "pp=2 schedule=gpipe dp=2",
    "dp=4 zero=3 zero_group=2", "tp=2 sp=true cp=2", "pp=4 microbatch=2",
]  # fmt: skip


@pytest.mark.parametrize("text", PINS)
def test_pins_are_kept_in_any_order_and_the_plan_runs(llama: TracedModel, text: str) -> None:
    texts = text.split()
    plan = search(llama, preset("local", 4), TRAIN, Pins.parse(texts)).plan
    assert plan.dumps() == search(llama, preset("local", 4), TRAIN, Pins.parse(texts[::-1])).plan.dumps()
    fields = {"dp": plan.degrees.dp, "cp": plan.degrees.cp, "tp": plan.degrees.tp, "pp": plan.degrees.pp,
              "sp": str(plan.sequence_sharding).lower(), "microbatch": plan.micro_batch}  # fmt: skip
    for pin in texts:
        name, _, value = pin.partition("=")
        if name == "checkpoint":
            assert {plan.checkpoint_mode(s.path) for s in llama.layers} == {value}
        else:
            assert str(fields.get(name, getattr(plan, name, None))) == value
    assert Plan.loads(plan.dumps()) == plan
    refuse_unbuilt(plan, llama, apply(llama, plan))


def test_chunks_that_share_a_weight_with_zero_are_refused_by_name() -> None:
    """T5's relative bias is read in every layer: alone each pin is possible, together they leave nothing to run."""
    traced = prepare(trace(models.t5_tiny(), models.default_batch()))
    texts = ["dp=2", "pp=2", "schedule=interleaved", "virtual_stages=2", "zero=1"]
    with pytest.raises(InfeasiblePlanError, match="zero 0 or one chunk a rank; without zero there would be plans"):
        search(traced, preset("local", 4), TRAIN, Pins.parse(texts))
    found = search(traced, preset("local", 4), TRAIN, Pins.parse([*texts[:-1], "zero=0"])).plan
    assert (found.zero, found.virtual_stages) == (0, 2)


def test_every_setting_of_the_space_is_one_the_runtime_takes(llama: TracedModel) -> None:
    """Not only the best: one plan of each kind of setting, as it would be written."""
    run = Run(llama, preset("local", 4), TRAIN, Pins())
    seen = set()
    for partition in run.partitions:
        for setting in settings_of(partition, run.limits, run.pins):
            kind = (setting.degrees, setting.schedule, setting.virtual_stages, setting.zero, setting.exchange)
            if kind in seen or partition.sequence_sharding:
                continue
            seen.add(kind)
            d = setting.degrees
            texts = [f"dp={d.dp}", f"cp={d.cp}", f"tp={d.tp}", f"pp={d.pp}", f"microbatch={setting.micro_batch}",
                     f"schedule={setting.schedule}", f"zero={setting.zero}", f"virtual_stages={setting.virtual_stages}",
                     f"context_parallel={setting.exchange}"]  # fmt: skip
            pins = Pins.parse(texts)
            again = enumerate_partitions(4, 16, 16, run.limits, pins)
            found = {s for p in again for s in settings_of(p, run.limits, pins) if not p.sequence_sharding}
            assert setting in found
    axes = [{getattr(k[0], axis) for k in seen} for axis in ("dp", "cp", "tp", "pp")]
    assert all(len(sizes) > 1 for sizes in axes)
    assert {k[1] for k in seen} == {"1f1b", "gpipe", "interleaved", "zero-bubble"}
    assert {k[3] for k in seen} == {0, 1, 2, 3}
    assert {k[4] for k in seen} == {"ring", "all-gather", "all-to-all"}


def test_all_to_all_needs_a_key_head_for_every_rank() -> None:
    """Four heads that share two keys: the keys are sent as they are, two heads of them."""
    grouped = prepare(trace(models.llama_tiny(dtype=torch.float32), models.default_batch()))
    run = Run(grouped, preset("local", 4), TRAIN, Pins())
    assert "all-to-all" in run.limits.exchanges(2, 1)
    assert run.limits.exchanges(4, 1) == run.limits.exchanges(2, 2) == ("ring", "all-gather")


@pytest.mark.parametrize("devices", [1, 3, 6, 12, 40])
def test_device_counts_that_are_no_powers_of_two(llama: TracedModel, devices: int) -> None:
    train = TrainSpec(global_batch=240, seq_len=16)
    plan = search(llama, preset("local", devices), train).plan
    assert plan.degrees.world_size == devices
    refuse_unbuilt(plan, llama, apply(llama, plan))


def test_thirty_layers_on_four_stages() -> None:
    model = models.TinyGPT(layers=30).to(torch.float32)
    traced = prepare(trace(model, models.default_batch()))
    plan = search(traced, preset("local", 4), TRAIN, Pins(pp=4)).plan
    sizes = [len(stage) for stage in plan.layer_paths()]
    assert sum(sizes) == 30
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("pins", "blamed"),
    [
        (Pins(pp=4, microbatch=8, schedule="1f1b"), "schedule"),
        (Pins(pp=2, schedule="interleaved", virtual_stages=4), "virtual_stages"),
        (Pins(pp=2, schedule="zero-bubble", zero=1), "zero"),
        (Pins(pp=2, schedule="zero-bubble", checkpoint="full"), "zero-bubble recomputes nothing"),
        (Pins(cp=2, tp=2, context_parallel="all-to-all", sp=True, pp=4), "pp"),
        (Pins(zero=1, tp=2, pp=2), "the pins leave one such rank on 4 devices"),
        (Pins(zero_group=3), "dp has to be a multiple of zero_group 3"),
        (Pins(pp=2, virtual_stages=9), "pp times chunks at most"),
    ],
)
def test_the_pin_that_leaves_nothing_is_named(llama: TracedModel, pins: Pins, blamed: str) -> None:
    with pytest.raises(AutoparError) as caught:
        search(llama, preset("local", 4), TRAIN, pins)
    assert blamed in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "remedy"),
    [
        ("pp=8", "pp one of 1, 2, 4"),
        ("virtual_stages=3", "virtual_stages one of 1, 2"),
        ("schedule=1f1b virtual_stages=2", "schedule interleaved, or virtual_stages 1"),
        ("dp=2 zero_group=4", "dp one of 4, 8, or zero_group one of 1, 2"),
        ("sp=true tp=1", "tp one of 2, 4, or sp false"),
        ("schedule=zero-bubble zero=1", "schedule one of gpipe, 1f1b, interleaved, or zero 0"),
    ],
)
def test_the_legal_values_that_are_named_are_legal_and_the_only_ones(
    llama: TracedModel, texts: str, remedy: str
) -> None:
    pins = Pins.parse(texts.split())
    with pytest.raises(InfeasiblePlanError) as caught:
        Run(llama, preset("local", 8), TRAIN, pins)
    assert caught.value.try_ == remedy
    options = {"pp": "1 2 4 8", "virtual_stages": "1 2 3 4", "dp": "1 2 4 8", "zero_group": "1 2 4 8",
               "zero": "0 1 2 3", "tp": "1 2 4 8", "sp": "true false",
               "schedule": "1f1b gpipe interleaved zero-bubble"}  # fmt: skip
    for text in texts.split():
        name = text.partition("=")[0]
        others = [other for other in texts.split() if other != text]
        legal = set()
        for value in options[name].split():
            try:
                Run(llama, preset("local", 8), TRAIN, Pins.parse([*others, f"{name}={value}"]))
            except AutoparError:
                continue
            legal.add(value)
        part = next((part for part in remedy.split(", or ") if part.startswith(f"{name} ")), name)
        assert set(part.removeprefix(name).removeprefix(" one of").replace(",", "").split()) == legal


def test_pinned_zero_has_an_effect(llama: TracedModel) -> None:
    """The fastest degrees may have a single data rank, where it would be left out without a word."""
    plan = search(llama, preset("local", 2), TRAIN, Pins(zero=2)).plan
    assert plan.zero == 2
    assert plan.degrees.dp * plan.degrees.cp > 1


def test_a_sequence_that_cannot_be_cut_is_named(llama: TracedModel) -> None:
    with pytest.raises(SpecError, match="4 equal parts.*cp 1$"):
        search(llama, preset("local", 4), TrainSpec(global_batch=16, seq_len=14), Pins(cp=4))


def test_layers_of_several_kinds_have_chunks_and_segments(llama: TracedModel) -> None:
    """Not both at once, which is said."""
    last = max(s.index for s in llama.segments if s.kind == "layer")
    kinds = tuple(replace(s, class_id="second") if s.index == last else s for s in llama.segments)
    mixed, cluster = replace(llama, segments=kinds), preset("local", 2)
    run = Run(mixed, cluster, TRAIN, Pins(pp=2))
    assert {s.virtual_stages for p in run.partitions for s in settings_of(p, run.limits, run.pins)} == {1, 2}
    plan = search(mixed, cluster, TRAIN, Pins(pp=2, virtual_stages=2, checkpoint="full")).plan
    assert [len(stage) for stage in plan.layer_paths()] == [1, 1, 1, 1]
    assert search(mixed, cluster, TRAIN, Pins(checkpoint_segment=2, checkpoint="full")).plan.checkpoint_segment == 2
    with pytest.raises(InfeasiblePlanError, match="segments over layers of several kinds a single chunk"):
        search(mixed, cluster, TRAIN, Pins(pp=2, virtual_stages=2, checkpoint_segment=2))
