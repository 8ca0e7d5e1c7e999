"""pf-02: an overlap that was asked for is applied, or the report says for which layer it is not, why, and warns."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


class _Gated(nn.Module):
    """A block whose projections are parameters and einsums: no linear to recognise."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(models.DIM, 2 * models.DIM) / 6)
        self.down = nn.Parameter(torch.randn(2 * models.DIM, models.DIM) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.matmul(torch.tanh(torch.matmul(x, self.up)), self.down)


class Unrecognised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, models.DIM)
        self.blocks = nn.ModuleList([_Gated() for _ in range(4)])
        self.head = nn.Linear(models.DIM, models.VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _told() -> None:
    batch = models.default_batch()
    llama = models.llama4kv_tiny()
    traced = prepare(trace(llama, batch))
    plan = plans.megatron("llama", Degrees(tp=2), micro_batch=4)
    for overlap in (("tp_linear",), ("tp_ring",)):
        pm = build(copy.deepcopy(llama), traced, plan.replace(overlap=overlap))
        assert f"overlap {overlap[0]}: applied, model.layers.0 to model.layers.3" in pm.report()
        assert not any("not applied" in notice for notice in pm.notices)
    ring = plan.replace(overlap=("tp_ring",), sequence_sharding=False)
    with pytest.warns(UserWarning, match="tp_ring is not applied to model.layers.0 to model.layers.3: .* not sharded"):
        pm = build(copy.deepcopy(llama), traced, ring)
    assert "overlap tp_ring: not applied (the stream between layers is not sharded" in pm.report()


def _unrecognised() -> None:
    batch = models.default_batch()
    torch.manual_seed(0)
    model = Unrecognised().double()
    plan = Plan(
        degrees=Degrees(tp=2), global_batch=8, seq_len=16, micro_batch=4, stages=(("blocks.0-3",),), precision="fp64",
        parameters={"blocks.*.up": "S(1)", "blocks.*.down": "S(0)"}, overlap=("tp_linear", "dp_reduce"),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="tp_linear is not applied to blocks.0 to blocks.3: matmul.* reads") as said:
        pm = _built(model, batch, plan)
    assert len(said) == 1, "dp_reduce has nothing to hide here, which is no fault"
    assert any("tp_linear is not applied" in notice for notice in pm.notices)
    reference = copy.deepcopy(model)
    loss = reference(**batch)
    torch.testing.assert_close(pm.step(batch), loss.detach(), rtol=0, atol=1e-12)


def _nowhere() -> None:
    """Asked for on degrees that have nothing to hide."""
    plan = plans.megatron("tiny_gpt", Degrees(dp=2), micro_batch=2).replace(overlap=("tp_ring", "pp_send"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pm = _built(models.tiny_gpt(), models.default_batch(), plan)
    assert [str(w.message) for w in said if "overlap" in str(w.message)] == [
        "overlap tp_ring is not applied to blocks.0 to blocks.3: tp is 1",
        "overlap pp_send is not applied to blocks.0 to blocks.3: pp is 1",
    ]
    assert "overlap pp_send: not applied (pp is 1), blocks.0 to blocks.3" in pm.report()


def _built(model: nn.Module, batch: Any, plan: Plan) -> Any:
    return build(copy.deepcopy(model), prepare(trace(model, batch)), plan)


def _all() -> None:
    _told()
    _unrecognised()
    _nowhere()


def test_pf_02_what_was_asked_for_is_applied_or_told_layer_by_layer() -> None:
    run_ranks(2, _all, timeout_s=150)
