"""Optimizers that read whole tensors train as in one process, whatever cuts the tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans
from tests.runtime.test_optimizers import Lars

STEPS = 3


def _matrices(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks")]


def _train_whole(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Matrices by Muon, the others by Lars, in one process."""
    named, matrices = dict(model.named_parameters()), _matrices(model)
    optimizers = (
        torch.optim.Muon([named[n] for n in matrices], lr=1e-2, weight_decay=0.1),
        Lars([p for n, p in named.items() if n not in matrices], lr=1e-3),
    )
    for _ in range(STEPS):
        model(**batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in named.items()}


def _train_cut(model: nn.Module, traced: Any, plan: Plan, batch: Any) -> dict[str, Tensor]:
    pm, matrices = build(copy.deepcopy(model), traced, plan), _matrices(model)
    optimizers = (
        pm.optimizer(torch.optim.Muon, only=matrices, lr=1e-2, weight_decay=0.1),
        pm.optimizer(Lars, only=[n for n, _ in model.named_parameters() if n not in matrices], lr=1e-3),
    )
    for _ in range(STEPS):
        pm.step(batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not pm.differing_copies()
    return pm.state_dict()


def _compare(layouts: list[dict[str, Any]]) -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    traced = prepare(trace(model, batch))
    expected = _train_whole(copy.deepcopy(model), batch)
    for layout in layouts:
        changes = dict(layout)
        plan = plans.megatron("tiny_gpt", changes.pop("degrees"), micro_batch=2).replace(**changes)
        found = _train_cut(model, traced, plan, batch)
        for name, value in expected.items():
            # Muon multiplies in bf16, where the rounding of a sum may show; a slice's own step would be off by 1e-2.
            limit = 1e-4 if name in _matrices(model) else 1e-10 if "bias" not in name else 1e-6
            error = (found[name] - value).abs().max().item()
            assert error <= limit, f"{layout} {name}: {error}"


def _two() -> None:
    _compare([{"degrees": Degrees(tp=2)}, {"degrees": Degrees(dp=2), "zero": 3}, {"degrees": Degrees(pp=2)}])


def _four() -> None:
    _compare(
        [
            {"degrees": Degrees(dp=2, tp=2), "zero": 3},
            {"degrees": Degrees(tp=2, pp=2)},
            {"degrees": Degrees(dp=4), "zero": 2, "zero_group": 2},
            {"degrees": Degrees(dp=2, cp=2), "zero": 1},
        ]
    )


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "body"), [(2, _two), (4, _four)])
def test_muon_and_lars_read_whole_tensors_of_cut_ones(ranks: int, body: Any) -> None:
    run_ranks(ranks, body, timeout_s=250)
