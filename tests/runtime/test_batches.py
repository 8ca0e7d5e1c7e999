"""Sequences that cp does not cut are padded where nothing sees it, and refused where something would."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare, token_count
from autopar.plan import Plan
from autopar.runtime.batches import BatchIntake
from autopar.runtime.launch import run_ranks
from autopar.runtime.tokens import TokenCounter
from autopar.runtime.world import World
from autopar.trace import trace
from tests import models


class Pooling(nn.Module):
    """Every token is scored beside the mean of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.tiny_gpt()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.body(input_ids)
        return F.cross_entropy((logits + logits.mean(1, keepdim=True)).flatten(0, 1), labels.flatten())


def _intake(model: nn.Module, blocks: str) -> BatchIntake:
    traced = prepare(trace(model, models.default_batch()))
    plan = Plan(
        degrees=Degrees(cp=2), global_batch=8, seq_len=16, micro_batch=8, stages=((f"{blocks}.0-3",),), precision="fp64"
    )
    world = cast(World, SimpleNamespace())  # padding asks no other rank
    return BatchIntake(traced, plan, world, TokenCounter(token_count(traced, plan), world))


def _batch() -> dict[str, Any]:
    return {name: t[:, :14] for name, t in models.default_batch().items()}


def test_causal_models_are_padded() -> None:
    padded = _intake(models.tiny_gpt(), "blocks").padded_sequences(_batch())
    assert padded["input_ids"].shape[1] == 16
    assert (padded["labels"][:, 14:] == -100).all()


def test_a_model_that_takes_its_sequence_together_would_see_padding() -> None:
    with pytest.raises(SpecError, match="would see padding"):
        _intake(Pooling(), "body.blocks").padded_sequences(_batch())


class _Dropped(nn.Module):
    """With dropout, and a loss that cannot leave rows out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, dtype=torch.float64) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.5, self.training)
        return x.pow(2).mean()


def _x(rows: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.rand(rows, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}


def _masks_after_refusals() -> None:
    torch.manual_seed(0)
    model = _Dropped()
    plan = Plan(
        degrees=Degrees(dp=2),
        global_batch=8,
        seq_len=6,
        micro_batch=2,
        stages=(("layers.0-1",),),
        precision="fp64",
    )
    traced = prepare(trace(model, _x(8, 0)))
    plain, refusing = (build(copy.deepcopy(model), traced, plan) for _ in range(2))
    for seed in range(3):
        for wrong in (lambda: refusing.step(_x(6, 0)), lambda: refusing(**_x(6, 0))):
            with pytest.raises(SpecError, match="6 rows do not divide into 2 dp ranks x micro-batches of 2"):
                wrong()
        assert torch.equal(plain.step(_x(8, seed)), refusing.step(_x(8, seed)))
        assert torch.equal(plain(**_x(4, seed)), refusing(**_x(4, seed)))


@pytest.mark.distributed
def test_a_refused_batch_leaves_the_masks_of_dropout_where_they_were() -> None:
    run_ranks(2, _masks_after_refusals, timeout_s=100)
