"""Field cases ppp-01 and ppp-04: every layer on exactly one stage, and encoder-decoders cut into stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models

pytestmark = [pytest.mark.distributed]


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama_tiny(), models.default_batch()


FOUR_ON_THREE = Plan(
    degrees=Degrees(pp=3), global_batch=8, seq_len=16, micro_batch=2, precision="fp64",
    stages=(("model.layers.0-1",), ("model.layers.2",), ("model.layers.3",)),
)  # fmt: skip


def test_ppp_01_four_layers_on_three_stages() -> None:
    (result,) = verify_plans(llama, [FOUR_ON_THREE])
    assert result.passed, result.text()


def _names() -> tuple[list[str], list[str], list[str]]:
    model, batch = llama()
    pm = build(model, prepare(trace(model, batch)), FOUR_ON_THREE)
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    original = sorted(n for n in model.state_dict() if n in whole)
    return [n for n, _ in pm.named_parameters()], sorted(pm.state_dict()), original


def test_ppp_01_gathered_names_are_the_models() -> None:
    results = run_ranks(3, _names)
    local = [name for names, _, _ in results for name in names]
    assert len(local) == len(set(local))
    for _, gathered, original in results:
        assert gathered == original
        assert sorted(local) == [n for n in original if "inv_freq" not in n]


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """With an encoder padding mask that differs from row to row."""
    batch = models.default_batch()
    lengths = torch.tensor([16, 3, 9, 12, 16, 5, 7, 11])
    mask = (torch.arange(16) < lengths[:, None]).long()
    return models.t5_tiny(), {**batch, "attention_mask": mask}


@pytest.mark.parametrize(
    "stages",
    [
        (("encoder.block.0-1",), ("decoder.block.0-1",)),
        (("encoder.block.0",), ("encoder.block.1", "decoder.block.0-1")),
        (("encoder.block.0",), ("encoder.block.1",), ("decoder.block.0",), ("decoder.block.1",)),
    ],
    ids=["2", "2-uneven", "4"],
)
def test_ppp_04_encoder_decoder_with_padding(stages: tuple[tuple[str, ...], ...]) -> None:
    plan = Plan(
        degrees=Degrees(pp=len(stages)), global_batch=8, seq_len=16, micro_batch=2, stages=stages, precision="fp64"
    )
    (result,) = verify_plans(t5, [plan])
    assert result.plan.micro_batches == 4
    assert result.passed, result.text()
