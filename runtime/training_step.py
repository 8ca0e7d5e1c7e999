"""Forward and backward of one global batch on this rank, after which gradients are complete and the loss is agreed.

The graph returns sums; the number of tokens is summed over micro-batches and dp ranks once, before backward, and every
gradient reduction is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar.ir import TracedModel
from autopar.plan import Plan
from autopar.runtime.batches import BatchIntake
from autopar.runtime.gathered import GatheredGraph
from autopar.runtime.judge import StepJudge
from autopar.runtime.pipeline import LocalStage, PipelineRunner
from autopar.runtime.reducer import GradientReducer
from autopar.runtime.rows import cut_rows
from autopar.runtime.state import LocalState
from autopar.runtime.tokens import TokenCounter, divided, loss_dtype
from autopar.runtime.world import World
from autopar.runtime.zero import ShardedStage

__all__ = ["TrainingStep"]


class TrainingStep:
    """`graphs`: this rank's stages as they run, in the order of `state.own_stages`. Collective.

    broken_by: the error that broke a step off where it cannot be followed by another; empty if there was none.
    """

    def __init__(
        self,
        plan: Plan,
        traced: TracedModel,
        state: LocalState,
        graphs: Sequence[nn.Module],
        *,
        world: World,
        counter: TokenCounter,
        intake: BatchIntake,
        reducer: GradientReducer,
        judge: StepJudge,
    ) -> None:
        self._plan, self._traced, self._state, self._graphs = plan, traced, state, tuple(graphs)
        self._world, self._counter, self._intake = world, counter, intake
        self._reducer, self._judge = reducer, judge
        self._divisors = torch.ones(1, dtype=torch.float64, device=world.device)
        self._pipeline = self._new_pipeline()
        self.broken_by = ""

    def __call__(self, bound: Mapping[str, Tensor], local: bool) -> tuple[Tensor, int]:
        """The loss of a batch bound to the graph's inputs, and the tokens of all dp ranks (as many as this one's,
        each); see `ParallelModule.step`."""
        inputs, micro_batches = self._taken(bound, local)
        scale = self._judge.scale
        with self._noting_errors():
            losses = self._forward_and_backward(inputs, micro_batches)
        self._reducer.finish(self._judge if self._judge.looks else None)
        return self._agreed_loss(losses, scale), self._tokens(inputs)

    def _forward_and_backward(self, inputs: Mapping[str, Tensor], micro_batches: int) -> list[Tensor]:
        """The loss of each micro-batch, as far as this rank knows it."""
        self._reducer.begin(micro_batches)
        for stage in self._graphs:
            if isinstance(stage, ShardedStage):
                stage.begin(micro_batches)
            elif isinstance(stage, GatheredGraph):
                stage.begin()
        losses = self._losses(inputs, micro_batches)
        for stage in self._graphs:
            if isinstance(stage, GatheredGraph):
                stage.finish()
        return losses

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Gradients stay what they were if what runs here is broken off.

        FSDP keeps sums of its own, and messages between stages are under way: after that no step is to be trusted.
        """
        try:
            yield
        except BaseException as error:
            self._reducer.abandon()
            if self._pipeline is not None or any(isinstance(s, ShardedStage | GatheredGraph) for s in self._graphs):
                self.broken_by = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise

    def evaluate(self, bound: Mapping[str, Tensor], local: bool) -> Tensor:
        """The loss alone, by forward alone, as `torch.no_grad()` asks for; gradients stay as they are."""
        inputs, micro_batches = self._taken(bound, local)
        with self._noting_errors():
            losses = self._losses(inputs, micro_batches)
        for stage in self._graphs:
            if isinstance(stage, ShardedStage):
                stage.rest()
        return self._agreed_loss(losses, self._judge.scale)

    def _taken(self, bound: Mapping[str, Tensor], local: bool) -> tuple[dict[str, Tensor], int]:
        """This rank's rows and the micro-batches they make; what the loss is divided by, and the weights, are ready."""
        inputs, micro_batches = self._intake.step_rows(bound, local)
        self._divisors = self._counter.divisors(inputs)
        self._state.copies.follow()
        return inputs, micro_batches

    def _losses(self, inputs: Mapping[str, Tensor], micro_batches: int) -> list[Tensor]:
        """Of the micro-batches, where the last stage is; backward has run where gradients are enabled."""
        if self._pipeline is not None:
            return self._pipeline.run(inputs, micro_batches)
        losses = []
        for part in cut_rows(self._traced.inputs, inputs, micro_batches):
            outputs = self._graphs[0](**{name: part[name] for name in self._state.own_stages[0].inputs})
            loss = self._scaled_loss(outputs[0])
            if torch.is_grad_enabled():
                loss.backward()
            losses.append(loss.detach())
        return losses

    def _scaled_loss(self, loss_sum: Tensor) -> Tensor:
        loss = divided(loss_sum, self._divisors)
        return loss if self._judge.scale is None else loss * self._judge.scale

    def _agreed_loss(self, losses: list[Tensor], scale: Tensor | None) -> Tensor:
        """The sum over micro-batches and dp ranks, from the last stage to all, without the factor `scale`; in fp32, or
        fp64 if the model's is."""
        dtype = loss_dtype(self._traced)
        if losses:
            total = self._world.sum(torch.stack(losses).sum(), "dp").to(dtype)
        else:
            total = torch.zeros((), dtype=dtype, device=self._world.device)
        self._world.broadcast(total, "pp", self._world.size("pp") - 1)
        return total if scale is None else total / scale

    def _tokens(self, inputs: Mapping[str, Tensor]) -> int:
        specs = self._traced.inputs
        sizes = (inputs[s.name].shape for s in specs if s.seq_dim is not None and s.batch_dim is not None)
        return next((size[0] * size[1] for size in sizes), 0) * self._world.size("dp")

    def _new_pipeline(self) -> PipelineRunner | None:
        group = self._world.group("pp")
        if group is None:
            return None
        return PipelineRunner(
            [
                LocalStage(stage.index, graph, stage.inputs)
                for stage, graph in zip(self._state.own_stages, self._graphs, strict=True)
            ],
            self._traced.inputs,
            count=len(self._plan.stages),
            schedule=self._plan.schedule,
            device=self._world.device,
            group=group,
            loss=self._scaled_loss,
            overlap_sends="pp_send" in self._plan.overlap,
        )
