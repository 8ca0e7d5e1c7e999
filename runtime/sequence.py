"""Order and length of sequences that are cut over ranks. No communication.

In zigzag order a sequence of 2n chunks lies as 0, 2n-1, 1, 2n-2, ..., so that cutting it into n equal parts gives rank
r an early and a late chunk: under a causal mask every rank then has the same number of query-key pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir import InputSpec

__all__ = ["from_zigzag", "pad_sequences", "sequence_length", "to_zigzag", "zigzag_part"]


def to_zigzag(x: Tensor, dim: int, ranks: int) -> Tensor:
    """`x` with the 2 * ranks chunks of `dim` in zigzag order. Raises ValueError if the dim does not divide."""
    return _reorder(x, dim, _zigzag(ranks), ranks)


def from_zigzag(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Inverse of `to_zigzag`."""
    order = _zigzag(ranks)
    return _reorder(x, dim, [order.index(chunk) for chunk in range(2 * ranks)], ranks)


def zigzag_part(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The part of `rank` in `to_zigzag(x, dim, ranks)`, in memory of its own."""
    return _reorder(x, dim, _zigzag(ranks)[2 * rank : 2 * rank + 2], ranks)


def pad_sequences(
    inputs: Mapping[str, Tensor], specs: Sequence[InputSpec], multiple: int, fill: Mapping[str, int]
) -> dict[str, Tensor]:
    """Inputs with every sequence dim padded at the end to a multiple of `multiple`, with `fill[name]` or zero."""
    padded = dict(inputs)
    for spec in specs:
        if spec.seq_dim is None:
            continue
        x = padded[spec.name]
        missing = -x.shape[spec.seq_dim] % multiple
        if missing:
            long = [size == spec.shape[spec.seq_dim] for size in spec.shape]  # a mask [seq, seq] has two
            widths = [w for added in reversed(long) for w in (0, missing * added)]
            padded[spec.name] = F.pad(x, widths, value=fill.get(spec.name, 0))
    return padded


def sequence_length(specs: Sequence[InputSpec], inputs: Mapping[str, Tensor]) -> int | None:
    """Tokens of a sequence; None if no input has any."""
    return next((inputs[s.name].shape[s.seq_dim] for s in specs if s.seq_dim is not None), None)


def _zigzag(ranks: int) -> list[int]:
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]


def _reorder(x: Tensor, dim: int, order: list[int], ranks: int) -> Tensor:
    if x.shape[dim] % (2 * ranks):
        raise ValueError(f"dim {dim} of size {x.shape[dim]} does not divide into {2 * ranks} chunks")
    chunks: Tensor = x.unflatten(dim, (2 * ranks, -1))
    return chunks.index_select(dim, torch.tensor(order, device=x.device)).flatten(dim, dim + 1)
