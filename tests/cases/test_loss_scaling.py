"""Field cases loss-01, 02, 03, 05: the loss is the mean over all tokens that count, however the batch is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.build import build
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


class Weighted(nn.Module):
    """Cross entropy by token weights, a z-loss, and a head of its own for whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.tiny_gpt()
        self.kind = nn.Linear(models.VOCAB, 3)

    def forward(self, input_ids: Tensor, targets: Tensor, weight: Tensor, kind: Tensor) -> dict[str, Tensor]:
        logits = self.body(input_ids)
        each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        loss = (each * weight).sum() / weight.sum() + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean()
        loss = loss + 0.5 * nn.functional.cross_entropy(self.kind(logits[:, 0]), kind)
        return {"loss": loss, "logits": logits}


def weighted() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(3)
    batch = models.default_batch()
    weight = torch.rand(8, 16, dtype=torch.float64) * torch.arange(1, 9)[:, None]
    kind = torch.arange(8) % 3
    return Weighted().double(), {
        "input_ids": batch["input_ids"], "targets": batch["labels"].clone(), "weight": weight, "kind": kind,
    }  # fmt: skip


@pytest.mark.distributed
def test_loss_neighbours_terms_with_divisors_of_their_own() -> None:
    """Each term is divided by what the whole batch gives, under replicas, micro-batches, stages and cut sequences."""
    layers, halves = (("body.blocks.0-3",),), (("body.blocks.0-1",), ("body.blocks.2-3",))
    cut = [(Degrees(dp=2), layers), (Degrees(pp=2), halves), (Degrees(cp=2), layers)]
    results = verify_plans(weighted, [_plan(degrees, 2, stages) for degrees, stages in cut])
    assert all(r.passed for r in results), "\n".join(r.text() for r in results)
