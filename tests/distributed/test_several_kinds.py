"""Layers of several kinds: plans that the search finds, with chunks and with segments, train as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from autopar.cost_model.candidates import count_settings, settings_of
from autopar.cost_model.search import Run, search
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.ir import TracedModel
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.runtime.limits import refuse_unbuilt
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRAIN = TrainSpec(global_batch=8, seq_len=16, precision="fp64")
BUILDERS = {"windows": partial(models.gemma3_tiny, layers=6), "encoder-decoder": partial(models.t5_tiny, layers=3)}
PINS = {
    "chunks": "pp=2 virtual_stages=2 microbatch=1 checkpoint=selective-ops",
    "chunks, all again": "pp=2 virtual_stages=3 microbatch=1 checkpoint=full",
    "segments": "pp=2 checkpoint_segment=2 checkpoint=full",
    "segments, sharded": "tp=2 checkpoint_segment=4 checkpoint=full",
}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    return BUILDERS[name](), models.default_batch()


def tight(traced: TracedModel) -> Plan:
    """On a pipeline without the memory to keep everything."""
    cluster, pins = ClusterSpec.parse("local:2"), Pins.parse(["pp=2", "microbatch=1", "schedule=1f1b"])
    free = search(traced, cluster, TRAIN, pins).plan.prediction["peak_memory_bytes"]
    least = search(traced, cluster, TRAIN, Pins(**{**vars(pins), "checkpoint": "full", "checkpoint_segment": 2})).plan
    needed = max(stage["total"] for stage in least.prediction["peak_memory_bytes"])
    assert needed < max(stage["total"] for stage in free)
    return search(traced, cluster, TRAIN, pins, memory_bytes=needed).plan


@pytest.mark.parametrize("name", BUILDERS)
def test_chunks_and_segments_run(name: str) -> None:
    model, batch = build(name)
    traced = prepare(trace(model, batch))
    assert len({s.class_id for s in traced.layers}) > 1
    pinned, cluster = [Pins.parse(text.split()) for text in PINS.values()], ClusterSpec.parse("local:2")
    plans = [search(traced, cluster, TRAIN, pins).plan for pins in pinned]
    plans.append(tight(traced))
    assert [plan.virtual_stages for plan in plans[:4]] == [2, 3, 1, 1]
    results = verify_plans(partial(build, name), plans)
    failed = [r.text() for r in results if not r.passed]
    assert not failed, "\n\n".join(failed)


def test_a_split_backward_needs_one_chain() -> None:
    """A decoder's first layer has weights that meet before they meet what the encoder gives: torch would ask for their
    gradients twice. The search does not offer it, and the runtime refuses it."""
    traced, cluster = prepare(trace(*build("encoder-decoder"))), ClusterSpec.parse("local:2")
    assert search(traced, cluster, TRAIN, Pins(pp=2)).plan.schedule != "zero-bubble"
    with pytest.raises(InfeasiblePlanError, match="schedule"):
        search(traced, cluster, TRAIN, Pins(pp=2, schedule="zero-bubble"))
    plan = search(traced, cluster, TRAIN, Pins(pp=2, schedule="1f1b", microbatch=1)).plan.replace(
        schedule="zero-bubble"
    )
    with pytest.raises(SpecError, match="stage 1 meet at"):
        refuse_unbuilt(plan, traced, apply(traced, plan))
    model, batch = build("windows")
    windows = prepare(trace(model, batch))
    found = search(windows, cluster, TRAIN, Pins(pp=2, schedule="zero-bubble", microbatch=1)).plan
    refuse_unbuilt(found, windows, apply(windows, found))


def test_zero_shards_no_weight_that_chunks_of_a_rank_share() -> None:
    """T5's embedding is read by the encoder's first stage, the decoder's first and the head."""
    traced = prepare(trace(*build("encoder-decoder")))
    run = Run(traced, ClusterSpec.parse("local:4"), TRAIN, Pins(pp=2, virtual_stages=3))
    settings = [s for p in run.partitions for s in settings_of(p, run.limits, run.pins)]
    assert {s.zero for s in settings if s.degrees.dp == 2} == {0}
    assert len(settings) == count_settings(run.partitions, run.limits, run.pins)
