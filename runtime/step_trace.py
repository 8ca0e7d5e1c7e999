"""A trace of some steps: a Chrome trace a rank, and how much communication compute hid, beside the prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.clock import WaitClock, attach, detach
from autopar.runtime.output_paths import agree_on_writable
from autopar.runtime.world import World

__all__ = ["StepTrace", "TraceSummary", "communication_and_exposed", "exposed_and_hidden", "union"]

Interval = tuple[float, float]
_BACKENDS = ("nccl", "gloo:")  # how communication is named, as kernels on CUDA and as spans of gloo on the CPU


@dataclass(frozen=True)
class TraceSummary:
    """Of one rank and step, in seconds. `exposed_by_axis` is what compute waited for; `hidden_s` the rest of the time
    that communication took."""

    step_s: float
    communication_s: float
    exposed_s: float
    exposed_by_axis: dict[str, float]
    predicted: dict[str, float]

    @property
    def hidden_s(self) -> float:
        return self.communication_s - self.exposed_s

    def text(self) -> str:
        lines = [
            f"step {_ms(self.step_s)}, communication {_ms(self.communication_s)}: exposed {_ms(self.exposed_s)}, "
            f"hidden {_ms(self.hidden_s)}",
            f"{'exposed':10}{'measured':>12}{'predicted':>12}",
        ]
        for axis in sorted({*self.exposed_by_axis, *self.predicted}):
            measured, predicted = self.exposed_by_axis.get(axis, 0.0), self.predicted.get(axis)
            told = "-" if predicted is None else _ms(predicted)
            lines.append(f"{axis:10}{_ms(measured):>12}{told:>12}")
        return "\n".join(lines)


class StepTrace:
    """Context in which the steps of one module are traced; `ParallelModule.trace` makes it.

    path: a Chrome trace for every rank, `<path without .json>.rank<r>.json`. After the context `summary` says what was
    hidden.
    """

    def __init__(self, plan: Plan, world: World, path: str | Path | None) -> None:
        self._plan, self._world = plan, world
        self.path = None if path is None else _of_rank(Path(path), world.rank)
        agree_on_writable(world, self.path, "trace: path")
        self._clock = WaitClock(world.device, world.axes_by_group(), annotate=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._clock.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._summary: TraceSummary | None = None
        self.steps, self.open = 0, False

    @property
    def summary(self) -> TraceSummary:
        if self._summary is None:
            raise AutoparError("nothing has been traced yet", where="trace", try_="leave the `with` block first")
        return self._summary

    def __enter__(self) -> StepTrace:
        attach(self._clock)
        self.open = True
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._clock.cuda:
            torch.cuda.synchronize(self._world.device)
        self._profiler.__exit__(*error)
        detach(self._clock)
        self.open = False
        if error[0] is not None:
            return
        if self.path is not None:
            self._profiler.export_chrome_trace(str(self.path))
        self._summary = self._summarise()

    def _summarise(self) -> TraceSummary:
        events = list(self._profiler.events() or ())
        steps = max(1, self.steps)
        communication_s, exposed = communication_and_exposed(events, self._clock.cuda)
        seconds = {axis: t / steps for axis, t in self._clock.take().items()}
        return TraceSummary(
            step_s=_length(_spans(events, lambda e: e.name == "autopar:step")) / steps,
            communication_s=communication_s / steps,
            exposed_s=exposed / steps,
            exposed_by_axis=seconds,
            predicted=_predicted(self._plan),
        )


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name.removesuffix('.json')}.rank{rank}.json")


def communication_and_exposed(events: Sequence[Any], cuda: bool) -> tuple[float, float]:
    """Seconds of communication in the events of a profile, and those that compute stood still for.

    On CUDA both are kernels of the device. It also shows the spans that the host named, over all kernels they launched:
    those are neither.
    """
    if not cuda:
        communication = union(_spans(events, _communicates))
        waits = union(_spans(events, lambda e: e.name.startswith("waiting:")))
        return _length(communication), exposed_and_hidden(communication, waits)[1]
    on_device = torch.profiler.DeviceType.CUDA
    kernels = [e for e in events if e.device_type == on_device and not e.is_user_annotation]
    communication = union(_spans(kernels, _communicates))
    compute = union(_spans(kernels, lambda e: not _communicates(e)))
    return _length(communication), exposed_and_hidden(communication, compute)[0]


def _communicates(event: Any) -> bool:
    return str(event.name).lower().startswith(_BACKENDS)


def exposed_and_hidden(communication: Sequence[Interval], compute: Sequence[Interval]) -> tuple[float, float]:
    """How much of `communication` no `compute` overlaps, and how much it does. Both sorted and without overlaps."""
    hidden, position = 0.0, 0
    for start, end in communication:
        while position < len(compute) and compute[position][1] <= start:
            position += 1
        at = position
        while at < len(compute) and compute[at][0] < end:
            hidden += min(end, compute[at][1]) - max(start, compute[at][0])
            at += 1
    return _length(communication) - hidden, hidden


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _spans(events: Iterable[Any], wanted: Any) -> list[Interval]:
    """In seconds."""
    return [(e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events if wanted(e)]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _predicted(plan: Plan) -> dict[str, float]:
    parts = plan.prediction.get("time_s", {})
    named = {axis: parts.get(f"{axis}_communication") for axis in ("tp", "cp", "dp")}
    return {axis: float(t) for axis, t in {**named, "bubble": parts.get("bubble")}.items() if t is not None}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
