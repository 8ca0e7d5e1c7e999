"""Inputs without a row for each sequence go whole to every part of a batch; a memory has a length of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.plans import on_every_axis

pytestmark = pytest.mark.distributed

DIM, HEADS, VOCAB, ROWS, SEQ, MEMORY = 32, 4, 64, 8, 16, 10


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return y


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masked, self.biased, self.cross = _Attention(), _Attention(), _Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        x = x + self.masked(x, x, mask)
        x = x + self.biased(x, x, bias)
        x = x + self.cross(x, memory)
        return x + self.mlp(x)


class Model(nn.Module):
    """Reads everything a batch may hold beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList([_Layer() for _ in range(2)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, memory: Tensor, self_: dict[str, Tensor], self__ids: Tensor, **tables: Tensor) -> Tensor:
        x = self.embed(self__ids) + self.positions(tables["position_ids"]) * tables["scale"] + tables["one"]
        for layer in self.layers:
            x = layer(x, memory, tables["mask"], tables["bias"])
        losses = F.cross_entropy(self.head(x).flatten(0, 1), self_["ids"].flatten(), reduction="none")
        weights = tables["weights"]
        return (losses.view_as(self__ids) * weights).sum() / (weights.sum() * self__ids.shape[0])


def build() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2, ROWS, SEQ), generator=random)
    batch = {
        "memory": torch.randn(ROWS, MEMORY, DIM, generator=random).double(),
        "self_": {"ids": ids[1]},
        "self__ids": ids[0],
        "position_ids": torch.arange(SEQ)[None],
        "scale": torch.rand(DIM, generator=random).double(),
        "one": torch.rand(1, generator=random).double(),
        "mask": torch.ones(SEQ, SEQ).tril().bool(),
        "bias": torch.randn(1, HEADS, SEQ, SEQ, generator=random).double(),
        "weights": torch.rand(SEQ, generator=random).double(),
    }
    return Model().double(), batch


def test_they_train_as_in_one_process_on_every_axis() -> None:
    traced = prepare(trace(*build()))
    assert [n.split()[1] for n in traced.notices] == ["position_ids", "scale", "one", "mask", "bias", "weights"]
    failed = [r.text() for r in verify_plans(build, on_every_axis(traced)) if not r.passed]
    assert not failed, "\n\n".join(failed)
