"""The model called as a function: the user's outputs, whole on every rank, with a backward that is complete.

Every output is gathered, over tp inside the graph and over dp here. So whatever loss the user makes of them, on each
rank the same, has the gradients of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.graph_walks import outputs_of
from autopar.ir import TracedModel
from autopar.runtime.collectives import convert
from autopar.runtime.judge import StepJudge
from autopar.runtime.reducer import GradientReducer
from autopar.runtime.tokens import TokenCounter, divided
from autopar.runtime.world import World

__all__ = ["WholeForward"]


class WholeForward:
    """Calls a localized graph of all outputs on this dp rank's rows; see the module docstring."""

    def __init__(
        self,
        graph: nn.Module,
        traced: TracedModel,
        world: World,
        tokens: TokenCounter,
        reducer: GradientReducer,
        judge: StepJudge,
    ) -> None:
        self._graph = graph
        self._traced, self._world, self._tokens, self._reducer = traced, world, tokens, reducer
        self._judge = judge if judge.looks else None
        self._batch_dims, self._sequence_dims = _dims_of(traced, traced.batch), _dims_of(traced, traced.seq)
        outputs = outputs_of(traced.graph_module.graph)
        # A loss function may return what is an output already.
        self._losses = {i for i, x in enumerate(outputs) if traced.loss is not None and x is outputs[traced.loss]}

    def __call__(self, inputs: Mapping[str, Tensor], length: int | None = None) -> Any:
        """length: tokens of the user's sequences, where `inputs` are padded; outputs are cut back to it."""
        outputs = list(self._graph(**inputs))
        for i, value in enumerate(outputs):
            if isinstance(value, Tensor):
                dim = self._sequence_dims[i]
                if length is not None and dim is not None:
                    value = value.narrow(dim, 0, length)
                outputs[i] = self._reducer.reduce_after_backward(self._across_dp(i, value, inputs), self._judge)
        return pytree.tree_unflatten(outputs, self._traced.out_spec)

    def _across_dp(self, i: int, value: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        group = self._world.group("dp")
        if group is None:
            return value
        if i in self._losses:
            # The sums of its terms: rows none of which has a target have no mean, and nothing to add to the others'.
            return convert(divided(value, self._tokens.divisors(inputs)), "P", "R", group=group.group_name)
        dim = self._batch_dims[i]
        if dim is None:
            raise AutoparError(
                f"output {self._traced.outputs[i]!r} has no batch dim and cannot be put together from dp ranks",
                where="forward",
                try_="pm.step(batch), or a plan with dp=1",
            )
        return convert(value, f"S({dim})", "R", group=group.group_name)


def _dims_of(traced: TracedModel, size: sympy.Symbol) -> list[int | None]:
    """Of each output, the dim that has this size."""
    shapes = [n.meta["shape"] if isinstance(n, fx.Node) else None for n in outputs_of(traced.graph_module.graph)]
    return [None if shape is None else next((d for d, s in enumerate(shape) if s == size), None) for shape in shapes]
