"""Field case pt-03: a large activation right after the embedding stays sharded, and the report shows its bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.cost_model.search import search
from autopar.hardware import preset
from autopar.passes import prepare
from autopar.reports.text import render
from autopar.specs import Pins, TrainSpec
from autopar.trace import trace
from tests import models

SEQ, HIDDEN, BATCH = 8192, 4096, 32


@pytest.mark.parametrize("pins", [Pins(), Pins(tp=8, microbatch=4)], ids=["free", "tp=8"])
def test_pt_03_the_embedding_stays_sharded(pins: Pins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "POSITIONS", SEQ)
    with torch.device("meta"):
        model = models.TinyGPT(vocab=1024, dim=HIDDEN, layers=2, heads=32).to(torch.bfloat16)
    traced = prepare(trace(model, models.default_batch()))
    cluster = preset("dgx-h100", 1)
    result = search(traced, cluster, TrainSpec(global_batch=BATCH, seq_len=SEQ), pins)
    plan, d = result.plan, result.plan.degrees
    assert d.dp * d.cp > 1 or plan.sequence_sharding
    entries = plan.prediction["largest_activations"]
    assert len(entries) == 5
    assert all(first["bytes"] >= second["bytes"] for first, second in itertools.pairwise(entries))
    # the MLP's inner activation is four times the residual stream, of which tp shards the columns
    inner = plan.micro_batch * SEQ * 4 * HIDDEN * 2 // (d.cp * d.tp)
    assert entries[0]["bytes"] >= inner
    assert entries[0]["layers"] == 2
    report = render(plan, result, cluster=cluster)
    assert "Largest tensors kept for the backward" in report
    assert entries[0]["tensor"] in report
