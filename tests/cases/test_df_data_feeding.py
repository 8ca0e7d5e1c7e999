"""df-01: ranks that should see one batch are given different ones, which is told and named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.build import build
from autopar.errors import SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.batch_agreement import _digest
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


def _rows(seed: int, count: int = 4) -> dict[str, Tensor]:
    return {name: value[:count] for name, value in models.default_batch(seed=seed).items()}


def _refused(pm: Any, batch: dict[str, Tensor], ranks: str, local: bool = False) -> None:
    with pytest.raises(SpecError, match=f"ranks {ranks} were given different input_ids"):
        pm.step(batch, local=local)


def _df_01() -> None:
    model, rank = models.tiny_gpt(), dist.get_rank()
    traced = prepare(trace(model, models.default_batch()))
    for degrees in (Degrees(tp=4), Degrees(dp=2, tp=2), Degrees(cp=2, pp=2)):
        pm = build(copy.deepcopy(model), traced, plans.megatron("tiny_gpt", degrees, micro_batch=2))
        _refused(pm, _rows(1 + (rank == 3), 8), "0 and 3")
        with torch.no_grad():
            _refused(pm, _rows(1 + rank, 8), "0 and 1")  # the second batch; the third is not looked at
        pm.step(_rows(1, 8))
        _refused(pm, {name: x.flip(0) if rank == 2 else x for name, x in _rows(1, 8).items()}, "0 and 2")
    pm = build(copy.deepcopy(model), traced, plans.megatron("tiny_gpt", Degrees(dp=2, tp=2), micro_batch=2))
    position = pm.world.position["dp"]
    pm.step(_rows(1 + position), local=True)  # each dp rank its own, tp peers the same
    _refused(pm, _rows(1 + rank), "0 and 1", local=True)


def test_df_01_ranks_with_other_samples_are_named() -> None:
    run_ranks(4, _df_01, timeout_s=150)


def test_sizes_bits_and_their_order_count() -> None:
    x = torch.arange(12).view(3, 4)
    same = [x, x.clone(), x.t().contiguous().t()]
    other = [x.view(4, 3), x.flip(0), x + 1, x[:2]]
    assert len({int(_digest(t)) for t in same}) == 1
    assert len({int(_digest(t)) for t in [x, *other]}) == 1 + len(other)
    for y in (torch.rand(5), torch.rand(5).bfloat16(), torch.rand(5) > 0.5, torch.view_as_complex(torch.rand(5, 2))):
        assert int(_digest(y)) == int(_digest(y.clone()))
        assert int(_digest(y)) != int(_digest(y[:4]))
