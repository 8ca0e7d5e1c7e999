"""Transformers of the two shapes that published runs report: GPT-like (LayerNorm, biases, GELU), Llama-like (RMSNorm,
rotary positions, SwiGLU). Built on the meta device; two layers stand for all, since equal layers are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BlockShape", "ReferenceModel", "example"]

CAPTURED_LAYERS = 2


@dataclass(frozen=True)
class BlockShape:
    """What two runs must share to share a capture. Query heads are grouped over `kv_heads`."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated_mlp: bool
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def fused_qkv(self) -> bool:
        """GPT-like models project q, k and v at once."""
        return not self.gated_mlp and self.kv_heads == self.heads

    @property
    def layer_parameters(self) -> int:
        """Matrix parameters of one layer."""
        key_value = 2 * self.hidden * self.kv_heads * self.head_dim
        return 2 * self.hidden**2 + key_value + (3 if self.gated_mlp else 2) * self.hidden * self.ffn


class _Attention(nn.Module):
    def __init__(self, shape: BlockShape, *, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.head_dim, self.rotary, self.repeats = shape.head_dim, rotary, shape.heads // shape.kv_heads
        self.fused = shape.fused_qkv
        if self.fused:
            self.qkv_proj = nn.Linear(shape.hidden, 3 * shape.hidden, bias=bias)
        else:
            self.q_proj = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=bias)
            self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=bias)
            self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        separate = () if self.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        parts = self.qkv_proj(x).chunk(3, dim=-1) if self.fused else separate
        q, k, v = (part.view(batch, seq, -1, self.head_dim).transpose(1, 2) for part in parts)
        if self.rotary:
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.repeats > 1)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class _GatedMlp(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Mlp(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden, shape.ffn)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class _Block(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        gated = shape.gated_mlp
        self.norm1, self.norm2 = (_norm(shape) for _ in range(2))
        self.attn = _Attention(shape, bias=not gated, rotary=gated)
        self.mlp: nn.Module = _GatedMlp(shape) if gated else _Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class _RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


def _norm(shape: BlockShape) -> nn.Module:
    return _RmsNorm(shape.hidden) if shape.gated_mlp else nn.LayerNorm(shape.hidden)


class ReferenceModel(nn.Module):
    """`forward(input_ids, labels) -> loss`. GPT-like models tie the head to the embedding, Llama-like ones do not."""

    def __init__(self, shape: BlockShape, positions: int, layers: int = CAPTURED_LAYERS) -> None:
        super().__init__()
        self.rotary, self.head_dim = shape.gated_mlp, shape.head_dim
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        if not self.rotary:
            self.positions = nn.Embedding(positions, shape.hidden)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(layers))
        self.norm = _norm(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if not self.rotary:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        if self.rotary:
            angles = places.to(torch.float32)[:, None] / 10000 ** (
                torch.arange(0, self.head_dim, 2, device=input_ids.device) / self.head_dim
            )
            angles = torch.cat((angles, angles), dim=-1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        else:
            x = x + self.positions(places)
            cos = sin = x
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def example(shape: BlockShape, batch: int = 2, seq: int = 16) -> dict[str, Tensor]:
    ids = torch.ones((batch, seq), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}
