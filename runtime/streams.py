"""Communication beside compute: started early, waited for late.

On CUDA a collective and the copies around it run on a side stream that waits for what they read; whoever wants the
result makes its own stream wait. The allocator is told which streams use a tensor, so that memory freed by Python is
not reused while the other stream still works on it. On the CPU the same order runs with the backend's async handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.clock import waiting

__all__ = ["Hop", "Issue", "Pending"]

Issue = Callable[[], "tuple[dist.Work | None, Callable[[], Tensor]]"]
"""Starts a collective; returns its handle and what makes the result once it is over."""


class Pending:
    """The result of a collective that is under way; what it `reads` must not change before `wait`."""

    def __init__(self, issue: Issue, reads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._reads, self._group = tuple(reads), group
        self._event: torch.cuda.Event | None = None
        self._result: Tensor | None = None
        if reads[0].device.type == "cuda":
            self._on_side_stream(issue)
        else:
            self._work, self._finish = issue()

    def wait(self) -> Tensor:
        """The result, in the order of the current stream."""
        with waiting(self._group):
            return self._waited()

    def _waited(self) -> Tensor:
        if self._event is None:
            if self._work is not None:
                self._work.wait()
            result = self._finish()
        else:
            assert self._result is not None
            result, current = self._result, torch.cuda.current_stream(self._result.device)
            current.wait_event(self._event)
            result.record_stream(current)
        self._reads, self._result = (), None
        return result

    def _on_side_stream(self, issue: Issue) -> None:
        device = self._reads[0].device
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            work, finish = issue()
            if work is not None:
                work.wait()  # of the side stream, not of this thread
            self._result = finish()
            self._event = side.record_event()
        for tensor in self._reads:
            tensor.record_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: collectives of one kind run in the order they were started in, on every rank."""
    return torch.cuda.Stream(device)


class Hop:
    """A tensor on its way to the next rank of the ring, while the previous rank's comes in.

    `overlap` false: it has arrived before anything else is done; the same bits, later.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, overlap: bool = True) -> None:
        ranks = dist.get_process_group_ranks(group)
        here = group.rank()
        self._group = group
        self._sent = tensor  # kept alive until the send is over
        self._received = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, ranks[(here + 1) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, self._received, ranks[here - 1], group)
        # Even ranks send first, odd ones receive first: no ring of blocking sends on any backend.
        self._work = dist.batch_isend_irecv([send, receive] if here % 2 == 0 else [receive, send])
        if not overlap:
            self._finish()

    def wait(self) -> Tensor:
        self._finish()
        return self._received

    def _finish(self) -> None:
        with waiting(self._group):
            for work in self._work:
                work.wait()
        self._work = []
