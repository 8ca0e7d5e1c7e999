"""FSDP's own collectives, with its waits on the clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.clock import waiting
from autopar.runtime.collectives import all_gather_single, reduce_scatter_single

__all__ = ["MeasuredAllGather", "MeasuredReduceScatter"]


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class MeasuredAllGather(_Allocates):
    """What FSDP's default does; see `FSDPModule.set_custom_all_gather`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        with waiting(group):
            work = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return None if work is None else _MeasuredWork(work, group)


class MeasuredReduceScatter(_Allocates):
    """What FSDP's default does; see `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        with waiting(group):
            work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return None if work is None else _MeasuredWork(work, group)


class _MeasuredWork(dist.Work):
    """A handle whose `wait` is on the clock. FSDP asks whether it is a Work."""

    def __init__(self, work: dist.Work, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._inner, self._group = work, group

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with waiting(self._group):
            return self._inner.wait()
