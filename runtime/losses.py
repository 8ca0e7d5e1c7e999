"""Embedding and cross entropy on a vocabulary that may be cut over a mesh axis.

Losses are sums over the tokens that count, never means: only the sum is the same however a batch is cut. The engine
divides by the number of tokens of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.clock import waiting
from autopar.runtime.collectives import resolve_group

__all__ = [
    "cross_entropy_loss",
    "cross_entropy_sum",
    "vocab_parallel_cross_entropy_loss",
    "vocab_parallel_cross_entropy_sum",
    "vocab_parallel_embedding",
]


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, *, group: str, vocab: int, padding_idx: int | None = None
) -> Tensor:
    """This rank's summand of the embedding: zero where another rank owns the row. Placement P over `group`.

    ids [...] (global, the same on all ranks), weight [vocab/n, h] (S(0), rounded up) -> [..., h]. Raises RuntimeError
    for an id outside the vocabulary.
    """
    torch._assert_async(((ids >= 0) & (ids < vocab)).all(), "embedding index outside the vocabulary")
    rows = weight.shape[0]
    first = resolve_group(group).rank() * rows
    local = ids - first
    elsewhere = (local < 0) | (local >= rows)
    own_padding = None
    if padding_idx is not None and first <= padding_idx < first + rows:
        own_padding = padding_idx - first
    embedded = F.embedding(local.masked_fill(elsewhere, 0), weight, padding_idx=own_padding)
    return embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def cross_entropy_loss(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Mean over tokens of the cross entropy; the dims of the tokens stay apart: logits [..., vocab], target [...]."""
    return F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def cross_entropy_sum(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Sum over tokens of the cross entropy, tokens whose target is `ignore_index` left out.

    logits [..., vocab], target [...] (class indices) -> 0-d, in fp32 for 16-bit logits, else in their dtype.
    """
    wide = logits.flatten(0, -2).to(_loss_dtype(logits.dtype))
    return F.cross_entropy(
        wide, target.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )


def vocab_parallel_cross_entropy_sum(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    group: str,
    vocab: int | None = None,
) -> Tensor:
    """`cross_entropy_sum` of logits whose last dim is cut over `group`; the result is the same on every rank.

    logits [..., vocab/n] (S(last)), target [...] (the same on all ranks) -> 0-d. Moves three numbers a token (four with
    label smoothing) instead of gathering the logits. `vocab`: the classes there are, if the ranks do not divide them;
    columns past them take no part. Raises RuntimeError for a target outside the vocabulary.
    """
    process_group = resolve_group(group)
    classes = logits.shape[-1] * process_group.size() if vocab is None else vocab
    result: Tensor = _VocabParallelCrossEntropy.apply(
        logits.flatten(0, -2), target.flatten(), ignore_index, label_smoothing, classes, process_group
    )
    return result


def vocab_parallel_cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    group: str,
    vocab: int | None = None,
) -> Tensor:
    """`cross_entropy_loss` of logits whose last dim is cut over `group`; NaN if no token counts, like torch."""
    total = vocab_parallel_cross_entropy_sum(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, group=group, vocab=vocab
    )
    count = (target != ignore_index).sum()
    # Not total / 0: its gradient would be NaN where that of torch is zero.
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per token: loss = lse - (1 - a) x_t - a mean(x), with lse = log sum exp(x), t the target, a the smoothing."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ignore_index: int,
        smoothing: float,
        vocab: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        columns = logits.shape[-1]
        own = min(columns, vocab - group.rank() * columns)  # the last rank's may be filled up
        x = logits.narrow(-1, 0, own).to(_loss_dtype(logits.dtype))
        counted = target != ignore_index
        torch._assert_async(
            (((target >= 0) & (target < vocab)) | ~counted).all(), "cross entropy target outside the vocabulary"
        )
        local = target - group.rank() * columns
        owned = counted & (local >= 0) & (local < columns)
        local = local.masked_fill(~owned, 0)

        peak = x.amax(-1)
        with waiting(group):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = x - peak.unsqueeze(-1)
        at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~owned, 0.0)
        exponentials = shifted.exp()
        sums = [exponentials.sum(-1), at_target]
        if smoothing:
            sums.append(shifted.sum(-1))
        totals = torch.stack(sums)
        with waiting(group):
            dist.all_reduce(totals, group=group)
        per_token = totals[0].log() - (1.0 - smoothing) * totals[1]
        if smoothing:
            per_token = per_token - smoothing * totals[2] / vocab

        ctx.save_for_backward(exponentials.div_(totals[0].unsqueeze(-1)), local, owned, counted)
        ctx.smoothing, ctx.vocab, ctx.dtype, ctx.filled = smoothing, vocab, logits.dtype, columns - own
        return per_token.masked_fill(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        probabilities, local, owned, counted = ctx.saved_tensors
        # Not grad * counted: where no token counts, the loss is divided by zero and grad is infinite, and torch's
        # gradient is zero for what is ignored.
        weight = torch.where(counted, grad, 0.0)
        result = (probabilities - ctx.smoothing / ctx.vocab) * weight.unsqueeze(-1)
        hit = (1.0 - ctx.smoothing) * torch.where(owned, grad, 0.0)
        result.scatter_add_(-1, local.unsqueeze(-1), -hit.unsqueeze(-1))
        result = result.to(ctx.dtype)
        return F.pad(result, [0, ctx.filled]) if ctx.filled else result, None, None, None, None, None


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over tokens and vocabulary are taken in fp32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
