"""Neighbour of tr-08 and ppp-04: keys and values that one layer makes and later layers read, on two axes at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.specs import Pins
from autopar.trace import trace
from autopar.verify import verify_plans
from autopar.verify.layout import FixedLayouts
from tests.models import VOCAB, default_batch

DIM, HEADS, WIDTH = 32, 4, 8


class Layer(nn.Module):
    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.q, self.out, self.up, self.down = (
            nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM),
        )  # fmt: skip
        self.kv = nn.Linear(DIM, 4 * WIDTH) if makes else None

    def forward(self, x: Tensor, shared: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if self.kv is not None:
            k, v = (t.unflatten(-1, (2, WIDTH)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
            shared = k, v
        assert shared is not None
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, *shared, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x))), shared


class SharedKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Layer(makes=i < 2) for i in range(4)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, shared = self.embed(input_ids), None
        for layer in self.layers:
            x, shared = layer(x, shared)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def shared_keys() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return SharedKeys().double(), default_batch()


@pytest.mark.distributed
def test_shared_keys_train_as_in_one_process() -> None:
    layouts = FixedLayouts(prepare(trace(*shared_keys())), 8, 16)
    mixes = (Degrees(cp=2, tp=2), Degrees(cp=2, pp=2), Degrees(tp=2, pp=2))
    failed = [r.text() for r in verify_plans(shared_keys, [layouts.plan(d, Pins()) for d in mixes]) if not r.passed]
    assert not failed, "\n\n".join(failed)
