"""Running one stage of a pipeline with the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autopar.ir import InputSpec

__all__ = ["PipelineRunner"]

_KEPT_SCHEDULES = 4  # each holds receive buffers for all its micro-batches


class _Body(nn.Module):
    """A stage's graph as torch's PipelineStage wants it: boundary tensors by position, inputs by keyword.

    Inputs travel under neutral names (`input0`): the schedule has keyword arguments of its own, such as `target`.
    """

    def __init__(self, graph_module: nn.Module, inputs: Sequence[str]) -> None:
        super().__init__()
        self.graph_module = graph_module
        self._inputs = {f"input{i}": name for i, name in enumerate(inputs)}
        self.uncut: dict[str, Tensor] = {}

    def forward(self, *received: Tensor, **given: Tensor) -> Any:
        inputs = {self._inputs[key]: value for key, value in given.items()}
        outputs = self.graph_module(*received, **inputs, **self.uncut)
        sent = tuple(t.contiguous() for t in outputs)  # point-to-point sends take contiguous tensors only
        return sent[0] if len(sent) == 1 else sent


class PipelineRunner:
    """Runs the micro-batches of a step through this rank's stage.

    Buffers and schedule belong to one shape of input; a batch of another shape gets its own, the last few are kept.
    """

    def __init__(
        self,
        graph_module: nn.Module,
        inputs: Sequence[InputSpec],
        *,
        index: int,
        stages: int,
        schedule: str,
        device: torch.device,
        group: dist.ProcessGroup,
        loss: Callable[[Tensor], Tensor],
    ) -> None:
        self._inputs = tuple(inputs)
        self._body = _Body(graph_module, [s.name for s in inputs])
        self._index, self._stages, self._schedule = index, stages, schedule
        self._device, self._group, self._loss = device, group, loss
        self._schedules: OrderedDict[tuple[Any, ...], PipelineScheduleSingle] = OrderedDict()

    def run(self, batch: Mapping[str, Tensor], micro_batches: int) -> list[Tensor]:
        """Forward and backward of all micro-batches; their losses on the last stage, else nothing."""
        self._body.uncut = {s.name: batch[s.name] for s in self._inputs if s.batch_dim is None}
        cut: dict[str, Any] = {
            f"input{i}": batch[s.name] for i, s in enumerate(self._inputs) if s.batch_dim is not None
        }
        losses: list[Tensor] = []
        last = self._index == self._stages - 1
        # The schedule wants a target to cut; the loss is in the graph and needs none.
        arguments: dict[str, Any] = {"target": torch.zeros(micro_batches), "losses": losses} if last else {}
        self._schedule_for(batch, micro_batches).step(**arguments, **cut, return_outputs=False)
        return [loss.detach() for loss in losses]

    def _schedule_for(self, batch: Mapping[str, Tensor], micro_batches: int) -> PipelineScheduleSingle:
        # All inputs of the batch count, also those of other stages: every stage must start anew at the same step.
        key = (micro_batches, *sorted((name, t.shape, t.dtype) for name, t in batch.items()))
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(micro_batches)
        self._schedules.move_to_end(key)
        if len(self._schedules) > _KEPT_SCHEDULES:
            self._schedules.popitem(last=False)
        return self._schedules[key]

    def _new_schedule(self, micro_batches: int) -> PipelineScheduleSingle:
        stage = PipelineStage(self._body, self._index, self._stages, self._device, group=self._group)
        chunks = {
            f"input{i}": TensorChunkSpec(s.batch_dim) for i, s in enumerate(self._inputs) if s.batch_dim is not None
        }
        # With fewer micro-batches than stages 1F1B never reaches its steady state: it is GPipe, and torch refuses it.
        gpipe = self._schedule == "gpipe" or micro_batches < self._stages
        return (ScheduleGPipe if gpipe else Schedule1F1B)(
            stage,
            micro_batches,
            loss_fn=lambda output, _: self._loss(output),
            kwargs_chunk_spec=chunks or None,
            scale_grads=False,
        )
