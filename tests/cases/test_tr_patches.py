"""Neighbours of tpm-08 and tr-08: sizes that are quotients of the sequence's length, read off tensors of any layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.models import VOCAB, default_batch
from tests.plans import on_every_axis

DIM, HEADS, PATCH = 32, 4, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.view(t.shape[0], t.shape[1], HEADS, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(x)))


class Patches(nn.Module):
    """Bytes of four are one token of the first layers; the last see the bytes of a patch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.join, self.part = nn.Linear(PATCH * DIM, DIM), nn.Linear(DIM, PATCH * DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        batch, seq = input_ids.shape
        each = self.embed(input_ids)
        x = self.join(each.view(batch, seq // PATCH, PATCH * DIM))
        for layer in self.layers[:2]:
            x = layer(x)
        before = self.part(F.pad(x, (0, 0, 1, -1)))
        x = before.view(batch * (seq // PATCH), PATCH, DIM) + each.view(batch * (seq // PATCH), PATCH, DIM)
        for layer in self.layers[2:]:
            x = layer(x)
        return F.cross_entropy(self.head(x.view(batch, seq, DIM)).flatten(0, 1), labels.flatten())


def patches() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Patches().double(), default_batch()


def test_quotients_of_sizes_are_computed_from_inputs() -> None:
    graph = prepare(trace(*patches())).graph_module.graph
    read = [n.args[0] for n in graph.nodes if n.target is torch.ops.aten.sym_size.int]
    assert read
    assert all(x.op == "placeholder" for x in read)  # type: ignore[union-attr]


@pytest.mark.distributed
def test_patches_train_as_in_one_process() -> None:
    wanted = on_every_axis(prepare(trace(*patches())))
    failed = [r.text() for r in verify_plans(patches, wanted) if not r.passed]
    assert not failed, "\n\n".join(failed)
