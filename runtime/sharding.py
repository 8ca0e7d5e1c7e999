"""Cutting a tensor by a placement, and putting it together again. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.placement import Placement

__all__ = [
    "assemble",
    "copies_group",
    "copy_whole",
    "filled_up",
    "join_shards",
    "local_part",
    "local_shape",
    "local_slice",
    "split_shards",
]


def local_shape(shape: Sequence[int], placement: Placement, n: int) -> tuple[int, ...]:
    """Shape on one of `n` ranks of a tensor of global `shape`, filled up (`filled_up`) where a plain shard does not
    divide. Raises ValueError for a strided one that does not."""
    if not placement.is_shard:
        return tuple(shape)
    if placement.left > 1:
        _check_divides(shape, placement, n)
    return tuple(-(-size // n) if dim == placement.dim else size for dim, size in enumerate(shape))


def filled_up(tensor: Tensor, placement: Placement, n: int) -> Tensor:
    """`tensor` with its sharded dim extended by zeros to a multiple of `n`; itself if there is nothing to add.

    So a vocabulary is cut that the ranks do not divide; autopar.cost_model.splits says what may read it.
    """
    if not placement.is_shard or placement.left > 1:
        return tensor
    missing = -tensor.shape[placement.dim] % n
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - placement.dim) + [0, missing]) if missing else tensor


def local_part(tensor: Tensor) -> Tensor:
    """The plain tensor this rank holds of one that may be sharded over data-parallel ranks; shares its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold copies of this rank's part of a sharded tensor, None if there are none (hybrid sharding)."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return None
    return tensor.device_mesh.get_group(0)


def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy into `target` its part of `whole`: all of it, unless `target` is sharded over data-parallel ranks."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    mesh, shards = target.device_mesh, target.device_mesh.ndim - 1  # the last axis shards, one before it holds copies
    chunks, index = whole.chunk(mesh.size(shards), 0), mesh.get_local_rank(shards)
    if index < len(chunks):  # the last ranks of a short dim hold nothing
        target.to_local().copy_(chunks[index])


def local_slice(tensor: Tensor, placement: Placement, index: int, n: int) -> Tensor:
    """What rank `index` of `n` holds of `tensor`, contiguous; the tensor itself unless it is sharded.

    A strided shard (left > 1) takes slice `index` inside each of the `left` parts of the dim.
    """
    if not placement.is_shard:
        return tensor
    _check_divides(tensor.shape, placement, n)
    dim, left = placement.dim, placement.left
    if left == 1:
        return tensor.chunk(n, dim)[index].contiguous()
    piece: Tensor = tensor.unflatten(dim, (left, n, -1)).select(dim + 1, index)
    return piece.flatten(dim, dim + 1).contiguous()


def assemble(shards: Sequence[Tensor], placement: Placement) -> Tensor:
    """Inverse of `local_slice`: the whole tensor from the shards of all ranks, in rank order.

    A partial tensor is the sum of its summands; of a replicated one the first copy is taken.
    """
    if placement.is_partial:
        return torch.stack(list(shards)).sum(0)
    if not placement.is_shard:
        return shards[0]
    return join_shards(torch.stack(list(shards)), placement)


def split_shards(tensor: Tensor, placement: Placement, n: int) -> Tensor:
    """[...] -> [n, ...local], contiguous: entry i is what rank i holds of a sharded tensor."""
    _check_divides(tensor.shape, placement, n)
    dim, left = placement.dim, placement.left
    parts: Tensor = tensor.unflatten(dim, (left, n, -1)).movedim(dim + 1, 0)
    return parts.flatten(dim + 1, dim + 2).contiguous()


def join_shards(stacked: Tensor, placement: Placement) -> Tensor:
    """[n, ...local] -> [...], contiguous: inverse of `split_shards`."""
    dim, left = placement.dim, placement.left
    parts: Tensor = stacked.unflatten(dim + 1, (left, -1)).movedim(0, dim + 1)
    return parts.flatten(dim, dim + 2).contiguous()


def _check_divides(shape: Sequence[int], placement: Placement, n: int) -> None:
    size = shape[placement.dim]
    if size % (n * placement.left):
        parts = f"{placement.left} parts x {n} ranks" if placement.left > 1 else f"{n} ranks"
        raise ValueError(f"dim {placement.dim} of size {size} does not divide into {parts}, placement {placement}")
