"""A model small enough that its whole graph can be read: two layers of norm, attention by hand-written sizes, MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.trace import trace


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).contiguous().view(b, s, d))


class Small(nn.Module):
    """Tied embedding and head, a causal mask built from a constant, a positional table as a buffer."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(8, 4) for _ in range(layers)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(32.0).view(32, 1) / 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        s = ids.shape[1]
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        x = self.embed(ids) + self.table[:s]
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).view(-1, 16), labels.view(-1))


def small_traced(layers: int = 2) -> TracedModel:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (4, 8))
    return prepare(trace(Small(layers).double(), {"ids": ids, "labels": ids.clone()}))


def small_plan(*, tp: int = 2, pp: int = 1, sequence_sharding: bool = False, checkpoint: bool = False) -> Plan:
    return Plan(
        degrees=Degrees(tp=tp, pp=pp),
        global_batch=4,
        seq_len=8,
        micro_batch=2,
        stages=(("layers.0-1",),) if pp == 1 else (("layers.0",), ("layers.1",)),
        parameters={
            "embed.weight": "S(0)",
            "layers.*.qkv.weight": "S(0,left=3)",
            "layers.*.qkv.bias": "S(0,left=3)",
            "layers.*.out.weight": "S(1)",
        },
        sequence_sharding=sequence_sharding,
        checkpoint={"layers.*": "full"} if checkpoint else {},
    )
