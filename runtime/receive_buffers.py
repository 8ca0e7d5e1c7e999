"""A pipeline stage that holds what it received only while it needs it.

torch's stages allocate a buffer for every micro-batch of a step, for activations and for gradients, keep the gradients
they sent back as well, and keep all of it between steps: of 100 micro-batches, 300 tensors of a boundary where 1F1B
needs a few. Here a buffer is made when its receive is posted and given up when the backward of its micro-batch has run;
between, torch's table holds a tensor of the same shape on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

__all__ = ["LeanStage"]

_META = torch.device("meta")


class LeanStage(PipelineStage):
    """PipelineStage whose receive buffers live from their receive to the backward that reads them last."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Before torch learned which of the received tensors have a gradient, it sent one for each: zeros where none is
        (a tensor that is only read where no gradient is taken)."""
        if not hasattr(self, "_get_grad_send_meta") and self.has_backward and not self.is_first:
            buffers: list[Any] = [info.buffer for info in self.args_recv_info[bwd_chunk_id]]
            gradients = self.bwd_cache[bwd_chunk_id][: len(buffers)]  # the rest are those of the model's inputs
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(buffer.detach(), device=self.device) if gradient is None else gradient
                for gradient, buffer in zip(gradients, buffers, strict=True)
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Without a backward this is the last that reads what was received."""
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._move(self.args_recv_info[fwd_chunk_id], _META)
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, loss: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """A backward that is put off in part holds what it still needs by itself."""
        result = super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        self._move(self.args_recv_info[bwd_chunk_id], _META)
        self._move(self.grad_recv_info.get(bwd_chunk_id, ()), _META)
        if loss is not None:  # the schedule keeps it to the end of the step, and its graph leads to what was received
            loss.detach_()
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """The last that torch prepares: nothing has been received yet."""
        result = super()._prepare_backward_infra(*args, **kwargs)
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            self._move(infos, _META)
        return result

    # Where torch makes its buffers in a method of its own, they are never real.

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_meta(super()._setup_forward_recv_info, args, kwargs)  # type: ignore[misc,unused-ignore]

    def _setup_backward_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_meta(super()._setup_backward_recv_info, args, kwargs)  # type: ignore[misc,unused-ignore]

    def _on_meta(self, make: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        device, self.device = self.device, _META
        try:
            return make(*args, **kwargs)
        finally:
            self.device = device

    @staticmethod
    def _move(infos: Iterable[Any], device: torch.device) -> None:
        """Replace buffers by empty ones on `device`."""
        for info in _with_buffer(infos):
            old = info.buffer
            info.buffer = torch.empty_like(old.detach(), device=device).requires_grad_(old.requires_grad)


def _with_buffer(infos: Iterable[Any]) -> Iterator[Any]:
    """Those that are received; others are the user's inputs, or gradients that do not exist."""
    return (info for info in infos if getattr(info, "buffer", None) is not None)
