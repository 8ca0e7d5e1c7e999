"""`pm(**batch)`: the graph of all the user's outputs in training and in evaluation mode, made when first called.

A model may do other things in evaluation mode, have other terms in its loss and leave inputs unread: each mode has its
own capture, which says what its outputs are and what its loss is divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.ir import StageGraph, TracedModel
from autopar.plan import Plan
from autopar.runtime.batches import BatchIntake
from autopar.runtime.gathered import gathered
from autopar.runtime.judge import StepJudge
from autopar.runtime.outputs import WholeForward
from autopar.runtime.reducer import GradientReducer
from autopar.runtime.stage import set_training
from autopar.runtime.tokens import TokenCounter
from autopar.runtime.world import World

__all__ = ["CalledModel", "WholeGraph"]


@dataclass(frozen=True)
class WholeGraph:
    """The graph of all outputs in one mode, the capture it was made of, and what the terms of its loss are divided by
    (None: there is no loss)."""

    stage: StageGraph
    traced: TracedModel
    token_count: fx.GraphModule | None


@dataclass(frozen=True)
class _Mode:
    forward: WholeForward
    intake: BatchIntake
    traced: TracedModel
    inputs: frozenset[str]


class CalledModel:
    """`build(training)`: the graph of a mode, None under pipeline parallelism; `localize`: as it runs on this rank.

    `intake`: of steps; batches of the same capture are numbered on from it.
    """

    def __init__(
        self,
        plan: Plan,
        traced: TracedModel,
        build: Callable[[bool], WholeGraph] | None,
        localize: Callable[[StageGraph], fx.GraphModule],
        *,
        world: World,
        intake: BatchIntake,
        reducer: GradientReducer,
        judge: StepJudge,
    ) -> None:
        self._plan, self._traced, self._build, self._localize = plan, traced, build, localize
        self._world, self._intake, self._reducer, self._judge = world, intake, reducer, judge
        self._modes: dict[bool, _Mode] = {}

    def __call__(self, training: bool, bound: Mapping[str, Tensor]) -> Any:
        """The outputs of one mode for the global batch, whole. Raises AutoparError under pipeline parallelism."""
        mode = self._mode(training)
        own, length = mode.intake.call_rows(bound)
        return mode.forward({name: t for name, t in own.items() if name in mode.inputs}, length)

    def _mode(self, training: bool) -> _Mode:
        if self._build is None:
            raise AutoparError(
                "a pipelined model runs by micro-batches only",
                where="forward",
                try_="pm.step(batch), under torch.no_grad() for the loss alone, or a plan with pp=1",
            )
        if training not in self._modes:
            self._modes[training] = self._new_mode(self._build(training), training)
        return self._modes[training]

    def _new_mode(self, whole: WholeGraph, training: bool) -> _Mode:
        graph = gathered(self._localize(whole.stage), self._plan)
        set_training(graph, training)
        counter = TokenCounter.on(self._world, whole.token_count)
        same = whole.traced is self._traced
        intake = self._intake if same else BatchIntake(whole.traced, self._plan, self._world, counter)
        forward = WholeForward(graph, whole.traced, self._world, counter, self._reducer, self._judge)
        return _Mode(forward, intake, whole.traced, frozenset(whole.stage.inputs))
