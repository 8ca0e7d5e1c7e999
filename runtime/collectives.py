"""Conversions between placements: the only communication inside a rewritten graph.

A conversion is one node, `convert(x, src, dst, group="tp")`. Its forward is the value collective of
`autopar.placement.CONVERSIONS`, its backward the gradient collective. In a graph `group` is the name of a mesh axis;
`bind` replaces it by the name of a process group, which is a string too, so that a bound graph still prints and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d

from autopar.placement import CONVERSIONS, LAST_RESORT, Placement, parse_placement
from autopar.runtime.clock import waiting
from autopar.runtime.sequence import from_zigzag, to_zigzag, zigzag_part
from autopar.runtime.sharding import filled_up, join_shards, local_slice, split_shards
from autopar.runtime.streams import Pending

Issued = tuple["dist.Work | None", Callable[[], Tensor]]

# torch 2.13 renamed both and warns about the old names. Flat views below: gloo wants input and output of equal rank.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

__all__ = [
    "all_gather_single",
    "bind",
    "convert",
    "finished",
    "issue_reduce_scatter",
    "reduce_scatter_single",
    "resolve_group",
    "run_collective",
    "start_collective",
    "widened",
]


def convert(
    x: Tensor,
    src: str,
    dst: str,
    *,
    group: str,
    zigzag: bool = False,
    wide: bool = False,
    uneven: Sequence[int] | None = None,
    owned: Sequence[bool] = (False, False),
) -> Tensor:
    """Move `x` from placement `src` to `dst` over `group`, differentiably.

    `uneven`: (dim, size of the whole tensor there) of a dim that the ranks do not divide: its shards are filled up with
    zeros, which no whole tensor shows.

    `wide`: sums of 16-bit tensors, forward and backward, are taken and sent in fp32.

    `owned`: whether nobody else reads `x`, and the gradient: a sum is then taken where they lie, not in a copy.

    `zigzag`: a shard of rank r of n are the chunks r and 2n-1-r of the dim's 2n, in that order.
    `x` is this rank's part under `src`, the result its part under `dst`. Any dtype; only tensors that need a gradient
    pay for one. Raises ValueError for a pair that CONVERSIONS does not offer or a dim that does not divide.
    """
    source, target = parse_placement(src), parse_placement(dst)
    pair = CONVERSIONS.get((source.kind, target.kind)) or LAST_RESORT.get((source.kind, target.kind))
    if pair is None:
        raise ValueError(f"no conversion from {source} to {target}")
    process_group = resolve_group(group)
    if x.requires_grad and torch.is_grad_enabled():
        options = (process_group, zigzag, wide, uneven)
        result: Tensor = _Convert.apply(x, pair, source, target, options, owned)
        return result
    return run_collective(pair[0], x, source, target, process_group, zigzag, wide, uneven, owned=owned[0])


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        pair: tuple[str, str],
        src: Placement,
        dst: Placement,
        options: tuple[Any, ...],
        owned: Sequence[bool],
    ) -> Tensor:
        ctx.gradient, ctx.src, ctx.dst, ctx.options = pair[1], src, dst, (*options, owned[1])
        result = run_collective(pair[0], x, src, dst, *(*options, owned[0]))
        return result.view_as(result) if result is x else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        # The gradient travels the other way: it lies as `dst` says and must come to lie as `src` says.
        moved = run_collective(ctx.gradient, grad, ctx.dst, ctx.src, *ctx.options)
        return moved, None, None, None, None, None


def run_collective(
    name: str,
    x: Tensor,
    src: Placement,
    dst: Placement,
    group: dist.ProcessGroup,
    zigzag: bool = False,
    wide: bool = False,
    uneven: Sequence[int] | None = None,
    owned: bool = False,
) -> Tensor:
    """One collective by its name in CONVERSIONS; may return `x`, and writes into it only if it is `owned`."""
    if wide and name in ("all_reduce", "reduce_scatter") and widened(x) is not x:
        return run_collective(name, widened(x), src, dst, group, zigzag, uneven=uneven, owned=True).to(x.dtype)
    if uneven is not None and dst.is_shard and dst.dim == uneven[0] and name != "none":
        x = filled_up(x, dst, group.size())
    if zigzag and dst.is_shard and dst.left == 1 and name == "slice":
        return zigzag_part(x, dst.dim, group.rank(), group.size())
    if zigzag and dst.is_shard and name in ("slice", "reduce_scatter"):
        x = to_zigzag(x, dst.dim, group.size())
    if name == "all_reduce" and not owned:
        x = x.clone(memory_format=torch.contiguous_format)
    if name in _COMMUNICATE:
        with waiting(group):
            result = _COLLECTIVES[name](x, src, dst, group)
    else:
        result = _COLLECTIVES[name](x, src, dst, group)
    if zigzag and src.is_shard and name in ("all_gather", "pad"):
        result = from_zigzag(result, src.dim, group.size())
    if uneven is not None and src.is_shard and src.dim == uneven[0] and result.shape[src.dim] != x.shape[src.dim]:
        result = result.narrow(src.dim, 0, uneven[1]).contiguous()
    return result


def start_collective(
    name: str, x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup, *, wide: bool = False
) -> Pending:
    """`run_collective` of an owned `x` begun: an all_reduce or a reduce_scatter whose result `wait` returns. The same
    bits."""
    return Pending(lambda: _ISSUED[name](widened(x) if wide else x, dst, group, x.dtype, True), (x,), group)


def widened(x: Tensor) -> Tensor:
    """A 16-bit tensor in fp32, any other as it is: sums of 16-bit numbers lose small terms."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of a name that `bind` put into a graph. Raises ValueError for an axis name left unbound."""
    try:
        group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except (LookupError, RuntimeError) as error:
        raise ValueError(f"{name!r} is no process group here; was the graph bound?") from error
    return group


def bind(module: nn.Module, groups: Mapping[str, str], wide: Collection[str] = ()) -> None:
    """Replace axis names by process group names in every node of every graph under `module`, in place.

    Conversions over the axes in `wide` sum 16-bit tensors in fp32.
    """
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule) and _bind_graph(inner.graph, groups, wide):
            inner.recompile()


def _bind_graph(graph: fx.Graph, groups: Mapping[str, str], wide: Collection[str]) -> bool:
    changed = False
    for node in graph.nodes:
        named = {k: v for k, v in node.kwargs.items() if k in ("group", "cuts")} if node.op == "call_function" else {}
        bound = fx.node.map_aggregate(named, lambda a: groups.get(a, a) if isinstance(a, str) else a)
        if bound != named:
            # itself, kept on a tape, or fused with a linear
            converts = node.target is convert or convert.__name__ in node.args[:2] or "wide" in node.kwargs
            if converts and named.get("group") in wide:
                bound = {**bound, "wide": True}
            if node.target is convert:
                bound = {**bound, "owned": _owned(node)}
            node.kwargs = {**node.kwargs, **bound}
            changed = True
    return changed


def _owned(node: fx.Node) -> tuple[bool, bool]:
    """Whether only this conversion reads its input, and only it gets its gradient: autograd keeps no output of a
    linear, and its gradient is a fresh product. What is kept on a tape is no plain linear any more."""
    source = node.args[0]
    value = isinstance(source, fx.Node) and source.target is _linear and len(source.users) == 1
    return value, all(user.target is _linear and user.args[0] is node for user in node.users)


_linear = torch.ops.aten.linear.default


def _none(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    return x


def _slice(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    """In memory of its own: autograd may keep a part for long, and a view would keep the whole."""
    part = local_slice(x, dst, group.rank(), group.size())
    return part.clone() if part.nbytes < part.untyped_storage().nbytes() else part


def _pad(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor with zeros where other ranks hold the values: a summand of it."""
    stacked = x.new_zeros((group.size(), *x.shape))
    stacked[group.rank()] = x
    return join_shards(stacked, src)


def _keep_first(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    """Rank 0's summand is all of `x`, those of the others are zero: their sum holds it once."""
    return x if group.rank() == 0 else torch.zeros_like(x)


def _all_reduce(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    return finished(_issue_all_reduce(x, dst, group, x.dtype, False))


def _issue_all_reduce(
    x: Tensor, dst: Placement, group: dist.ProcessGroup, dtype: torch.dtype, async_op: bool
) -> Issued:
    """Writes into `x` if it is contiguous."""
    total = x.contiguous()
    return dist.all_reduce(total, group=group, async_op=async_op), lambda: total.to(dtype)


def _all_gather(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    stacked = x.new_empty((group.size(), *x.shape))
    all_gather_single(stacked.view(-1), x.view(-1), group=group)
    return join_shards(stacked, src)


def _reduce_scatter(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    return finished(_issue_reduce_scatter(x, dst, group, x.dtype, False))


def _issue_reduce_scatter(
    x: Tensor, dst: Placement, group: dist.ProcessGroup, dtype: torch.dtype, async_op: bool
) -> Issued:
    work, finish = issue_reduce_scatter(split_shards(x, dst, group.size()), group, async_op)
    return work, lambda: finish().to(dtype)


def issue_reduce_scatter(parts: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Issued:
    """parts [n, ...], entry i for rank i -> [...], the sum over ranks of the entries for this one."""
    if group._get_backend(parts.device).name() == "gloo":  # reduces all of it everywhere, for twice the bytes
        incoming = torch.empty_like(parts)
        work = dist.all_to_all_single(incoming.view(-1), parts.view(-1), group=group, async_op=async_op)
        return work, lambda: incoming.sum(0, dtype=parts.dtype)
    mine = parts.new_empty(parts.shape[1:])
    return reduce_scatter_single(mine.view(-1), parts.view(-1), group=group, async_op=async_op), lambda: mine


def finished(issued: Issued) -> Tensor:
    """The result of a collective, waited for."""
    work, finish = issued
    if work is not None:
        work.wait()
    return finish()


def _all_to_all(x: Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> Tensor:
    if src == dst:
        return x
    if src.dim == dst.dim:  # only `left` differs: what a rank keeps does not cut into equal pieces
        return _slice(_all_gather(x, src, dst, group), src, dst, group)
    outgoing = split_shards(x, dst, group.size())
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group)
    return join_shards(incoming, src)


_COMMUNICATE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_ISSUED = {"all_reduce": _issue_all_reduce, "reduce_scatter": _issue_reduce_scatter}
_COLLECTIVES: dict[str, Callable[[Tensor, Placement, Placement, dist.ProcessGroup], Tensor]] = {
    "none": _none,
    "slice": _slice,
    "pad": _pad,
    "keep_first": _keep_first,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
