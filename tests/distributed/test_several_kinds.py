"""Layers of several kinds: plans that the search finds, with chunks and with segments, train as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from autopar.cost_model.search import search
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.plan import Plan
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
