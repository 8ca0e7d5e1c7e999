"""Neighbours of the tensor-parallel field cases: other ways to write the same arithmetic, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model.search import search
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models

DIM, HEADS, VOCAB = 32, 4, 16


class FusedGrouped(nn.Module):
    """q, k and v of unequal sizes in one projection, two key/value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, DIM + DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).split([DIM, DIM // 2, DIM // 2], -1)
        q, k, v = (t.view(b, s, -1, 8).transpose(1, 2) for t in (q, k, v))
        k, v = (t[:, :, None].expand(b, 2, 2, s, 8).reshape(b, 4, s, 8) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, DIM)
        z: Tensor = x + self.out(y)
        return z


class Alibi(nn.Module):
    """A bias [heads, seq, seq] as the attention mask, broadcast over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        distance = torch.arange(s)[None, :] - torch.arange(s)[:, None]
        bias = (self.slopes * distance).masked_fill(distance > 0, float("-inf")).to(x.dtype)
        q, k, v = (p(x).view(b, s, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(b, s, DIM)
        z: Tensor = x + self.out(y)
        return z


class Stack(nn.Module):
    """`classes_second` is torch's own form of a token loss: logits [batch, classes, seq]."""

    def __init__(self, layer: type[nn.Module], classes_second: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.classes_second = classes_second

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if self.classes_second:
            return F.cross_entropy(logits.transpose(1, 2), labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(layer: type[nn.Module], classes_second: bool) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    batch = {name: t % VOCAB for name, t in models.default_batch().items()}  # as many classes as tokens
    return Stack(layer, classes_second).double(), batch


@pytest.mark.distributed
@pytest.mark.parametrize("layer", [FusedGrouped, Alibi])
@pytest.mark.parametrize("classes_second", [False, True])
def test_other_ways_to_write_it(layer: type[nn.Module], classes_second: bool) -> None:
    factory = partial(build, layer, classes_second)
    model, batch = factory()
    traced = prepare(trace(model, batch))
    train = TrainSpec(global_batch=8, seq_len=16, precision="fp64")
    plans = [search(traced, ClusterSpec.parse("local:2"), train, Pins(tp=2, sp=sp)).plan for sp in (False, True)]
    layers = ("layers.0", "layers.1")
    for degrees, stages in (
        (Degrees(dp=2), (layers,)),
        (Degrees(pp=2), (layers[:1], layers[1:])),
        (Degrees(cp=2), (layers,)),
    ):
        plans.append(Plan(degrees=degrees, global_batch=8, seq_len=16, micro_batch=2, stages=stages, precision="fp64"))
    failed = [r.text() for r in verify_plans(factory, plans) if not r.passed]
    assert not failed, "\n\n".join(failed)
