"""Write ops that have no sharding rule as ops that have one. Plan-independent.

before    einsum of two tensors, unbind, stack, glu, repeat_interleave, repeat, baddbmm, slice_scatter
after     linear or matmul between permutations and reshapes; split, unsqueeze, cat, slice, expand, bmm. An op whose
          arguments are of another kind stays
requires  canonicalize
ensures   same values, up to the rounding of the kernel that multiplies
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.ir import Dim, Shape
from autopar.passes.canonicalize import read_sizes_off_inputs
from autopar.passes.dead_code import drop_dead_code

__all__ = ["Writer", "known_ops"]

aten = torch.ops.aten


def known_ops(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph, changed = graph_module.graph, False
    for node in list(graph.nodes):
        write = _WRITTEN.get(op_name(node)) if node.op == "call_function" else None
        if write is None:
            continue
        with graph.inserting_before(node):
            result = write(Writer(graph, node), node)
        if result is not None:
            node.replace_all_uses_with(result)
            changed = True
    if changed:
        drop_dead_code(graph)
        read_sizes_off_inputs(graph)
        drop_dead_code(graph)
        graph_module.recompile()
    return graph_module


class Writer:
    """Adds ops at the graph's insertion point, with shapes; path and dtype are those of the op they stand for."""

    def __init__(self, graph: fx.Graph, near: fx.Node) -> None:
        self._graph, self._near = graph, near

    def op(self, target: Any, args: tuple[Any, ...], shape: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        like = next((n for n in node.all_input_nodes if n.meta.get("shape") is not None), self._near)
        node.meta = {"shape": shape}
        for source, keys in ((self._near, ("path", "nn_module_stack")), (like, ("dtype", "grad"))):
            node.meta.update({key: source.meta[key] for key in keys if key in source.meta})
        return node

    def size(self, x: fx.Node, dim: int) -> Any:
        known = x.meta["shape"][dim]
        if isinstance(known, int):
            return known
        node = self._graph.call_function(aten.sym_size.int, (x, dim))
        node.meta = {"size": known, "shape": None, "dtype": None, "path": self._near.meta.get("path", "")}
        return node

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == list(range(len(order))):
            return x
        return self.op(aten.permute.default, (x, list(order)), tuple(x.meta["shape"][d] for d in order))

    def merge(self, x: fx.Node, first: int, count: int) -> fx.Node:
        """Join `count` dims from `first` on; a new dim of one element for none."""
        shape: Shape = x.meta["shape"]
        if count == 1:
            return x
        if count == 0:
            return self.op(aten.unsqueeze.default, (x, first), (*shape[:first], 1, *shape[first:]))
        product: Dim = 1
        for size in shape[first : first + count]:
            product = product * size
        rest = range(first + count, len(shape))
        sizes = [*(self.size(x, d) for d in range(first)), -1, *(self.size(x, d) for d in rest)]
        return self.op(aten.reshape.default, (x, sizes), (*shape[:first], product, *shape[first + count :]))

    def part(self, x: fx.Node, dim: int, sizes: Sequence[Dim]) -> fx.Node:
        """Take the dim apart into `sizes`, numbers but for one."""
        shape: Shape = x.meta["shape"]
        if len(sizes) == 1:
            return x
        before, after = range(dim), range(dim + 1, len(shape))
        inner = [s if isinstance(s, int) else -1 for s in sizes]
        wanted = [*(self.size(x, d) for d in before), *inner, *(self.size(x, d) for d in after)]
        return self.op(aten.reshape.default, (x, wanted), (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _einsum(w: Writer, node: fx.Node) -> fx.Node | None:
    terms = _letters(node)
    if terms is None:
        return None
    (a, la), (b, lb), out = terms
    batch, contracted = [x for x in la if x in lb and x in out], [x for x in la if x in lb and x not in out]
    rows, columns = [x for x in la if x not in lb], [x for x in lb if x not in la]
    sizes = dict(zip((*la, *lb), (*a.meta["shape"], *b.meta["shape"]), strict=True))
    if (
        not contracted
        or set(out) != {*batch, *rows, *columns}
        or any(a.meta["shape"][la.index(x)] != b.meta["shape"][lb.index(x)] for x in (*batch, *contracted))
    ):
        return None
    symbolic = {x for x, size in sizes.items() if not isinstance(size, int)}
    if not batch and symbolic.intersection(columns) and not symbolic.intersection(rows):
        (a, la, rows), (b, lb, columns) = (b, lb, columns), (a, la, rows)
    merged = [contracted, columns] if not batch else [contracted, columns, rows]
    if any(len(group) > 1 and symbolic.intersection(group) for group in merged):
        return None  # which of the symbols would be cut is not known
    left = w.permute(a, [la.index(x) for x in (*batch, *rows, *contracted)])
    left = w.merge(left, len(batch) + len(rows), len(contracted))
    if not batch:
        right = w.permute(b, [lb.index(x) for x in (*columns, *contracted)])
        right = w.merge(w.merge(right, len(columns), len(contracted)), 0, len(columns))
        result = w.op(aten.linear.default, (left, right), (*left.meta["shape"][:-1], right.meta["shape"][0]))
    else:
        left = w.merge(left, len(batch), len(rows))
        right = w.permute(b, [lb.index(x) for x in (*batch, *contracted, *columns)])
        right = w.merge(w.merge(right, len(batch) + len(contracted), len(columns)), len(batch), len(contracted))
        result = w.op(aten.matmul.default, (left, right), (*left.meta["shape"][:-1], right.meta["shape"][-1]))
    result.meta["grad"] = node.meta["grad"]
    result = _taken_apart(w, result, columns, sizes)
    if batch:
        result = _taken_apart(w, result, rows, sizes, len(batch))
    order = [*batch, *rows, *columns]
    return w.permute(result, [order.index(x) for x in out])


def _taken_apart(w: Writer, x: fx.Node, letters: Sequence[str], sizes: dict[str, Dim], dim: int = -1) -> fx.Node:
    dim %= len(x.meta["shape"])
    if letters:
        return w.part(x, dim, [sizes[letter] for letter in letters])
    return w.op(aten.squeeze.dim, (x, dim), (*x.meta["shape"][:dim], *x.meta["shape"][dim + 1 :]))


def _letters(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str] | None:
    """Both operands with a letter for each dim, and those of the result; None for other equations."""
    equation, tensors = node.args[:2]
    inputs, arrow, out = str(equation).replace(" ", "").partition("->")
    each = inputs.split(",")
    if not arrow or "." in inputs or not isinstance(tensors, list | tuple) or len(each) != 2 or len(tensors) != 2:
        return None
    if any(len(set(letters)) != len(letters) for letters in (*each, out)):
        return None
    a, b = tensors
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    return (a, each[0]), (b, each[1]), out


def _unbind(w: Writer, node: fx.Node) -> None:
    """Pieces of one, without the dim: backward joins them again in one go."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    shape: Shape = x.meta["shape"]
    dim = _argument(node, 1, "dim", 0) % len(shape)
    piece = (*shape[:dim], 1, *shape[dim + 1 :])
    pieces = w.op(aten.split.Tensor, (x, 1, dim), (piece,) * len(node.meta["shape"]))
    for user in list(node.users):
        if user.target is operator.getitem:
            item = w.op(operator.getitem, (pieces, user.args[1]), piece)
            item.meta["dtype"] = x.meta["dtype"]
            user.replace_all_uses_with(w.op(aten.squeeze.dim, (item, dim), node.meta["shape"][user.args[1]]))


def _stack(w: Writer, node: fx.Node) -> fx.Node | None:
    dim = _argument(node, 1, "dim", 0) % len(node.meta["shape"])
    parts = [w.merge(x, dim, 0) for x in node.args[0]]  # type: ignore[union-attr,arg-type]
    return w.op(aten.cat.default, (parts, dim), node.meta["shape"])


def _glu(w: Writer, node: fx.Node) -> fx.Node | None:
    """The first half times the sigmoid of the second."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dim = _argument(node, 1, "dim", -1) % len(node.meta["shape"])
    half = node.meta["shape"]
    if not isinstance(half[dim], int):
        return None
    halves = w.op(aten.split.Tensor, (x, half[dim], dim), (half, half))
    value, gate = (w.op(operator.getitem, (halves, i), half) for i in (0, 1))
    return w.op(aten.mul.Tensor, (value, w.op(aten.sigmoid.default, (gate,), half)), half)


def _repeat_interleave(w: Writer, node: fx.Node) -> fx.Node | None:
    """Every element `times` in place: x[:, None] widened and joined."""
    if node.target is not aten.repeat_interleave.self_int:
        return None
    x, times = node.args[:2]
    dim = _argument(node, 2, "dim", None)
    if dim is None or not isinstance(times, int):
        return None
    assert isinstance(x, fx.Node)
    shape: Shape = x.meta["shape"]
    dim %= len(shape)
    opened = w.merge(x, dim + 1, 0)
    wide = (*shape[: dim + 1], times, *shape[dim + 1 :])
    sizes = [times if d == dim + 1 else -1 for d in range(len(wide))]
    return w.merge(w.op(aten.expand.default, (opened, sizes), wide), dim, 2)


def _repeat(w: Writer, node: fx.Node) -> fx.Node | None:
    """Where only dims of one element are repeated, they are widened."""
    x, times = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(times, list | tuple)
    new = len(times) - len(x.meta["shape"])
    old = list(zip(times[new:], x.meta["shape"], strict=True))
    if not all(t == 1 or size == 1 for t, size in old):
        return None
    sizes = [*times[:new], *(t if size == 1 else -1 for t, size in old)]
    return w.op(aten.expand.default, (x, sizes), node.meta["shape"])


def _baddbmm(w: Writer, node: fx.Node) -> fx.Node | None:
    bias, a, b = node.args[:3]
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    product = w.op(aten.bmm.default, (a, b), node.meta["shape"])
    product.meta["grad"] = node.meta["grad"]
    if alpha != 1:
        product = w.op(aten.mul.Tensor, (product, alpha), node.meta["shape"])
    if beta == 0:
        return product
    assert isinstance(bias, fx.Node)
    scaled = bias if beta == 1 else w.op(aten.mul.Tensor, (bias, beta), bias.meta["shape"])
    return w.op(aten.add.Tensor, (product, scaled), node.meta["shape"])


def _slice_scatter(w: Writer, node: fx.Node) -> fx.Node | None:
    """`x[..., start:end] = value`, in a dim of a known size: what stays of x beside the value. Where all of x was
    written part by part, as into `new_empty`, nothing of it stays."""
    x, value = node.args[:2]
    assert isinstance(x, fx.Node)
    shape: Shape = node.meta["shape"]
    dim = _argument(node, 2, "dim", 0) % len(shape)
    start, end = _argument(node, 3, "start", None), _argument(node, 4, "end", None)
    size = shape[dim]
    if (
        not isinstance(size, int)
        or _argument(node, 5, "step", 1) != 1
        or any(isinstance(b, fx.Node) for b in (start, end))
    ):
        return None
    start, end, _ = slice(start, end).indices(size)
    parts = [*_between(w, x, dim, 0, start), value, *_between(w, x, dim, end, size)]
    return w.op(aten.cat.default, (parts, dim), shape)


def _between(w: Writer, x: fx.Node, dim: int, start: int, end: int) -> list[fx.Node]:
    """Elements from `start` to `end` of `dim`: the parts themselves where `x` is put together of such."""
    parts, joined = [x], x.op == "call_function" and op_name(x) == "cat" and _argument(x, 1, "dim", 0) == dim
    if joined and all(isinstance(p.meta["shape"][dim], int) for p in x.args[0]):  # type: ignore[union-attr]
        parts = list(x.args[0])  # type: ignore[arg-type]
    found, first = [], 0
    for part in parts:
        shape = part.meta["shape"]
        low, high = max(start - first, 0), min(end - first, shape[dim])
        if low < high:
            cut = (*shape[:dim], high - low, *shape[dim + 1 :])
            found.append(part if cut == shape else w.op(aten.slice.Tensor, (part, dim, low, high), cut))
        first += shape[dim]
    return found


_WRITTEN: dict[str, Callable[[Writer, fx.Node], fx.Node | None]] = {
    "einsum": _einsum,
    "unbind": _unbind,
    "stack": _stack,
    "glu": _glu,
    "repeat_interleave": _repeat_interleave,
    "repeat": _repeat,
    "baddbmm": _baddbmm,
    "slice_scatter": _slice_scatter,
}
