"""What torch would do by one rank's part of the model is refused where it would train another one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar.build import build
from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


def _guarded() -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    traced = prepare(trace(model, batch))
    for degrees, zero, is_part in (
        (Degrees(dp=2), 0, False),
        (Degrees(dp=2), 1, True),
        (Degrees(tp=2), 0, True),
        (Degrees(pp=2), 0, True),
    ):
        users = copy.deepcopy(model)
        pm = build(users, traced, plans.megatron("tiny_gpt", degrees, micro_batch=2).replace(zero=zero))
        pm.step(batch)
        optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
        listed = [p for p in pm.parameters() if p.requires_grad]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        if is_part:
            before = [p.grad.clone() for p in listed if p.grad is not None]
            with pytest.raises(AutoparError, match=r"sees this rank's slices only.*pm.clip_grad_norm_"):
                nn.utils.clip_grad_norm_(listed, 1e-3)
            with pytest.raises(AutoparError, match=r"sees this rank's slices only.*pm.clip_grad_norm_"):
                nn.utils.get_total_norm(p.grad for p in listed if p.grad is not None)
            with pytest.raises(AutoparError, match=r"GradScaler sees overflows of this rank's slices.*precision fp16"):
                scaler.step(optimizer)
            assert all(torch.equal(p.grad, g) for p, g in zip(listed, before, strict=True) if p.grad is not None)
        else:
            reference = copy.deepcopy(model)
            reference(**batch).backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
            torch.testing.assert_close(nn.utils.clip_grad_norm_(listed, 1e-3), expected)
            scaler.step(optimizer)
        users_own = torch.optim.SGD(users.parameters(), lr=0.1)
        with pytest.raises(
            AutoparError, match=r"this SGD holds the parameters of the model that was given.*trains not"
        ):
            users_own.step()
        users(**batch).backward()  # the user's own model may be trained beside, as such
        users_own.step()
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 0  # nobody else is looked at


def test_norms_and_overflows_of_parts_are_refused() -> None:
    run_ranks(2, _guarded, timeout_s=100)
