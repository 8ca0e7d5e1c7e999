"""One block of attention with its log-sum-exp, forward and backward: what ring attention is assembled from.

The fused kernels take and return what is needed: given the output and log-sum-exp of the whole row, the backward of one
block of keys is that block's share of the whole gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["block_backward", "block_forward", "merge"]

aten = torch.ops.aten


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of q [b, h, s, d] to k, v [b, g, t, d]: output [b, h, s, d] and log-sum-exp [b, h, s] (fp32 or fp64).

    h / g query heads share a key/value head. `causal` aligns the first query with the first key and needs s = t.
    """
    k, v = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    if _has_flash(q):
        operands = map(_filled_up, (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*operands, 0.0, causal, False, scale=_scale(q, scale))
        return out[..., : q.shape[-1]], lse
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v that one block of keys contributes; `out` and `lse` are those of the whole rows."""
    groups = k.shape[1]
    k, v = _repeated(k, q), _repeated(v, q)
    dq, dk, dv = _backward(grad, q, k, v, out, lse, causal, scale)
    return dq, _summed(dk, groups), _summed(dv, groups)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Each key/value head once for every query head that reads it."""
    times = q.shape[1] // x.shape[1]
    return x.repeat_interleave(times, 1) if times > 1 else x


def _summed(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).sum(2) if x.shape[1] != groups else x


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        return dq, dk, dv
    if _has_flash(q):
        seed = torch.zeros((2,), dtype=torch.uint64, device=q.device)  # read only with dropout
        lengths = (None, None, q.shape[2], k.shape[2])
        backward = aten._scaled_dot_product_flash_attention_backward
        operands = map(_filled_up, (grad, q, k, v, out))
        dropout = (0.0, causal, seed, seed.new_zeros(()))
        gradients = backward(*operands, lse, *lengths, *dropout, scale=_scale(q, scale))
        dq, dk, dv = (g[..., : q.shape[-1]] for g in gradients)
        return dq, dk, dv
    p = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    ds = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * _scale(q, scale)
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


def _has_flash(q: Tensor) -> bool:
    """Whether the CUDA kernel takes such heads: 16 bits, at most 256 wide, from Ampere on."""
    narrow = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    return narrow and torch.cuda.get_device_capability(q.device)[0] >= 8


def _filled_up(x: Tensor) -> Tensor:
    """With zeros to a width that is a multiple of 8, as the CUDA kernel wants heads."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from that over each. `out` is kept in the lse's dtype."""
    total = torch.logaddexp(lse, other_lse)
    weights = (lse - total).exp().unsqueeze(-1), (other_lse - total).exp().unsqueeze(-1)
    return out * weights[0] + other_out.to(lse.dtype) * weights[1], total


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * _scale(q, scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores
