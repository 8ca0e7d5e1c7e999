"""Watching the steps of one parallel module: its monitor, its trace, and what has to be told to either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import SpecError
from autopar.plan import Plan
from autopar.runtime.monitor import OPTIONS, Monitor
from autopar.runtime.step_trace import StepTrace
from autopar.runtime.world import World
from autopar.runtime.zero import ShardedStage

__all__ = ["Observation"]


class Observation:
    """At most one monitor and one trace; without them a step runs as it is."""

    def __init__(self, plan: Plan, world: World, stages: Sequence[nn.Module]) -> None:
        self._plan, self._world, self._stages = plan, world, stages
        self._optimizers: list[torch.optim.Optimizer] = []
        self._monitor: Monitor | None = None
        self._trace: StepTrace | None = None

    def step(self, run: Callable[[], tuple[Tensor, int]]) -> Tensor:
        """`run` returns the loss and the tokens of all dp ranks."""
        monitor = self._monitor if self._monitor is not None and self._monitor.open else None
        if monitor is not None:
            monitor.begin()
        with torch.profiler.record_function("autopar:step"):
            loss, tokens = run()
        if monitor is not None:
            monitor.end(tokens, loss)
        if self._trace is not None:
            self._trace.steps += self._trace.open
        return loss

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        if self._monitor is not None:
            self._monitor.watch(optimizer)

    def monitor(self, path: str | Path | None, options: dict[str, Any]) -> Monitor:
        """A new monitor in place of the one before, if any. Raises SpecError for an option that there is not."""
        for name in options:
            if name not in OPTIONS:
                raise SpecError(f"unknown option {name!r}", where="monitor", try_=f"one of {', '.join(OPTIONS)}")
        if self._monitor is not None:
            self._monitor.close()
        if self._world.device.type == "cuda":
            total = torch.cuda.get_device_properties(self._world.device).total_memory
            options = {"memory_limit": total, **options}
        self._monitor = Monitor(self._plan, self._world, path=path, **options)
        for optimizer in self._optimizers:
            self._monitor.watch(optimizer)
        self._measure_fsdp()
        return self._monitor

    def trace(self, path: str | Path | None) -> StepTrace:
        self._measure_fsdp()
        self._trace = StepTrace(self._plan, self._world, path)
        return self._trace

    def _measure_fsdp(self) -> None:
        if self._world.device.type == "cuda":
            return  # FSDP communicates on streams of its own: what an event there measures, compute need not wait for
        for stage in self._stages:
            if isinstance(stage, ShardedStage):
                stage.measure()
