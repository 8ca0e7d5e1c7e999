"""Field cases vp-03 and loss-07: the loss outside the model, and models that are called with their labels inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.build import build
from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

TARGET = "target"


def user_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Written for whole logits."""
    assert logits.shape == (8, 16, 64)
    return F.cross_entropy(logits.view(-1, 64), target.view(-1))


def _outside(plan_name: str) -> tuple[float, dict[str, Tensor]]:
    """The user's script: call, loss, backward. Under pp its documented form, `loss_fn` and `step`."""
    batch = models.default_batch()
    model, degrees = models.tiny_gpt(), Degrees(tp=2) if plan_name == "tp" else Degrees(pp=2)
    plan = plans.megatron("tiny_gpt", degrees, micro_batch=2)
    if plan_name == "tp":
        pm = build(model, prepare(trace(model, {"input_ids": batch["input_ids"]})), plan)
        loss = user_loss(pm(batch["input_ids"]), batch["labels"])
        loss.backward()
        return loss.item(), _gradients(pm)
    example = {"input_ids": batch["input_ids"], TARGET: batch["labels"]}
    traced = prepare(trace(model, example, loss_fn=lambda logits, b: _flat_loss(logits, b[TARGET])))
    pm = build(model, traced, plan)
    with pytest.raises(AutoparError, match=r"a pipelined model runs by micro-batches only.*pm\.step\(batch\)"):
        pm(**example)
    return pm.step(example).item(), _gradients(pm)


def _flat_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _gradients(pm: Any) -> dict[str, Tensor]:
    return {n: g for n, g in pm.full_gradients().items() if g is not None}


@pytest.mark.distributed
@pytest.mark.parametrize("plan_name", ["tp", "pp"])
def test_vp_03_the_users_own_loss(plan_name: str) -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    reference = user_loss(model(batch["input_ids"]), batch["labels"])
    reference.backward()
    for loss, gradients in run_ranks(2, _outside, plan_name):
        assert loss == pytest.approx(reference.item(), rel=1e-10)
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-12)


def _ragged() -> dict[str, Tensor]:
    batch = models.default_batch()
    kept = torch.arange(16) < torch.tensor([16, 3, 9, 12, 2, 5, 7, 11])[:, None]
    return {"input_ids": batch["input_ids"], "attention_mask": kept.long(),
            "labels": batch["labels"].masked_fill(~kept, -100)}  # fmt: skip


def _inside(degrees: Degrees) -> tuple[float, dict[str, Tensor]]:
    model, batch = models.qwen3_tiny(), _ragged()
    pm = build(model, prepare(trace(model, batch)), plans.megatron("qwen3", degrees, micro_batch=2))
    if degrees.pp > 1:
        return pm.step(batch).item(), _gradients(pm)
    loss = pm(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    loss.backward()
    return loss.item(), _gradients(pm)


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [Degrees(dp=2), Degrees(pp=2), Degrees(cp=2), Degrees(tp=2)], ids=str)
def test_loss_07_a_loss_inside_forward(degrees: Degrees) -> None:
    model, batch = models.qwen3_tiny(), _ragged()
    reference = model(**batch).loss
    reference.backward()
    for loss, gradients in run_ranks(2, _inside, degrees):
        assert loss == pytest.approx(reference.item(), rel=1e-6)
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-6, atol=1e-7)
