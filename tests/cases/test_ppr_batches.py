"""ppr-01, ppr-02, ppr-03, ppr-11: few micro-batches, batches that do not divide, changing lengths, one loss for all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.build import build
from autopar.errors import AutoparError, SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


def _odd_batches() -> None:
    """All in one set of processes."""
    model, batch = tiny_gpt()
    traced = prepare(trace(model, batch))
    pm = build(copy.deepcopy(model), traced, plans.megatron("tiny_gpt", Degrees(pp=4), micro_batch=2))
    for rows in (2, 4, 6, 7, 1):
        _step_equals(model, pm, models.default_batch(rows=rows, seq=16, seed=rows))  # a hang ends with the time-out
    for seq in (16, 12, 20):
        _step_equals(model, pm, models.default_batch(seq=seq, seed=seq))
    looped = plans.megatron("tiny_gpt", Degrees(pp=2, dp=2), micro_batch=1, schedule="interleaved", virtual_stages=2)
    pm = build(copy.deepcopy(model), traced, looped)
    _step_equals(model, pm, models.default_batch(rows=7))
    ragged = [models.default_batch(rows=2, seq=16), models.default_batch(rows=2, seq=12)]
    with pytest.raises(AutoparError, match="input_ids"):
        pm.step({name: [part[name] for part in ragged] for name in ragged[0]})  # lengths of their own: no batch
    assert not any("padding" in notice for notice in pm.notices)
    for _ in range(2):  # 7 micro-batches fall into no equal rounds: one is padding
        _step_equals(model, pm, models.default_batch(rows=14))
    (told,) = [notice for notice in pm.notices if "padding" in notice]
    assert told.startswith(
        "schedule interleaved runs 8 micro-batches for 14 rows: 2 rows of padding are added, 1 of the"
    )
    _refused_on_every_rank(pm)
    _step_equals(model, pm, models.default_batch())


def _refused_on_every_rank(pm: Any) -> None:
    """What one rank's own rows get wrong, all say at once: nobody waits for a peer that has given up."""
    position = pm.world.position["dp"]
    good, bad = models.default_batch(rows=4), models.default_batch(rows=4)
    bad["input_ids"][1, 2] = 99
    longer = models.default_batch(rows=4, seq=80)
    floating = {**good, "input_ids": good["input_ids"].double()}
    for wrong, says in (
        (bad, "input_ids holds 99, and tokens.weight has 64 rows"),
        (longer, "sequences of 80 tokens read row 79 of positions.weight"),
        (floating, "input_ids holds floating-point numbers"),
        ({**good, "mask": good["labels"]}, "not captured: mask"),
    ):
        with pytest.raises(SpecError, match=says):
            pm.step(wrong)
        with pytest.raises(SpecError, match=says) as refused:
            pm.step(wrong if position else good, local=True)
        if not position and "not captured" not in says:
            assert refused.value.what.startswith("dp rank 1 has rows that cannot be used: ")
            assert refused.value.try_, "what the other rank was told to try"
    for wrong in (_Lazy(good), {**good, "input_ids": _Unsized(good["input_ids"])}):
        with pytest.raises((SpecError, KeyError), match="KeyError.*no such file|no such file"):
            pm.step(wrong if position else good, local=True)


class _Lazy(dict[str, Any]):
    """A batch that is read when it is asked for, and cannot be."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError("no such file")


class _Unsized(torch.Tensor):
    def dim(self) -> int:
        raise KeyError("no such file")


def _step_equals(model: nn.Module, pm: Any, batch: dict[str, torch.Tensor]) -> None:
    reference = copy.deepcopy(model)
    loss = reference(**batch)
    loss.backward()
    pm.zero_grad()
    mine = pm.step(batch)
    torch.testing.assert_close(mine, loss.detach(), rtol=0, atol=1e-12)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)
    expected = dict(reference.named_parameters())
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=0, atol=1e-12, msg=name)


def test_ppr_01_02_03_11_odd_batches_and_the_loss_on_every_rank() -> None:
    run_ranks(4, _odd_batches, timeout_s=200)
