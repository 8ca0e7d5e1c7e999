"""Composite ops: chains that a model writes as several ATen ops, kept as one node so that search and passes see the op.

Each is bit-identical to the chain it stands for. They use no collective: every argument is what the rank holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rms_norm", "update_buffer"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, compute_dtype: torch.dtype | None = None, unit_offset: bool = False
) -> Tensor:
    """Root-mean-square norm over the last dim, op for op as Hugging Face models write it.

    x [..., h], weight [h] -> [..., h]. The statistics are taken in `compute_dtype` (None: the dtype of `x`).
    `unit_offset` is Gemma's form: scale by `1 + weight` in `compute_dtype`, then cast back. Otherwise the cast comes
    first and `weight` multiplies in its own dtype.
    """
    dtype = x.dtype if compute_dtype is None else compute_dtype
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.to(dtype))).to(x.dtype)
    return weight * normed.to(x.dtype)


def update_buffer(buffer: Tensor, value: Tensor) -> Tensor:
    """Store `value` in a buffer of the model, as forward does once for every micro-batch; returns the buffer."""
    with torch.no_grad():
        return buffer.copy_(value)
