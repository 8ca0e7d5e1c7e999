"""cmp-01: `torch.compile` around a parallel module, and around blocks before it, changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


def _cmp_01() -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    reference = copy.deepcopy(model)
    reference(**batch).backward()
    expected = dict(reference.named_parameters())
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    traced = prepare(trace(model, batch))
    for degrees in (Degrees(dp=2), Degrees(tp=2), Degrees(pp=2)):
        plan = plans.megatron("tiny_gpt", degrees, micro_batch=2, checkpoint=True)
        pm = build(copy.deepcopy(models.tiny_gpt()), traced, plan)
        compiled = torch.compile(pm, backend="aot_eager")
        compiled.step(batch)
        if degrees.pp == 1:
            pm.zero_grad()
            compiled(**batch).backward()
        for name, gradient in pm.full_gradients().items():
            torch.testing.assert_close(gradient, expected[name].grad, rtol=0, atol=1e-12, msg=name)


def test_cmp_01_compiled_by_the_user_is_as_it_was() -> None:
    run_ranks(2, _cmp_01, timeout_s=200)
