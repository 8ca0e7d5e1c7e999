"""Linear layers that hide their tensor-parallel communication; `autopar.passes.overlap_collectives` puts them in.

tp_linear  Column-parallel linears that read one tensor, as one autograd op: the sum of their input gradients over the
           ranks is under way while the weight gradients are computed. The same products in the same order as the plain
           graph: the same bits, overlapped or not.
tp_ring    Under sequence sharding a gather before linears, or a reduce-scatter after one, falls into n - 1 hops round
           the ring, each under the product of a chunk. Equal to the plain graph up to rounding: a product of fewer
           rows may run by another kernel, and more than two ranks are summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.placement import CONVERSIONS, Placement, parse_placement
from autopar.runtime.collectives import resolve_group, run_collective, start_collective, widened
from autopar.runtime.streams import Hop

__all__ = ["column_linears", "linear_scattered"]


def column_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    src: str,
    dst: str,
    group: str,
    ring: bool = False,
    wide: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`[linear(convert(x, src, dst), w, b) for w, b in zip(weights, biases)]`; one tensor if there is one weight.

    x [b, s/n or s, h], weights [o/n, h]; `src` is R or S(d), `dst` is R|P. `ring` needs S(d). `wide` as in `convert`.
    """
    outputs: tuple[Tensor, ...] = _ColumnLinears.apply(
        x, parse_placement(src), parse_placement(dst), resolve_group(group), ring, wide, len(weights), *weights, *biases
    )
    return outputs if len(outputs) > 1 else outputs[0]


def linear_scattered(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dst: str, group: str, wide: bool = False
) -> Tensor:
    """`convert(linear(x, weight, bias), "P", dst)`, hop by hop: x [b, s, k/n], weight [h, k/n] -> [b, s/n, h].

    `bias` lies as P does: whole on the first rank, zero on the others.
    """
    result: Tensor = _LinearScattered.apply(x, weight, bias, parse_placement(dst).dim, resolve_group(group), wide)
    return result


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        src: Placement,
        dst: Placement,
        group: dist.ProcessGroup,
        ring: bool,
        wide: bool,
        count: int,
        *state: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = state[:count], state[count:]
        value, ctx.gradient = CONVERSIONS[src.kind, dst.kind]
        if ring:
            whole, outputs = _gathered_linears(x, weights, biases, src.dim, group)
        else:
            whole = run_collective(value, x, src, dst, group, wide=wide)
            outputs = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True) if w is not None]
        ctx.save_for_backward(whole, *weights)
        ctx.src, ctx.dst, ctx.group, ctx.ring, ctx.wide = src, dst, group, ring, wide
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        moved, pending = None, None
        if ctx.needs_input_grad[0] and ctx.ring:
            dim, group = ctx.src.dim, ctx.group
            pieces = [g.chunk(group.size(), dim) for g in grads]
            moved = _scattered(lambda c: _input_gradient([p[c] for p in pieces], weights), group, ctx.wide)
        elif ctx.needs_input_grad[0]:
            own = _input_gradient(grads, weights)
            pending = start_collective(ctx.gradient, own, ctx.dst, ctx.src, ctx.group, wide=ctx.wide)
        count = len(weights)
        needs_weights, needs_biases = ctx.needs_input_grad[7 : 7 + count], ctx.needs_input_grad[7 + count :]
        of_weights = [_weight_gradient(g, whole) if n else None for g, n in zip(grads, needs_weights, strict=True)]
        of_biases = [_rows(g).sum(0) if n else None for g, n in zip(grads, needs_biases, strict=True)]
        if pending is not None:
            moved = pending.wait()
        return (moved, *[None] * 6, *of_weights, *of_biases)


class _LinearScattered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: dist.ProcessGroup, wide: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group = dim, group
        chunks = x.chunk(group.size(), dim)
        return _scattered(lambda c: F.linear(chunks[c], weight, bias), group, wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        whole, (of_input,) = _round(grad, [lambda g: g @ weight], ctx.dim, ctx.group)
        of_weight = _weight_gradient(whole, x) if ctx.needs_input_grad[1] else None
        of_bias = _rows(whole).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Summed last linear first, as autograd does, so that the bits are those of the plain graph."""
    total = grads[-1] @ weights[-1]
    for grad, weight in zip(reversed(grads[:-1]), reversed(weights[:-1]), strict=True):
        total = total + grad @ weight
    return total


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _rows(grad).t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _gathered_linears(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, list[Tensor]]:
    pairs = [(w, b) for w, b in zip(weights, biases, strict=True) if w is not None]
    return _round(x, [lambda c, w=w, b=b: F.linear(c, w, b) for w, b in pairs], dim, group)  # type: ignore[misc]


def _round(
    x: Tensor, products: Sequence[Callable[[Tensor], Tensor]], dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, list[Tensor]]:
    """The chunks of all ranks joined along `dim`, and every product of them; a chunk leaves before it is multiplied."""
    rank, ranks = group.rank(), group.size()
    held = x.contiguous()
    chunks: list[Tensor] = [held] * ranks
    made: list[list[Tensor]] = [[held] * ranks for _ in products]
    for step in range(ranks):
        source = (rank - step) % ranks
        arriving = Hop(held, group) if step < ranks - 1 else None
        chunks[source] = held
        for results, product in zip(made, products, strict=True):
            results[source] = product(held)
        held = arriving.wait() if arriving is not None else held
    return torch.cat(chunks, dim), [torch.cat(results, dim) for results in made]


def _scattered(product: Callable[[int], Tensor], group: dist.ProcessGroup, wide: bool) -> Tensor:
    """This rank's chunk of the sum over ranks of `product(chunk)`; a sum travels while the next product is computed."""
    rank, ranks = group.rank(), group.size()
    part = product((rank - 1) % ranks)
    dtype = part.dtype
    total = widened(part) if wide else part
    for step in range(1, ranks):
        arriving = Hop(total.contiguous(), group)
        part = product((rank - 1 - step) % ranks)
        total = arriving.wait() + part
    return total.to(dtype)
