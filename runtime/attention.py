"""Attention over a sequence that is cut over the ranks of context parallelism.

Three ways, equal in value, different in what they move (n ranks, K and V of the local sequence of B bytes each):

    ring        K and V travel round the ring, n - 1 hops of 2 B, each under the attention of the block before; in
                backward their gradients travel with them
    all-gather  K and V are gathered, 2 B (n - 1), at once and exposed; simple, good for short sequences
    all-to-all  heads are exchanged for sequence, 4 B / n a rank; needs heads divisible by n, attention is then local

Causal attention is balanced by the zigzag order: the sequence is cut into 2n chunks and rank r holds chunks r and
2n - 1 - r, so that every rank has the same number of query-key pairs. In zigzag order a rank meets the block of rank j
in one of three ways: its own (causal), an earlier one (all queries see its first half), a later one (the second half of
the queries sees all of it).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.attention_block import block_backward, block_forward, merge
from autopar.runtime.clock import waiting
from autopar.runtime.collectives import all_gather_single, finished, issue_reduce_scatter, resolve_group
from autopar.runtime.sequence import from_zigzag, to_zigzag
from autopar.runtime.streams import Hop
from autopar.runtime.tape import KeptOutput

__all__ = ["KINDS", "context_attention", "query_key_pairs"]

KINDS = ("ring", "all-gather", "all-to-all")


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    kind: str = "ring",
    group: str,
    kept: KeptOutput | None = None,
    overlap: bool = True,
) -> Tensor:
    """Attention of this rank's queries [b, h, s/n, d] to the keys [b, g, s/n, d] of all ranks; result [b, h, s/n, e].

    Key/value heads may be fewer (h / g query heads share one); they travel as they are. Values may have another width
    e than keys (latent attention): round the ring and when gathered, the narrower is filled up with zeros.

    Causal sequences lie in zigzag order, others in their own. What `kept` holds is not computed again. `overlap`: hops
    of the ring are under way while a block is computed; without it they come first, the same bits.

    Raises ValueError for an unknown kind, or heads that all-to-all cannot share out.
    """
    process_group = resolve_group(group)
    if process_group.size() == 1:
        grouped = k.shape[1] != q.shape[1]
        with kept or nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    if kind == "all-to-all":
        return _all_to_all(q, k, v, is_causal, scale, process_group, kept)
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
    width = v.shape[-1]
    if k.shape[-1] != width:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        widest = max(k.shape[-1], width)
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    result: Tensor = _OverRanks.apply(q, k, v, is_causal, scale, process_group, kind, kept, overlap)
    return result if result.shape[-1] == width else result[..., :width]


def query_key_pairs(length: int, ranks: int, causal: bool) -> list[int]:
    """Query-key pairs each rank computes for one head of one sequence, as the kernels above execute them."""
    if not causal:
        return [length * length // ranks] * ranks
    chunk = length // (2 * ranks)
    pairs = []
    for rank in range(ranks):
        starts = (rank * chunk, (2 * ranks - 1 - rank) * chunk)
        pairs.append(sum(sum(range(s + 1, s + chunk + 1)) for s in starts))
    return pairs


def _parts(q: Tensor, rank: int, source: int, causal: bool) -> tuple[slice, slice, bool]:
    """Which queries meet which keys of the block of `source`, and whether under the causal mask."""
    everything = slice(None)
    if not causal or rank == source:
        return everything, everything, causal
    half = q.shape[2] // 2
    return (everything, slice(None, half), False) if source < rank else (slice(half, None), everything, False)


class _Accumulated:
    """Rows of attention output that grow block by block."""

    def __init__(self, q: Tensor) -> None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)

    def add(self, q: Tensor, k: Tensor, v: Tensor, where: tuple[slice, slice, bool], scale: float | None) -> None:
        queries, keys, causal = where
        out, lse = block_forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal, scale)
        self.out[:, :, queries], self.lse[:, :, queries] = merge(
            self.out[:, :, queries], self.lse[:, :, queries], out, lse
        )


def _block_gradients(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    where: tuple[slice, slice, bool],
    scale: float | None,
    dq: Tensor,
) -> Tensor:
    """Add the block's share to `dq`; return its gradient of K and V, stacked."""
    queries, keys, causal = where
    rows = (x[:, :, queries].contiguous() for x in (grad, q))
    g, local_q = rows
    shares = block_backward(
        g, local_q, kv[0][:, :, keys], kv[1][:, :, keys], out[:, :, queries].contiguous(),
        lse[:, :, queries].contiguous(), causal, scale,
    )  # fmt: skip
    dq[:, :, queries] += shares[0]
    dkv = torch.zeros_like(kv)
    dkv[0][:, :, keys], dkv[1][:, :, keys] = shares[1], shares[2]
    return dkv


class _OverRanks(torch.autograd.Function):
    """Attention to the keys of all ranks, by ring or by all-gather: they differ in how K and V come and go."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float | None,
        group: dist.ProcessGroup,
        kind: str,
        kept: KeptOutput | None,
        overlap: bool,
    ) -> Tensor:
        q, kv = q.contiguous(), torch.stack([k, v])
        ctx.options, ctx.kind = (causal, scale, group, overlap), kind
        run = _ring if kind == "ring" else _gathered
        compute = lambda: run(q, kv, *ctx.options)  # noqa: E731
        out, lse = kept.once(compute) if kept is not None else compute()
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run = _ring_gradients if ctx.kind == "ring" else _gathered_gradients
        dq, dkv = run(grad, *ctx.saved_tensors, *ctx.options)
        return dq, dkv[0], dkv[1], None, None, None, None, None, None


def _ring(
    q: Tensor, kv: Tensor, causal: bool, scale: float | None, group: dist.ProcessGroup, overlap: bool
) -> tuple[Tensor, Tensor]:
    """(output in q's dtype, log-sum-exp) of the rows of `q`; `kv` [2, b, g, s/n, d] travels round the ring."""
    rank, ranks = group.rank(), group.size()
    result = _Accumulated(q)
    for step in range(ranks):
        arriving = Hop(kv, group, overlap) if step < ranks - 1 else None
        result.add(q, kv[0], kv[1], _parts(q, rank, (rank - step) % ranks, causal), scale)
        kv = arriving.wait() if arriving is not None else kv
    return result.out.to(q.dtype), result.lse


def _ring_gradients(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float | None, group: dist.ProcessGroup, overlap: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rank, ranks = group.rank(), group.size()
    dq = torch.zeros_like(q)
    travelling: Hop | None = None  # the gradient of a block follows the block, one step behind
    for step in range(ranks):
        arriving = Hop(kv, group, overlap) if step < ranks - 1 else None
        where = _parts(q, rank, (rank - step) % ranks, causal)
        dkv = _block_gradients(grad, q, kv, out, lse, where, scale, dq)
        if travelling is not None:
            dkv += travelling.wait()
        travelling = Hop(dkv, group, overlap)
        kv = arriving.wait() if arriving is not None else kv
    assert travelling is not None
    return dq, travelling.wait()


def _gathered(
    q: Tensor, kv: Tensor, causal: bool, scale: float | None, group: dist.ProcessGroup, overlap: bool
) -> tuple[Tensor, Tensor]:
    """As `_ring`, with all of K and V gathered at once."""
    blocks, result = _gather(kv, group), _Accumulated(q)
    for source in range(group.size()):
        result.add(q, blocks[source][0], blocks[source][1], _parts(q, group.rank(), source, causal), scale)
    return result.out.to(q.dtype), result.lse


def _gathered_gradients(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float | None, group: dist.ProcessGroup, overlap: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    blocks, dq = _gather(kv, group), torch.zeros_like(q)
    shares = torch.empty_like(blocks)
    for source in range(group.size()):
        where = _parts(q, group.rank(), source, causal)
        shares[source] = _block_gradients(grad, q, blocks[source], out, lse, where, scale, dq)
    with waiting(group):
        return dq, finished(issue_reduce_scatter(shares, group))


def _gather(kv: Tensor, group: dist.ProcessGroup) -> Tensor:
    blocks = kv.new_empty((group.size(), *kv.shape))
    with waiting(group):
        all_gather_single(blocks.view(-1), kv.contiguous().view(-1), group=group)  # gloo wants as many dims
    return blocks


def _all_to_all(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, group: dist.ProcessGroup,
    kept: KeptOutput | None,
) -> Tensor:  # fmt: skip
    """Whole sequence for h/n heads, attention there, and back."""
    ranks = group.size()
    for name, heads in (("query", q.shape[1]), ("key/value", k.shape[1])):
        if heads % ranks:
            raise ValueError(f"{heads} {name} heads do not divide over {ranks} ranks; use ring or all-gather")
    whole_q, whole_k, whole_v = (_Exchange.apply(x, True, causal, group) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    with kept or nullcontext():
        out = F.scaled_dot_product_attention(
            whole_q, whole_k, whole_v, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    result: Tensor = _Exchange.apply(out, False, causal, group)
    return result


class _Exchange(torch.autograd.Function):
    """[b, h, s/n, d] <-> [b, h/n, s, d]; the whole sequence in its own order, the cut one in zigzag order if causal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool, zigzag: bool, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = (to_heads, zigzag, group)
        return _exchange(x, to_heads, zigzag, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        to_heads, zigzag, group = ctx.arguments
        return _exchange(grad, not to_heads, zigzag, group), None, None, None


def _exchange(x: Tensor, to_heads: bool, zigzag: bool, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    cut, joined = (1, 2) if to_heads else (2, 1)
    if not to_heads and zigzag:
        x = to_zigzag(x, 2, ranks)
    outgoing = x.unflatten(cut, (ranks, -1)).movedim(cut, 0).contiguous()
    incoming = torch.empty_like(outgoing)
    with waiting(group):
        dist.all_to_all_single(incoming, outgoing, group=group)
    result: Tensor = incoming.movedim(0, joined).flatten(joined, joined + 1)
    return (from_zigzag(result, 2, ranks) if to_heads and zigzag else result).contiguous()
