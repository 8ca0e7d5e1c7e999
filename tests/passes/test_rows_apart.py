"""Models whose rows meet before the loss are refused where the batch would be cut, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import SpecError, UnsupportedModelError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.trace import trace
from tests.models import BUILDERS, MORE_HF_BUILDERS, captured


class Rows(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.mix(x)


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(4, 8)


def _contrastive(x: Tensor) -> Tensor:
    return F.cross_entropy(x @ x.t(), torch.arange(x.shape[0]))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "batch statistics": lambda x: (x - x.mean(0)).pow(2).mean(),
    "in-batch contrast": _contrastive,
    "softmax over rows": lambda x: x.softmax(0).pow(2).mean(),
    "product of rows": lambda x: (x.t() @ x).pow(2).mean(),
    "rows in order": lambda x: x.sort(0).values.pow(2).mean(),
    "sum of rows by a custom function": lambda x: _RowSum.apply(x).pow(2).mean(),
    "numbers of rows": lambda x: (x * torch.arange(x.shape[0])[:, None]).pow(2).mean(),
    "rows by number": lambda x: x[(torch.arange(x.shape[0]) + 1) % 2].pow(2).mean(),
    "first row": lambda x: (x - x[:1]).pow(2).mean(),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda x: x.pow(2).mean(),
    "features in order": lambda x: x.sort(dim=-1).values.pow(2).mean(),
    "softmax over features": lambda x: x.softmax(-1).pow(2).mean(),
    "two batches in one": lambda x: torch.stack(
        (torch.cat([x, 2 * x]).unflatten(1, (2, 4)).transpose(1, 2).flatten(1) ** 2).chunk(2)
    ).mean(),
    "an element of each row": lambda x: x[torch.arange(x.shape[0]), (x[:, 0] > 0).long()].pow(2).mean(),
    "outer product in a row": lambda x: (x[:, :, None] @ x[:, None, :]).mean(),
}


def _plan(dp: int = 1, micro_batch: int = 2) -> Plan:
    return Plan(
        degrees=Degrees(dp=dp), global_batch=4, seq_len=8, micro_batch=micro_batch, stages=(("layers.0", "layers.1"),)
    )


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused_where_the_batch_is_cut(name: str) -> None:
    traced = prepare(trace(Rows(MIXING[name]), {"x": torch.rand(4, 8)}))
    for plan in (_plan(dp=2), _plan()):
        with pytest.raises(UnsupportedModelError, match="(mixes|numbers) the rows of a batch"):
            apply(traced, plan)


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_pass(name: str) -> None:
    apply(prepare(trace(Rows(APART[name]), {"x": torch.rand(4, 8)})), _plan(dp=2))


def test_one_micro_batch_may_mix() -> None:
    traced = prepare(trace(Rows(lambda x: (x - x.mean(0)).pow(2).mean()), {"x": torch.rand(4, 8)}))
    apply(traced, _plan(micro_batch=4))


@pytest.mark.parametrize("family", [*BUILDERS, *MORE_HF_BUILDERS])
def test_no_family_is_taken_for_mixing(family: str) -> None:
    traced = prepare(captured(family))
    layers = tuple(s.path for s in traced.layers)
    apply(traced, Plan(degrees=Degrees(dp=2), global_batch=8, seq_len=16, micro_batch=2, stages=(layers,)))


class Centred(nn.Module):
    """Less the mean of the batch, token by token, under a loss that could leave rows out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x - x.mean(0)).flatten(0, 1), labels.flatten())


def test_no_rows_are_added_to_a_batch_whose_rows_meet() -> None:
    ids = torch.randint(8, (8, 4))
    traced = prepare(trace(Centred(), {"input_ids": ids, "labels": ids.clone()}))
    plan = Plan(degrees=Degrees(), global_batch=8, seq_len=4, micro_batch=8, stages=(("layers.0-1",),))
    pm = build(Centred(), traced, plan)
    with pytest.raises(SpecError, match="6 rows do not divide into micro-batches of 8"):
        pm.step({"input_ids": ids[:6], "labels": ids[:6].clone()})
