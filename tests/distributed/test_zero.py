"""ZeRO 1, 2 and 3 train as one process (fp64), with every other axis; and divide what docs/zero.md says they divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.verify import verify_plans
from tests import models, plans

pytestmark = pytest.mark.distributed


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama4kv_tiny(), models.default_batch()


def eight_layers() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return models.TinyGPT(layers=8).double(), models.default_batch()


def _check(factory: Any, wanted: list[Plan]) -> None:
    failed = [r.text() for r in verify_plans(factory, wanted, timeout_s=250) if not r.passed]
    assert not failed, "\n\n".join(failed)


def _plan(model: str, degrees: Degrees, zero: int, micro_batch: int = 2, **options: Any) -> Plan:
    return plans.megatron(model, degrees, micro_batch=micro_batch, **options).replace(zero=zero)


def test_two_ranks_every_level() -> None:
    two = Degrees(dp=2)
    wanted = [_plan("tiny_gpt", two, level, micro_batch) for level in (1, 2, 3) for micro_batch in (1, 4)]
    _check(tiny_gpt, [*wanted, _plan("tiny_gpt", two, 3, checkpoint=True), _plan("tiny_gpt", Degrees(cp=2), 2)])


@pytest.mark.parametrize("degrees", [Degrees(dp=2, tp=2), Degrees(dp=2, pp=2), Degrees(dp=2, cp=2)], ids=str)
def test_with_another_axis(degrees: Degrees) -> None:
    _check(llama, [_plan("llama", degrees, level) for level in (1, 2, 3)])


def test_with_tied_and_interleaved_stages() -> None:
    _check(
        tiny_gpt,
        [
            _plan("tiny_gpt", Degrees(dp=2, pp=2), 3, checkpoint=True),
            _plan("tiny_gpt", Degrees(dp=2, pp=2), 1, schedule="interleaved", virtual_stages=2),
            _plan("tiny_gpt", Degrees(dp=2, pp=2), 3, schedule="interleaved", virtual_stages=2),
            _plan("tiny_gpt", Degrees(dp=2, tp=2), 3, checkpoint=True),
        ],
    )
