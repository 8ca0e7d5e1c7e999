"""Running this rank's stages of a pipeline with the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from autopar.errors import SpecError
from autopar.ir import InputSpec
from autopar.runtime.clock import attached
from autopar.runtime.receive_buffers import LeanStage

__all__ = ["LocalStage", "PipelineRunner", "check_micro_batches", "runnable_micro_batches"]

_KEPT_SCHEDULES = 4  # each has learnt the shapes of one input
_LOOPED = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


@dataclass(frozen=True)
class LocalStage:
    """A stage this rank runs: its place in the pipeline, its module, and the model inputs it reads."""

    index: int
    module: nn.Module
    inputs: tuple[str, ...]


def check_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    """Raise SpecError for a number of micro-batches that the schedule cannot run.

    The looped schedules go in rounds of equal size: with n micro-batches there are max(1, n // ranks) of them.
    """
    rounds = max(1, micro_batches // ranks)
    if runnable_micro_batches(schedule, ranks, micro_batches) != micro_batches:
        raise SpecError(
            f"{micro_batches} micro-batches do not fall into {rounds} equal rounds over {ranks} pipeline ranks, "
            f"which schedule {schedule} needs",
            where="micro_batch",
            try_=f"{micro_batches // ranks * ranks} or {(micro_batches // ranks + 1) * ranks} micro-batches a step",
        )


def runnable_micro_batches(schedule: str, ranks: int, micro_batches: int) -> int:
    """The least number of micro-batches that the schedule can run and that is not smaller."""
    if schedule not in _LOOPED or micro_batches % max(1, micro_batches // ranks) == 0:
        return micro_batches
    return runnable_micro_batches(schedule, ranks, micro_batches + 1)


def _with_contiguous_gradient(x: Tensor) -> Tensor:
    """`x`, whose gradient will be contiguous: it is sent point to point."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.contiguous())
    return x


class _Body(nn.Module):
    """A stage's graph as torch's PipelineStage wants it: boundary tensors by position, inputs by keyword.

    Inputs travel under neutral names (`input0`): the schedule has keyword arguments of its own, such as `target`. All
    stages of a rank are given the inputs of all of them.
    """

    def __init__(self, stage: LocalStage, names: Sequence[str]) -> None:
        super().__init__()
        self.module = stage.module
        self._inputs = {f"input{i}": name for i, name in enumerate(names) if name in stage.inputs}
        self.uncut: dict[str, Tensor] = {}
        self.runs_micro_batch = False

    def forward(self, *received: Tensor, **given: Tensor) -> Any:
        inputs = {name: given[key] for key, name in self._inputs.items() if key in given}
        uncut = {name: self.uncut[name] for name in self._inputs.values() if name in self.uncut}
        run = self.module if self.runs_micro_batch else self._learn_shapes
        outputs = run(*map(_with_contiguous_gradient, received), **inputs, **uncut)
        sent = tuple(t.contiguous() for t in outputs)  # point-to-point sends take contiguous tensors only
        return sent[0] if len(sent) == 1 else sent

    def _learn_shapes(self, *received: Tensor, **inputs: Tensor) -> Any:
        """What torch runs a stage for before its first micro-batch. What it says was received is memory that nobody
        wrote: zeros stand for it, which index anything. Buffers stay as they were: only those that forward wrote are
        written back, for autograd may have saved the others."""
        for tensor in received:
            tensor.detach().zero_()
        kept = [(b, b.clone(), b._version) for b in self.module.buffers()]
        outputs = self.module(*received, **inputs)
        for buffer, value, version in kept:
            if buffer._version != version:
                buffer.detach().copy_(value)
        return outputs


class _MeasuredStage(LeanStage):
    """Takes its compute off the time of the schedule, so that waiting is left, if a clock is attached; tells the body
    what is a micro-batch."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        body = self.submod
        assert isinstance(body, _Body)
        body.runs_micro_batch = True
        try:
            return _off_the_clock(super().forward_one_chunk, args, kwargs)
        finally:
            body.runs_micro_batch = False

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return _off_the_clock(super().backward_one_chunk, args, kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return _off_the_clock(super().backward_weight_one_chunk, args, kwargs)


def _off_the_clock(compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    started = [(clock, clock.mark()) for clock in attached()]
    result = compute(*args, **kwargs)
    for clock, start in started:
        clock.add_since("bubble", start, sign=-1)
    return result


class _Overlapped1F1B(_PipelineScheduleRuntime):
    """1F1B whose receives are posted when their sends are, not when they are needed: messages pass under compute.

    The same forwards and backwards in the same order on each rank as Schedule1F1B, so the same bits. Any number of
    micro-batches.
    """

    def __init__(self, stages: list[Any], micro_batches: int, ranks: int, **options: Any) -> None:
        super().__init__(stages, micro_batches, **options)
        self.pipeline_order = {rank: _order_1f1b(rank, ranks, micro_batches) for rank in range(ranks)}
        self._prepare_schedule_with_comms(self.pipeline_order)


def _order_1f1b(stage: int, stages: int, micro_batches: int) -> list[_Action | None]:
    """Forwards until the last stage's first backward is due here, then one backward, one forward."""
    ahead = min(micro_batches, stages - stage)
    forward, backward = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
    order: list[_Action | None] = [_Action(stage, forward, i) for i in range(ahead)]
    for i in range(micro_batches):
        order.append(_Action(stage, backward, i))
        if ahead + i < micro_batches:
            order.append(_Action(stage, forward, ahead + i))
    return order


class PipelineRunner:
    """Runs the micro-batches of a step through this rank's `stages`, of `count` in all.

    A schedule belongs to one shape of input; a batch of another shape gets its own, the last few are kept.
    """

    def __init__(
        self,
        stages: Sequence[LocalStage],
        inputs: Sequence[InputSpec],
        *,
        count: int,
        schedule: str,
        device: torch.device,
        group: dist.ProcessGroup,
        loss: Callable[[Tensor], Tensor],
        overlap_sends: bool = False,
    ) -> None:
        used = {name for stage in stages for name in stage.inputs}
        self._inputs = tuple(spec for spec in inputs if spec.name in used)
        self._stages = tuple(stages)
        self._bodies = tuple(_Body(stage, [spec.name for spec in self._inputs]) for stage in stages)
        self._count, self._schedule, self._overlap_sends = count, schedule, overlap_sends
        self._device, self._group, self._loss = device, group, loss
        self._schedules: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def run(self, batch: Mapping[str, Tensor], micro_batches: int) -> list[Tensor]:
        """Forward and, where gradients are enabled, backward of all micro-batches; their losses where the last stage
        is, else nothing.

        Raises SpecError for a number of micro-batches the schedule cannot run.
        """
        uncut = {s.name: batch[s.name] for s in self._inputs if s.batch_dim is None}
        for body in self._bodies:
            body.uncut = uncut
        cut: dict[str, Any] = {
            f"input{i}": batch[s.name] for i, s in enumerate(self._inputs) if s.batch_dim is not None
        }
        losses: list[Tensor] = []
        last = self._stages[-1].index == self._count - 1
        # The schedule wants a target to cut; the loss is in the graph and needs none.
        arguments: dict[str, Any] = {"target": torch.zeros(micro_batches), "losses": losses} if last else {}
        schedule = self._schedule_for(batch, micro_batches)
        started = [(clock, clock.mark()) for clock in attached()]
        # torch forwards alone in the order of the schedule, and leaves its backwards out.
        run = schedule.step if torch.is_grad_enabled() else schedule.eval
        run(**arguments, **cut, return_outputs=False)
        for clock, start in started:
            clock.add_since("bubble", start)  # less what _MeasuredStage takes off
        return [loss.detach() for loss in losses]

    def _schedule_for(self, batch: Mapping[str, Tensor], micro_batches: int) -> Any:
        # All inputs of the batch count, also those of other stages: every stage must start anew at the same step.
        key = (torch.is_grad_enabled(), micro_batches, *sorted((name, t.shape, t.dtype) for name, t in batch.items()))
        if key not in self._schedules:
            check_micro_batches(self._schedule, self._group.size(), micro_batches)
            self._schedules[key] = self._new_schedule(micro_batches)
        self._schedules.move_to_end(key)
        if len(self._schedules) > _KEPT_SCHEDULES:
            self._schedules.popitem(last=False)
        return self._schedules[key]

    def _new_schedule(self, micro_batches: int) -> Any:
        stages: list[Any] = [
            _MeasuredStage(body, stage.index, self._count, self._device, group=self._group)
            for body, stage in zip(self._bodies, self._stages, strict=True)
        ]
        chunks = {
            f"input{i}": TensorChunkSpec(s.batch_dim) for i, s in enumerate(self._inputs) if s.batch_dim is not None
        }
        options: dict[str, Any] = {
            "loss_fn": lambda output, _: self._loss(output),
            "kwargs_chunk_spec": chunks or None,
            "scale_grads": False,
        }
        if self._schedule in _LOOPED:
            return _LOOPED[self._schedule](stages, micro_batches, **options)
        if self._schedule == "1f1b" and self._overlap_sends:
            return _Overlapped1F1B(stages, micro_batches, self._group.size(), **options)
        # With fewer micro-batches than stages 1F1B never reaches its steady state: it is GPipe, and torch refuses it.
        gpipe = self._schedule == "gpipe" or micro_batches < self._count
        return (ScheduleGPipe if gpipe else Schedule1F1B)(stages[0], micro_batches, **options)
