"""Does an op without a sharding rule mix rows? Tried out on a whole batch and on its halves, small random tensors.

What a plan does to a batch is to cut it, so the question is whether f(rows) cut is f(cut rows). Shapes are those of the
node at a batch of four and a short sequence; integers are drawn from {0, 1}, which index anything of two and more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autopar.blocks import op_name
from autopar.graph_walks import holds
from autopar.ir import Dim, TracedModel

__all__ = ["RowProbe"]

_ROWS, _SEQ, _LARGEST = 4, 8, 1 << 24


class RowProbe:
    """Answers for the ops of one model; equal calls are tried once."""

    def __init__(self, traced: TracedModel) -> None:
        self._batch, self._seq = traced.batch, traced.seq
        low, high = traced.seq_range
        self._length = max(low, min(_SEQ, high or _SEQ))
        self._known: dict[str, bool | None] = {}

    def mixes(self, node: fx.Node) -> bool | None:
        """True if cutting the batch changes what `node` computes; None if it cannot be run here."""
        if op_name(node) in _DRAWS:
            return False
        key = f"{node.target} {[n.meta['shape'] for n in node.all_input_nodes]} {node.args} {node.kwargs}"
        for i, argument in enumerate(node.all_input_nodes):
            key = key.replace(argument.name, f"%{i}")
        if key not in self._known:
            self._known[key] = self._try(node)
        return self._known[key]

    def _try(self, node: fx.Node) -> bool | None:
        generator = torch.Generator().manual_seed(0)
        tensors = {n: self._tensor(n, generator) for n in node.all_input_nodes}
        if any(isinstance(t, Tensor) and t.numel() > _LARGEST for t in tensors.values()):
            return None
        target = node.target
        assert callable(target)
        try:
            with torch.no_grad():
                whole = self._run(node, target, tensors)
                halves = [self._run(node, target, self._cut(tensors, part)) for part in (0, 1)]
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return None
        return not all(self._same(i, node, whole, halves) for i in range(len(whole)))

    def _run(self, node: fx.Node, target: Callable[..., Any], values: dict[fx.Node, Any]) -> list[Tensor]:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        args, kwargs = arguments
        result = target(*args, **kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    def _tensor(self, node: fx.Node, generator: torch.Generator) -> Any:
        shape = node.meta["shape"]
        if shape is None:
            return self._number(node, _ROWS)
        shapes = shape if shape and isinstance(shape[0], tuple) else (shape,)
        drawn = [_drawn([self._size(d, _ROWS) for d in s], node.meta["dtype"], generator) for s in shapes]
        if self._numbers_rows(node):
            dim = next(d for d, size in enumerate(shape) if self._holds_rows(size))
            column = torch.arange(drawn[0].shape[dim]).view([-1] + [1] * (len(shape) - 1 - dim))
            drawn = [column.expand(drawn[0].shape).to(node.meta["dtype"])]
        return drawn if shapes is shape else drawn[0]

    def _numbers_rows(self, node: fx.Node) -> bool:
        """Whether `node` is arange(batch), perhaps in another shape: then it counts from 0 in every part of a batch."""
        while node.op == "call_function" and op_name(node) in _SHAPING and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        shape = node.meta["shape"]
        return node.op == "call_function" and op_name(node) == "arange" and bool(shape) and self._holds_rows(shape[0])

    def _cut(self, values: dict[fx.Node, Any], part: int) -> dict[fx.Node, Any]:
        return {node: self._half(node, value, part) for node, value in values.items()}

    def _half(self, node: fx.Node, value: Any, part: int) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, list):
                return [self._half_of(v, s, part) for v, s in zip(value, node.meta["shape"], strict=True)]
            return self._number(node, _ROWS // 2)
        half = self._half_of(value, node.meta["shape"], part)
        return half - half.min() if self._numbers_rows(node) else half

    def _half_of(self, value: Tensor, shape: tuple[Dim, ...], part: int) -> Tensor:
        for dim, size in enumerate(shape):
            if self._holds_rows(size):
                value = value.chunk(2, dim)[part]
        return value

    def _same(self, i: int, node: fx.Node, whole: list[Tensor], halves: list[list[Tensor]]) -> bool:
        shape = node.meta["shape"]
        dims = shape[i] if shape and isinstance(shape[0], tuple) else shape
        holding = [d for d, size in enumerate(dims) if self._holds_rows(size)]
        if not holding:
            return all(_close(whole[i], half[i]) for half in halves)
        return _close(whole[i], torch.cat([half[i] for half in halves], holding[0]))

    def _holds_rows(self, size: Dim) -> bool:
        return holds(size, self._batch)

    def _size(self, size: Dim, rows: int) -> int:
        return int(sympy.sympify(size).subs({self._batch: rows, self._seq: self._length}))

    def _number(self, node: fx.Node, rows: int) -> Any:
        """A size computed in the graph."""
        if op_name(node) == "sym_size":
            source, dim = node.args[:2]
            return self._size(source.meta["shape"][dim], rows)  # type: ignore[union-attr]
        args = fx.node.map_arg(node.args, lambda n: self._number(n, rows))
        assert callable(node.target)
        return node.target(*args)


_SHAPING = ("unsqueeze", "reshape", "view", "to", "_to_copy", "expand", "clone", "alias", "contiguous")
_DRAWS = ("dropout", "native_dropout", "rand_like", "randn_like", "bernoulli", "empty_like")


def _drawn(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
