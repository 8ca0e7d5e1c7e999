"""Sequences that cp does not cut are padded where nothing sees it, and refused where something would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare, token_count
from autopar.plan import Plan
from autopar.runtime.batches import BatchIntake
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
