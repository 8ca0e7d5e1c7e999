"""Field case rng-05: ranks that built their models from different seeds train one model, and are told so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans


def _three_steps(degrees: Degrees) -> tuple[list[str], list[str], dict[str, Tensor]]:
    model, batch = models.tiny_gpt(seed=dist.get_rank()), models.default_batch()
    pm = build(model, prepare(trace(model, batch)), plans.megatron("tiny_gpt", degrees, micro_batch=2))
    optimizer: Any = pm.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        pm.step(batch)
        optimizer.step()
    return pm.notices, pm.differing_copies(), pm.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [Degrees(dp=2), Degrees(tp=2), Degrees(pp=2), Degrees(cp=2)], ids=str)
def test_rng_05_all_ranks_take_the_weights_of_rank_zero(degrees: Degrees) -> None:
    model, batch = models.tiny_gpt(seed=0), models.default_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    for notices, differing, state in run_ranks(2, _three_steps, degrees):
        assert any("differed between ranks (another seed?)" in notice for notice in notices)
        assert differing == []
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
