"""Field cases loss-01, 02, 03, 05: the loss is the mean over all tokens that count, however the batch is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models, plans

LAYERS = (("model.layers.0-3",),)
HALVES = (("model.layers.0-1",), ("model.layers.2-3",))


def llama(valid: tuple[int, ...]) -> tuple[nn.Module, dict[str, Any]]:
    """Row i has labels on its first valid[i] positions only."""
    batch = models.default_batch(rows=len(valid))
    counted = torch.arange(16) < torch.tensor(valid)[:, None]
    return models.llama_tiny(), {**batch, "labels": batch["labels"].masked_fill(~counted, -100)}


def _plan(degrees: Degrees, micro_batch: int, stages: tuple[tuple[str, ...], ...] = LAYERS, rows: int = 8) -> Plan:
    return Plan(
        degrees=degrees, global_batch=rows, seq_len=16, micro_batch=micro_batch, stages=stages, precision="fp64"
    )


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_01_unequal_counts_over_cp(ranks: int) -> None:
    results = verify_plans(partial(llama, (6, 2)), [_plan(Degrees(cp=ranks), 2, rows=2)], steps=3)
    assert all(r.passed for r in results), results[0].text()


def test_loss_02_unequal_counts_over_micro_batches() -> None:
    model, batch = llama((16, 16, 16, 16, 2, 2, 2, 2))
    traced = prepare(trace(model, batch))
    reference = model(**batch)
    reference.loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for micro_batch in (8, 4, 2):
        model.zero_grad()
        pm = build(model, traced, _plan(Degrees(), micro_batch))
        loss = pm.step(batch)
        assert abs(loss.item() - reference.loss.item()) < 1e-6
        for name, p in pm.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-6, atol=1e-7)


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    return models.gpt2_tiny(), models.default_batch()


@pytest.mark.distributed
def test_loss_03_pipeline_gradients_do_not_grow_with_micro_batches() -> None:
    wanted = [plans.megatron("gpt2", Degrees(pp=2), micro_batch=size) for size in (8, 4, 2, 1)]
    results = verify_plans(gpt2, wanted)
    assert all(r.passed for r in results), "\n".join(r.text() for r in results)


@pytest.mark.distributed
def test_loss_05_replicas_with_unequal_counts() -> None:
    results = verify_plans(
        partial(llama, (14, 14, 14, 14, 3, 3, 3, 3)), [_plan(Degrees(dp=2), 4), _plan(Degrees(pp=2), 2, HALVES)]
    )
    assert all(r.passed for r in results), "\n".join(r.text() for r in results)
