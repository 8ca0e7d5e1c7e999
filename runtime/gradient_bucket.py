"""Where gradients lie while they are summed: together in the memory of a bucket, or where autograd put them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GradientBucket", "cut_into_buckets", "has_own_memory"]


class GradientBucket:
    """Gradients of `members` (of one dtype and group) as one flat tensor that can be summed in place.

    A gradient is copied once, when it comes first in a step: from then on it is a view of the bucket, and what
    micro-batches add goes there. The memory stays for the next step unless somebody still holds gradients in it. A
    gradient that has the bucket to itself is not copied at all, and nothing of it stays. `taken`: whose gradients came.
    """

    def __init__(self, members: Iterable[nn.Parameter]) -> None:
        self.members = tuple(members)
        self._start: dict[nn.Parameter, int] = {}
        self._numel = 0
        for p in self.members:
            self._start[p] = self._numel
            self._numel += p.numel()
        self._memory: Tensor | None = None
        self.taken: set[nn.Parameter] = set()

    def begin(self, *, keeps_memory: bool = True) -> None:
        """A step starts: no gradient has come."""
        self.taken.clear()
        if self._memory is not None and not (keeps_memory and has_own_memory(self._memory)):
            self._memory = None

    def take(self, parameter: nn.Parameter) -> None:
        """The gradient of `parameter` is there. Nothing if it is taken already."""
        gradient = parameter.grad
        if parameter in self.taken or gradient is None:
            return
        self.taken.add(parameter)
        if len(self.members) == 1:
            # Autograd may give the same memory to two parameters (of `a.view(-1) + b.view(-1)`).
            if not (has_own_memory(gradient) and gradient.stride() == _strides_without_gaps(gradient)):
                parameter.grad = gradient.clone()
            return
        if self._memory is None:
            self._memory = gradient.new_empty(self._numel)
        view = self._memory.as_strided(gradient.shape, _strides_without_gaps(gradient), self._start[parameter])
        parameter.grad = view.copy_(gradient)

    @property
    def flat(self) -> Tensor:
        """1-d; what lies where no gradient was taken is arbitrary."""
        gradient = self.members[0].grad
        if len(self.members) == 1 and gradient is not None:
            return gradient.as_strided((gradient.numel(),), (1,))
        assert self._memory is not None
        return self._memory


def cut_into_buckets(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int,
    groups: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one dtype and group, at most `bucket_bytes` together unless one alone is larger."""
    buckets: list[list[nn.Parameter]] = []
    filled, last = 0, None
    for p in parameters:
        size = p.numel() * p.element_size()
        kind = (p.dtype, None if groups is None else groups[p])
        if kind != last or filled + size > bucket_bytes:
            buckets.append([])
            filled, last = 0, kind
        buckets[-1].append(p)
        filled += size
    return buckets


def has_own_memory(tensor: Tensor) -> bool:
    """Whether no other tensor lies in the same memory."""
    return _holders(tensor) == _holders(tensor.new_empty(0))


def _holders(tensor: Tensor) -> int:
    """Tensors in this memory, and what Python holds of it to ask."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _strides_without_gaps(tensor: Tensor) -> tuple[int, ...]:
    """Its own strides if it fills its memory: optimizers want those of the parameter."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
