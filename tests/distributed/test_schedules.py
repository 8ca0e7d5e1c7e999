"""Every schedule trains as one process (fp64), alone and with the other axes; what it cannot run is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.build import build
from autopar.errors import SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models, plans

pytestmark = pytest.mark.distributed


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


def eight_layers() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return models.TinyGPT(layers=8).double(), models.default_batch()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama4kv_tiny(), models.default_batch()


def shared_layers() -> tuple[nn.Module, dict[str, Any]]:
    """Both chunks of the second rank, and only they, read one norm: the last to get its gradient there."""
    model: Any = models.tiny_gpt()
    model.blocks[3].norm1 = model.blocks[1].norm1
    return model, models.default_batch()


def _check(factory: Any, wanted: list[Plan]) -> None:
    failed = [r.text() for r in verify_plans(factory, wanted, timeout_s=250) if not r.passed]
    assert not failed, "\n\n".join(failed)


def _plan(model: str, degrees: Degrees, schedule: str, virtual: int = 1, micro_batch: int = 2, **options: Any) -> Plan:
    return plans.megatron(model, degrees, schedule=schedule, virtual_stages=virtual, micro_batch=micro_batch, **options)


def test_two_ranks() -> None:
    two = Degrees(pp=2)
    _check(
        tiny_gpt,
        [
            _plan("tiny_gpt", two, "gpipe"),
            _plan("tiny_gpt", two, "interleaved", 2),
            _plan("tiny_gpt", two, "interleaved", 2, micro_batch=1),
            _plan("tiny_gpt", two, "interleaved", 2, micro_batch=8),
            _plan("tiny_gpt", two, "interleaved", 2, checkpoint=True),
            _plan("tiny_gpt", two, "zero-bubble"),
            _plan("tiny_gpt", two, "zero-bubble", 2, micro_batch=1),
            _plan("tiny_gpt", two, "zero-bubble", micro_batch=8),
            _plan("tiny_gpt", two, "zero-bubble", checkpoint=True),
        ],
    )


@pytest.mark.parametrize("degrees", [Degrees(pp=2, tp=2), Degrees(pp=2, dp=2), Degrees(pp=2, cp=2)], ids=str)
def test_with_another_axis(degrees: Degrees) -> None:
    _check(llama, [_plan("llama", degrees, "interleaved", 2), _plan("llama", degrees, "zero-bubble")])


def test_a_weight_of_two_stages_on_a_rank_is_summed_when_both_have_added_to_it() -> None:
    both = Degrees(pp=2, dp=2)
    _check(shared_layers, [_plan("tiny_gpt", both, s, 2, micro_batch=1) for s in ("interleaved", "zero-bubble")])


def test_four_stages_and_four_ranks_of_two() -> None:
    four = Degrees(pp=4)
    _check(
        eight_layers,
        [
            _plan("tiny_gpt", four, "interleaved", 2, layers=8),
            _plan("tiny_gpt", four, "interleaved", 2, layers=8, micro_batch=4),
            _plan("tiny_gpt", four, "zero-bubble", layers=8),
            _plan("tiny_gpt", four, "zero-bubble", 2, layers=8, micro_batch=4),
        ],
    )


def _refusals() -> None:
    model, batch = tiny_gpt()
    traced = prepare(trace(model, batch))
    for changes, text in (
        ({"schedule": "1f1b", "virtual_stages": 2}, "schedule 1f1b runs one stage a rank, not 2"),
        ({"schedule": "interleaved"}, "interleaved needs several stages a rank"),
        (
            {"schedule": "interleaved", "virtual_stages": 2, "global_batch": 7, "micro_batch": 1},
            "7 micro-batches do not",
        ),
    ):
        options = {k: v for k, v in changes.items() if k != "global_batch"}
        plan = plans.megatron("tiny_gpt", Degrees(pp=2), **options)
        with pytest.raises(SpecError, match=text):
            build(copy.deepcopy(model), traced, plan.replace(**changes))


def test_what_a_schedule_cannot_run_is_refused() -> None:
    run_ranks(2, _refusals, timeout_s=60)
