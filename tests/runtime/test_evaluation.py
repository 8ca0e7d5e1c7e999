"""`step` under `torch.no_grad()` is the loss by forward alone, under any plan, and leaves training as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.build import build
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


def _plans() -> list[Plan]:
    pp, dp = Degrees(pp=2), Degrees(dp=2)
    piped = plans.megatron("tiny_gpt", pp, micro_batch=2)
    return [
        *(plans.megatron("tiny_gpt", dp, micro_batch=2).replace(zero=level) for level in (0, 1, 3)),
        plans.megatron("tiny_gpt", Degrees(tp=2), micro_batch=2),
        piped,
        piped.replace(schedule="gpipe"),
        piped.replace(overlap=(*piped.overlap, "pp_send")),
        plans.megatron("tiny_gpt", pp, schedule="interleaved", virtual_stages=2),
        plans.megatron("tiny_gpt", pp, schedule="zero-bubble"),
    ]


def _captured() -> tuple[nn.Module, TracedModel]:
    model = models.tiny_gpt()
    return model, prepare(trace(model, models.default_batch()))


def _trained_and_evaluated(module: nn.Module, step: Any, evaluate: Any, optimizer: Any) -> dict[str, Tensor]:
    """An evaluation with gradients pending, after a step, in evaluation mode, and of other sizes."""
    found: dict[str, Tensor] = {}
    for i in range(2):
        optimizer.zero_grad()
        step(models.default_batch(seed=i))
        with torch.no_grad():
            found[f"pending {i}"] = evaluate(models.default_batch(seed=7))
        optimizer.step()
        module.eval()
        with torch.no_grad():
            for rows, seq in ((8, 16), (3, 12), (1, 16)):
                found[f"{rows} x {seq}, {i}"] = evaluate(models.default_batch(rows, seq, seed=7))
        module.train()
    return {**found, **{name: value.detach().clone() for name, value in module.state_dict().items()}}


def _compare(shared: tuple[nn.Module, TracedModel]) -> None:
    model, traced = shared
    adam = {"lr": 1e-2, "eps": 1e-3}
    plain = copy.deepcopy(model)

    def backward(batch: dict[str, Tensor]) -> None:
        plain(**batch).backward()

    reference = torch.optim.AdamW(plain.parameters(), **adam)
    expected = _trained_and_evaluated(plain, backward, lambda batch: plain(**batch), reference)
    for plan in _plans():
        pm = build(copy.deepcopy(model), traced, plan)
        found = _trained_and_evaluated(pm, pm.step, pm.step, pm.optimizer(torch.optim.AdamW, **adam))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=f"{plan.schedule} {name}")


def test_evaluation_is_that_of_one_process_and_training_goes_on_from_where_it_was() -> None:
    run_ranks(2, _compare, once=_captured, timeout_s=200)
