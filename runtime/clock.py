"""How long compute stands still for communication, by mesh axis: the clock behind `pm.monitor` and `pm.trace`.

Whoever waits says so, `with waiting(group): ...`. Nothing is measured unless a clock is attached; a process has one
place for it, since autograd runs backward in threads of its own, which no argument reaches.

On the CPU a wait is the time its thread is blocked. On CUDA the thread does not block, the stream does: events before
and after what it waits for, read when the step is over.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["WaitClock", "attach", "attached", "detach", "waiting"]

Mark = float | torch.cuda.Event

_NOTHING = nullcontext()
_clocks: list[WaitClock] = []


class WaitClock:
    """Seconds by axis since the last `take`. `axes`: name of a process group -> axis; others count as "other"."""

    def __init__(self, device: torch.device, axes: Mapping[str, str], annotate: bool = False) -> None:
        self.cuda = device.type == "cuda"
        self.annotate = annotate
        self._axes = dict(axes)
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, Any, int]] = []
        self.depth = 0

    def axis_of(self, group: dist.ProcessGroup | None) -> str:
        return self._axes.get(group.group_name, "other") if group is not None else "other"

    def mark(self) -> Mark:
        """Now, in the order of compute."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_since(self, axis: str, start: Mark, sign: int = 1) -> None:
        """The time since `start`; taken off with `sign` -1."""
        if isinstance(start, float):
            self._seconds[axis] += sign * (time.perf_counter() - start)
        else:
            self._events.append((axis, start, self.mark(), sign))

    def take(self) -> dict[str, float]:
        """What was waited for since the last call. On CUDA the device must have finished it."""
        for axis, start, end, sign in self._events:
            self._seconds[axis] += sign * start.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return seconds


def attach(clock: WaitClock) -> None:
    """Measure with `clock` from now on, beside those attached before, until it is detached."""
    _clocks.append(clock)


def detach(clock: WaitClock) -> None:
    _clocks.remove(clock)


def attached() -> tuple[WaitClock, ...]:
    return tuple(_clocks)


def waiting(group: dist.ProcessGroup | str | None) -> AbstractContextManager[None]:
    """Around code in which compute waits for `group`; an axis may be given by its name."""
    if not _clocks:
        return _NOTHING
    waits = [_Wait(clock, group if isinstance(group, str) else clock.axis_of(group)) for clock in _clocks]
    return waits[0] if len(waits) == 1 else _together(waits)


@contextmanager
def _together(waits: Sequence[_Wait]) -> Iterator[None]:
    with ExitStack() as stack:
        for wait in waits:
            stack.enter_context(wait)
        yield


class _Wait(AbstractContextManager[None]):
    """Waits inside a wait are part of it."""

    def __init__(self, clock: WaitClock, axis: str) -> None:
        self._clock, self._axis = clock, axis

    def __enter__(self) -> None:
        clock = self._clock
        clock.depth += 1
        self._outermost = clock.depth == 1
        if not self._outermost:
            return
        if clock.annotate:
            self._span = torch.profiler.record_function(f"waiting:{self._axis}")
            self._span.__enter__()
        self._start = clock.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clock = self._clock
        clock.depth -= 1
        if not self._outermost:
            return
        clock.add_since(self._axis, self._start)
        if clock.annotate:
            self._span.__exit__(kind, error, trace)
