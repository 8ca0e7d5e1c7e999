"""What is computed from a part of a batch, is it that part of what is computed from the whole? Ops are tried out.

A plan cuts a batch by rows, and runs sequences that do not divide longer than they are. So the questions of an op are
whether f(rows) cut is f(cut rows), and how much of f(sequences that end earlier) f(sequences) begins with. It is run on
small random tensors with the shapes of the node; integers are drawn from {0, 1}, which index anything of two and more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from autopar.blocks import op_name
from autopar.graph_walks import holds, shapes_of
from autopar.ir import Dim, Shape, TracedModel

__all__ = ["EndProbe", "RowProbe"]

_ROWS, _SEQ, _LARGEST = 4, 8, 1 << 24

_Tried = tuple[list[Tensor], list[list[Tensor]]]


class _Probe:
    """Runs ops of one model on small tensors, whole and in part.

    along: the symbol whose dims are cut; sizes: of the whole; parts: where each part starts and ends along the symbol.
    """

    def __init__(
        self,
        traced: TracedModel,
        along: sympy.Symbol,
        sizes: Mapping[sympy.Symbol, int],
        parts: tuple[tuple[int, int], ...],
    ) -> None:
        low, high = traced.seq_range
        self._along, self._parts = along, parts
        self._sizes = {traced.seq: max(low, min(_SEQ, high or _SEQ)), **sizes}

    def _tried(self, node: fx.Node, change: Callable[[fx.Node, Tensor], Tensor] | None = None) -> _Tried | None:
        """What `node` gives of the whole and of each part, by tensor; None if it cannot be run here. `change` may alter
        an argument of a part."""
        generator = torch.Generator().manual_seed(0)
        tensors = {n: self._tensor(n, generator) for n in node.all_input_nodes}
        if any(isinstance(t, Tensor) and t.numel() > _LARGEST for t in tensors.values()):
            return None
        target = node.target
        assert callable(target)
        parts = []
        try:
            with torch.no_grad():
                whole = self._run(node, target, tensors)
                for part in self._parts:
                    cut = {n: self._part(n, t, part) for n, t in tensors.items()}
                    if change is not None:
                        cut = {n: change(n, t) if isinstance(t, Tensor) else t for n, t in cut.items()}
                    parts.append(self._run(node, target, cut))
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return None
        return whole, parts

    def _run(self, node: fx.Node, target: Callable[..., Any], values: dict[fx.Node, Any]) -> list[Tensor]:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        args, kwargs = arguments
        result = target(*args, **kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    def _tensor(self, node: fx.Node, generator: torch.Generator) -> Any:
        shape = node.meta["shape"]
        if shape is None:
            return self._number(node, self._sizes[self._along])
        shapes = shape if shape and isinstance(shape[0], tuple) else (shape,)
        drawn = [_drawn([self._size(d) for d in s], node.meta["dtype"], generator) for s in shapes]
        if self._numbers(node):
            dim = next(d for d, size in enumerate(shape) if holds(size, self._along))
            column = torch.arange(drawn[0].shape[dim]).view([-1] + [1] * (len(shape) - 1 - dim))
            drawn = [column.expand(drawn[0].shape).to(node.meta["dtype"])]
        return drawn if shapes is shape else drawn[0]

    def _numbers(self, node: fx.Node) -> bool:
        """Whether `node` is an arange along the symbol, perhaps reshaped: then it counts from 0 in every part."""
        while node.op == "call_function" and op_name(node) in _SHAPING and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        shape = node.meta["shape"]
        counts = node.op == "call_function" and op_name(node) == "arange"
        return counts and bool(shape) and holds(shape[0], self._along)

    def _part(self, node: fx.Node, value: Any, part: tuple[int, int]) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, list):
                return [self._part_of(v, s, part) for v, s in zip(value, node.meta["shape"], strict=True)]
            return self._number(node, part[1] - part[0])
        cut = self._part_of(value, node.meta["shape"], part)
        return cut - cut.min() if self._numbers(node) else cut

    def _part_of(self, value: Tensor, shape: tuple[Dim, ...], part: tuple[int, int]) -> Tensor:
        for dim, size in enumerate(shape):
            if holds(size, self._along):
                start = self._size(size, part[0]) if part[0] else 0
                value = value.narrow(dim, start, self._size(size, part[1]) - start)
        return value

    def _size(self, size: Dim, along: int | None = None) -> int:
        sizes = self._sizes if along is None else {**self._sizes, self._along: along}
        return int(sympy.sympify(size).subs(sizes))

    def _number(self, node: fx.Node, along: int) -> Any:
        """A size computed in the graph."""
        if op_name(node) == "sym_size":
            source, dim = node.args[:2]
            return self._size(source.meta["shape"][dim], along)  # type: ignore[union-attr]
        args = fx.node.map_arg(node.args, lambda n: self._number(n, along))
        assert callable(node.target)
        return node.target(*args)


def _key(node: fx.Node) -> str:
    """Equal for calls that differ only in which tensors they read."""
    key = f"{node.target} {[n.meta['shape'] for n in node.all_input_nodes]} {node.args} {node.kwargs}"
    for i, argument in enumerate(node.all_input_nodes):
        key = key.replace(argument.name, f"%{i}")
    return key


class RowProbe(_Probe):
    """Tries the two halves of a batch; equal calls are tried once."""

    def __init__(self, traced: TracedModel) -> None:
        halves = ((0, _ROWS // 2), (_ROWS // 2, _ROWS))
        super().__init__(traced, traced.batch, {traced.batch: _ROWS}, halves)
        self._known: dict[str, bool | None] = {}

    def mixes(self, node: fx.Node) -> bool | None:
        """True if cutting the batch changes what `node` computes; None if it cannot be run here."""
        if op_name(node) in _DRAWS:
            return False
        key = _key(node)
        if key not in self._known:
            with _disable_current_modes():  # a dry run rewrites under tensors without data
                self._known[key] = self._mixes(node)
        return self._known[key]

    def _mixes(self, node: fx.Node) -> bool | None:
        tried = self._tried(node)
        if tried is None:
            return None
        whole, parts = tried
        return not all(
            _close(self._part_of(tensor, dims, part), found[i])
            for part, found in zip(self._parts, parts, strict=True)
            for i, (tensor, dims) in enumerate(zip(whole, shapes_of(node), strict=True))
        )


class EndProbe(_Probe):
    """Tries sequences that end two tokens earlier; equal calls are tried once."""

    def __init__(self, traced: TracedModel) -> None:
        length = max(traced.seq_range[0] + 2, _SEQ)
        # One row: of a dim of several rows' tokens the first ones would not be the first of each.
        super().__init__(traced, traced.seq, {traced.batch: 1, traced.seq: length}, ((0, length - 2),))
        self._known: dict[tuple[str, tuple[int, ...]], int | None] = {}

    def unlike(self, node: fx.Node, before: Mapping[fx.Node, int]) -> int | None:
        """How many of the last elements along the sequence are not what the longer sequence has in their place, if they
        are `before` of each argument; as many as there are for a result without a sequence. None if it cannot be run
        here."""
        if op_name(node) in _DRAWS:
            return max((before.get(n, 0) for n in node.all_input_nodes), default=0)
        key = (_key(node), tuple(before.get(n, 0) for n in node.all_input_nodes))
        if key not in self._known:
            with _disable_current_modes():
                self._known[key] = self._unlike(node, before)
        return self._known[key]

    def _unlike(self, node: fx.Node, before: Mapping[fx.Node, int]) -> int | None:
        generator = torch.Generator().manual_seed(1)

        def change(argument: fx.Node, value: Tensor) -> Tensor:
            value = value.clone()
            for dim, size in enumerate(argument.meta["shape"]):
                if before.get(argument, 0) and holds(size, self._along):
                    last = value.narrow(dim, value.shape[dim] - before[argument], before[argument])
                    last.copy_(_drawn(list(last.shape), value.dtype, generator))
            return value

        tried = self._tried(node, change)
        if tried is None:
            return None
        whole, (part,) = tried
        return max(map(self._last_unlike, whole, part, shapes_of(node)))

    def _last_unlike(self, whole: Tensor, part: Tensor, dims: Shape) -> int:
        along = [d for d, size in enumerate(dims) if holds(size, self._along)]
        longest = max((part.shape[d] for d in along), default=1)
        for last in range(longest if along else 1):
            kept = [slice(part.shape[d] - last) if d in along else slice(None) for d in range(part.dim())]
            here = part[tuple(kept)]
            if _close(whole[tuple(map(slice, here.shape))], here):
                return last
        return longest


_SHAPING = ("unsqueeze", "reshape", "view", "to", "_to_copy", "expand", "clone", "alias", "contiguous")
_DRAWS = ("dropout", "native_dropout", "rand_like", "randn_like", "bernoulli", "empty_like")


def _drawn(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
