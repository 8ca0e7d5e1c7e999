"""Attention as people write it: one layer for each way, all causal, and a model that stacks them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import VOCAB

DIM, HEADS, WIDTH = 32, 4, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, heads, seq, width] each


def _hidden(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5
    return torch.einsum("bhqk,bkhd->bhqd", scores.masked_fill(_hidden(q.shape[1]), float("-inf")).softmax(-1), v)


def _joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, s, width = q.shape
    q, k, v = (t.reshape(batch * heads, s, -1) for t in (q, k, v))
    bias = torch.zeros(s, s, dtype=q.dtype).masked_fill(_hidden(s), float("-inf"))
    scores = torch.baddbmm(bias[None], q, k.transpose(1, 2), alpha=width**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(batch, heads, s, width)


def _complex_rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[2]
    angles = torch.arange(s, dtype=q.dtype)[:, None] / 100 ** (torch.arange(0, WIDTH, 2, dtype=q.dtype) / WIDTH)
    turns = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turns).flatten(-2) for t in (q, k))
    return _fused(q, k, v)


def _stacked_rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[2]
    angles = torch.arange(s, dtype=q.dtype)[:, None] / 100 ** (torch.arange(0, WIDTH, 2, dtype=q.dtype) / WIDTH)
    cos, sin = angles.cos(), angles.sin()

    def turn(t: Tensor) -> Tensor:
        a, b = t[..., ::2], t[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    return _fused(turn(q), turn(k), v)


class Layer(nn.Module):
    """Separate projections of `kv` key/value heads, repeated as `widen` says."""

    def __init__(self, attend: Attend, kv: int = HEADS, widen: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = nn.Linear(DIM, kv * WIDTH), nn.Linear(DIM, kv * WIDTH)
        self.up, self.down, self.norm = nn.Linear(DIM, 64), nn.Linear(64, DIM), nn.LayerNorm(DIM)
        self.attend, self.widen = attend, widen

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(self.attend(q, self.widen(k), self.widen(v)).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        flat = torch.addmm(self.up.bias, x.reshape(-1, DIM), self.up.weight.t())
        y = torch.addmm(self.down.bias, flat.relu(), self.down.weight.t()).view(x.shape)
        return x + y


class Unbound(Layer):
    """q, k and v of one projection, taken apart by unbind."""

    def __init__(self) -> None:
        super().__init__(_fused)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        del self.q, self.k, self.v

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class EinsumWeights(Layer):
    """Weights of [heads, dim, width]."""

    def __init__(self) -> None:
        super().__init__(_fused)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(HEADS, DIM, WIDTH) / 5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(HEADS, WIDTH, DIM) / 5)
        del self.q, self.k, self.v, self.out

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bsd,hde->bhse", x, w) for w in (self.wq, self.wk, self.wv))
        return torch.einsum("bhse,hed->bsd", self.attend(q, k, v), self.wo)


class Weights(Layer):
    """nn.MultiheadAttention asked for its weights, which is written out in bmm."""

    def __init__(self) -> None:
        super().__init__(_fused)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        del self.q, self.k, self.v, self.out

    def mix(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, attn_mask=_hidden(x.shape[1]), need_weights=True)[0]
        return y


STYLES: dict[str, Callable[[], nn.Module]] = {
    "einsum": lambda: Layer(_einsum),
    "rows and heads joined": lambda: Layer(_joined),
    "complex rotary": lambda: Layer(_complex_rotary),
    "interleaved rotary": lambda: Layer(_stacked_rotary),
    "repeat_interleave": lambda: Layer(_fused, 2, lambda t: t.repeat_interleave(2, dim=1)),
    "repeat": lambda: Layer(_fused, 1, lambda t: t.repeat(1, HEADS, 1, 1)),
    "unbind": Unbound,
    "einsum weights": EinsumWeights,
    "attention weights": Weights,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(build() for build in STYLES.values())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
