"""Models that nobody here wrote the passes for: many habits in a few models, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.mesh import Degrees
from autopar.runtime.launch import run_ranks
from autopar.specs import Pins
from autopar.verify import _Comparison, _from_rank_zero
from autopar.verify.layout import FixedLayouts
from tests.models import VOCAB, default_batch

pytestmark = pytest.mark.distributed

DIM, HEADS, WIDTH = 32, 4, 8
MIXES = {
    Degrees(tp=2): Pins(sp=True, checkpoint="full"),
    Degrees(pp=2): Pins(),
    Degrees(cp=2): Pins(checkpoint="selective"),
    Degrees(dp=2): Pins(zero=3),
}


class Experts(nn.Module):
    """Every expert sees every token; the gate keeps two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3, bias=False)
        self.experts = nn.ModuleList(nn.ModuleList([nn.Linear(DIM, 64), nn.Linear(32, DIM)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for i, (up, down) in enumerate(self.experts):
            y = y + down(F.glu(up(x))) * ((chosen == i) * weights).sum(-1, keepdim=True)
        return y


class Parallel(nn.Module):
    """Attention under a bias, and experts, side by side; then an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.RMSNorm(DIM), Experts()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.adapter = nn.Sequential(nn.Linear(DIM, 4), nn.ReLU(), nn.Linear(4, DIM))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (p(n).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        x = x + self.out(y) + self.experts(n)
        return x + self.adapter(x)


class Habits(nn.Module):
    """A tied head, a learned 0-d scale, capped logits, smoothed labels, a loss of parts in a dict with lists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Parallel() for _ in range(2)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x, place = self.embed(input_ids), torch.arange(input_ids.shape[1])
        distance = place[None] - place[:, None]
        bias = (self.slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf")).to(x.dtype)
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], bias))
        logits = 30 * torch.tanh(self.head(hidden[-1]) * self.scale / 30)
        likelihood = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        spread = logits.logsumexp(-1).pow(2).mean()
        return {"loss": likelihood + 1e-2 * spread, "logits": logits, "hidden": hidden, "parts": (likelihood, spread)}


class _SeqFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: Tensor) -> Tensor:  # [seq, batch, dim]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 1, 3, 0, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Preferences(nn.Module):
    """Chosen and rejected answers in one batch of twice the rows, sequence first, and a loss of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([_SeqFirst() for _ in range(2)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        both = torch.cat([input_ids, labels.flip(1)])
        x = self.embed(both).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        each = F.cross_entropy(self.head(x).permute(1, 2, 0)[..., :-1], both[:, 1:], reduction="none").sum(-1)
        chosen, rejected = each.chunk(2)
        return -F.logsigmoid(0.1 * (rejected - chosen)).mean()


class _Plain(nn.Module):
    """Norms without weights."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.RMSNorm(DIM, elementwise_affine=False), nn.LayerNorm(DIM, bias=False)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down, self.causal = nn.Linear(DIM, 64), nn.Linear(64, DIM), causal

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + scale * self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.last_norm(x))))


class Translation(nn.Module):
    """Targets are shifted inside, so that queries and keys have other lengths; a loss after every decoder layer; scales
    picked out of one parameter; ids looked up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.encoder = nn.ModuleList([_Plain(causal=False) for _ in range(2)])
        self.decoder = nn.ModuleList([_Plain(causal=True) for _ in range(2)])
        self.cross = nn.ModuleList([nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(2)])
        self.scales = nn.Parameter(torch.rand(4))
        self.register_buffer("known", torch.randperm(VOCAB))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        source, target = self.embed(self.known[input_ids]), self.embed(labels[:, :-1])
        for i, layer in enumerate(self.encoder):
            source = layer(source, self.scales[i])
        loss = 0.0
        for i, (layer, cross) in enumerate(zip(self.decoder, self.cross, strict=True)):
            target = layer(target, self.scales[2 + i])
            target = target + cross(target, source, source, need_weights=False)[0]
            loss = loss + (i + 1) / 3 * F.cross_entropy(self.head(target).transpose(1, 2), labels[:, 1:])
        return loss


class Reused(nn.Module):
    """One tensor as keys and values, and one as all three of attention, under a mask that the batch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)]) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, rows = self.embed(input_ids), torch.arange(input_ids.shape[1])
        mask = (rows[:, None] >= rows) & (input_ids > VOCAB // 4)[:, None, None] | (rows[:, None] == rows)
        for query, shared, out in self.layers:
            q, k = (p(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for p in (query, shared))
            y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
            y = F.scaled_dot_product_attention(y, y, y, attn_mask=mask)
            x = x + out(y.transpose(1, 2).flatten(2)).tanh()
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


def build(model: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return model().double(), default_batch()


def _failures(models: list[type[nn.Module]]) -> list[str]:
    failed = []
    for model in models:
        comparison = _Comparison(partial(build, model), Pins(), "float64", 1)
        layouts = FixedLayouts(comparison.traced, 8, 16)
        for degrees, pins in MIXES.items():
            result = comparison.run(_from_rank_zero(partial(layouts.plan, degrees, pins)))
            if not result.passed:
                failed.append(f"{model.__name__}\n{result.text()}")
    return failed


def test_they_train_as_in_one_process() -> None:
    failed = run_ranks(2, _failures, [Habits, Preferences, Translation, Reused], timeout_s=280)[0]
    assert not failed, "\n\n".join(failed)
