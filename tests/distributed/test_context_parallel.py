"""A sequence cut over ranks trains as a whole one (fp64): every kernel, odd lengths, with the other axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.verify import verify_plans
from tests import models, plans

pytestmark = [pytest.mark.distributed]


def _plan(model: str, degrees: Degrees, **changes: Any) -> Plan:
    return plans.megatron(model, degrees, micro_batch=2).replace(**changes)


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama4kv_tiny(), models.default_batch()


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    return models.gpt2_tiny(), models.default_batch()


def bert() -> tuple[nn.Module, dict[str, Any]]:
    return models.bert_tiny(), models.default_batch()


def bert_padded() -> tuple[nn.Module, dict[str, Any]]:
    batch = models.default_batch()
    lengths = torch.tensor([16, 3, 9, 12, 16, 5, 7, 11])
    return models.bert_tiny(), {**batch, "attention_mask": (torch.arange(16) < lengths[:, None]).long()}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    return models.t5_tiny(), models.default_batch()


def mistral() -> tuple[nn.Module, dict[str, Any]]:
    return models.mistral_tiny(), models.default_batch()


def qwen3() -> tuple[nn.Module, dict[str, Any]]:
    return models.qwen3_tiny(), models.default_batch()


def llama9() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama_tiny(), models.default_batch(seq=9)


def llama13() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama_tiny(), models.default_batch(seq=13)


def _check(factory: Any, wanted: list[Plan]) -> None:
    failed = [r.text() for r in verify_plans(factory, wanted) if not r.passed]
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize(
    ("name", "factory"), [("llama", llama), ("tiny_gpt", tiny_gpt), ("gpt2", gpt2), ("qwen3", qwen3)]
)
def test_two_ranks_every_kernel(name: str, factory: Any) -> None:
    _check(factory, [_plan(name, Degrees(cp=2), context_parallel=k) for k in ("ring", "all-gather", "all-to-all")])


def _flat(stages: tuple[tuple[str, ...], ...]) -> Plan:
    return Plan(degrees=Degrees(cp=2), global_batch=8, seq_len=16, micro_batch=4, stages=stages, precision="fp64")


def test_masks_and_biases_are_cut_by_rows() -> None:
    _check(bert, [_flat((("bert.encoder.layer.0-3",),))])
    _check(bert_padded, [_flat((("bert.encoder.layer.0-3",),))])
    _check(t5, [_flat((("encoder.block.0-1", "decoder.block.0-1"),))])
    _check(mistral, [_flat((("model.layers.0-3",),))])


@pytest.mark.parametrize("factory", [llama9, llama13])
def test_lengths_that_do_not_divide_are_padded_unseen(factory: Any) -> None:
    _check(factory, [_plan("llama", Degrees(cp=2))])


@pytest.mark.parametrize(
    "degrees", [Degrees(cp=4), Degrees(cp=2, tp=2), Degrees(cp=2, pp=2), Degrees(cp=2, dp=2)], ids=str
)
def test_with_the_other_axes(degrees: Degrees) -> None:
    checkpointed = plans.megatron("llama", degrees, checkpoint=True, micro_batch=2)
    _check(llama, [_plan("llama", degrees), checkpointed])
    _check(tiny_gpt, [_plan("tiny_gpt", degrees)])


@pytest.mark.slow
def test_eight_ranks_three_axes() -> None:
    _check(llama, [_plan("llama", Degrees(cp=2, tp=2, pp=2)), _plan("llama", Degrees(cp=2, tp=2, dp=2))])
