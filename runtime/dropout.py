"""Dropout whose mask does not depend on how a tensor is cut.

Each element's fate is a hash of (seed, op, row, position in the row), all of them global: the row is the sequence's
number since training began, the position that of the whole tensor. So the mask of a replicated tensor is the same on
every tp rank, shards have the right part of it, replicas and micro-batches differ, a recomputed layer drops the
same elements, and training under any plan drops what one process drops.

Attention probabilities never exist as a tensor in a fused kernel, so attention draws from torch's generator, seeded by
the same things and by the rank's shard: reproducible for a plan, different on different heads and rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.placement import parse_placement
from autopar.runtime.collectives import resolve_group
from autopar.runtime.sequence import to_zigzag
from autopar.runtime.sharding import local_slice

__all__ = ["attention_with_dropout", "keep_mask", "seeded_dropout"]

Cut = tuple[str, str, bool]
"""(group, placement, zigzag) of one cut of a tensor, outermost first"""


def seeded_dropout(
    x: Tensor, row_ids: Tensor, p: float, *, training: bool, key: int, cuts: Sequence[Cut] = ()
) -> Tensor:
    """Dropout of x [rows, ...] with the mask of `keep_mask`; row_ids [rows] int64. Kept elements are scaled by 1/(1-p).

    key: a number of its own for each op. cuts: how x is cut, outermost first.
    """
    if not training or p == 0.0:
        return x
    keep = keep_mask(x, row_ids, p, key, cuts)
    return x * keep.to(x.dtype).div_(1.0 - p) if p < 1.0 else x * 0.0


def keep_mask(x: Tensor, row_ids: Tensor, p: float, key: int, cuts: Sequence[Cut]) -> Tensor:
    """Bool, broadcastable to x [rows, ...] unless a dim is cut: True where the element is kept."""
    position = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim in range(1, x.dim()):
        own = _positions(x.shape[dim], dim, cuts, x.device)
        position = position.unsqueeze(-1) * _prime(dim) + own
    rows = row_ids.to(x.device).reshape(-1, *[1] * (x.dim() - 1))
    bits = _mix(_mix(position.unsqueeze(0) ^ _signed(key * 0x9E3779B97F4A7C15)) + rows * _signed(0xD1B54A32D192ED03))
    return (bits >> 8 & 0xFFFFFF) >= int(p * 2**24)


def _positions(size: int, dim: int, cuts: Sequence[Cut], device: torch.device) -> Tensor:
    """Global positions along `dim` of the elements this rank holds."""
    here = [(resolve_group(g), parse_placement(text), zigzag) for g, text, zigzag in cuts if f"S({dim}" in text]
    whole = size
    for group, _, _ in here:
        whole *= group.size()
    positions = torch.arange(whole, device=device)
    for group, placement, zigzag in here:
        flat = to_zigzag(positions, 0, group.size()) if zigzag else positions
        along = parse_placement(str(placement).replace(f"S({dim}", "S(0"))
        positions = local_slice(flat, along, group.rank(), group.size())
    return positions


def _signed(value: int) -> int:
    """A 64-bit constant as torch's int64 holds it."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _prime(dim: int) -> int:
    """Odd multipliers that keep positions of different dims apart; wrapping around is harmless."""
    return (1_000_003, 998_244_353, 2_147_483_647, 1_000_000_007)[dim % 4]


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, on int64 with wrap-around; `>>` is made logical by masking."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_ids: Tensor,
    mask: Tensor | None = None,
    *,
    p: float,
    is_causal: bool,
    training: bool,
    key: int,
    scale: float | None = None,
    enable_gqa: bool = False,
    cuts: Sequence[Cut] = (),
) -> Tensor:
    """scaled_dot_product_attention with dropout from a generator state of its own, another on each part of a cut."""
    if not training or p == 0.0:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    part = 0
    for name, _, _ in cuts:
        group = resolve_group(name)
        part = part * group.size() + group.rank()
    first = int(row_ids[0]) if row_ids.numel() else 0
    devices = [q.device] if q.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((key * 1_000_003 + first * 8_191 + part) % 2**63)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
