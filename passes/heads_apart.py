"""Keep batch and heads in dims of their own, so that heads can be sharded. Plan-independent; bit-identical.

before    tensors of [batch * heads, ..]: a reshape joins rows and heads, as nn.MultiheadAttention and attention written
          with bmm do, ops follow, and a reshape takes them apart again
after     the ops between run on [batch, heads, ..]; bmm is matmul
requires  canonicalize, known_ops
ensures   same values at every batch and sequence. Where another op reads a joined tensor, it is joined for that op
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.sharding_rules import RULES
from autopar.ir import Dim, Shape
from autopar.passes.canonicalize import read_sizes_off_inputs
from autopar.passes.dead_code import drop_dead_code
from autopar.passes.known_ops import Writer

__all__ = ["heads_apart"]

aten = torch.ops.aten


def heads_apart(graph_module: fx.GraphModule, batch: sympy.Symbol) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    apart = _Apart(batch)
    for node in list(graph.nodes):
        if node.op == "call_function" and apart.joined_dim(node) is not None:
            with graph.inserting_before(node):
                apart.add(Writer(graph, node), node)
    for node, (version, dim) in apart.made.items():
        with graph.inserting_before(node):
            joined = Writer(graph, node).merge(version, dim, 2)
        joined.meta.update({k: node.meta[k] for k in ("dtype", "grad") if k in node.meta})
        node.replace_all_uses_with(joined)
    for node in list(graph.nodes):
        _skip_joining(node)
    if apart.made:
        read_sizes_off_inputs(graph)
    drop_dead_code(graph)
    graph_module.recompile()
    return graph_module


def _skip_joining(node: fx.Node) -> None:
    """A reshape of a reshape reads what that reads; one that changes nothing goes."""
    if node.op != "call_function" or op_name(node) != "reshape":
        return
    source = node.args[0]
    if isinstance(source, fx.Node) and source.op == "call_function" and op_name(source) == "reshape":
        node.update_arg(0, source.args[0])
        source = source.args[0]
    if isinstance(source, fx.Node) and source.meta["shape"] == node.meta["shape"]:
        node.replace_all_uses_with(source)


class _Apart:
    """Versions of joined tensors with rows and heads in dims `dim` and `dim + 1`: `made[node] = (version, dim)`."""

    def __init__(self, batch: sympy.Symbol) -> None:
        self.batch = batch
        self.made: dict[fx.Node, tuple[fx.Node, int]] = {}

    def joined_dim(self, node: fx.Node) -> int | None:
        """The one dim that holds rows times a number of heads."""
        shape = node.meta.get("shape")
        if not isinstance(shape, tuple) or any(isinstance(size, tuple) for size in shape):
            return None
        found = [d for d, size in enumerate(shape) if self._heads(size) > 1]
        return found[0] if len(found) == 1 else None

    def _heads(self, size: Dim) -> int:
        if isinstance(size, int):
            return 1
        heads = sympy.cancel(size / self.batch)
        return int(heads) if heads.is_Integer else 1

    def add(self, w: Writer, node: fx.Node) -> None:
        """Write `node` with rows and heads apart, if it can be."""
        write = _WRITTEN.get(op_name(node)) or (_elementwise if _is_elementwise(node) else None)
        dim = self.joined_dim(node)
        assert dim is not None
        version = write(self, w, node, dim) if write is not None else None
        if version is not None:
            version.meta.update({k: node.meta[k] for k in ("dtype", "grad") if k in node.meta})
            self.made[node] = (version, dim)

    def shape(self, node: fx.Node, dim: int) -> Shape:
        """The shape of `node` with its joined dim taken apart."""
        shape: Shape = node.meta["shape"]
        return (*shape[:dim], self.batch, self._heads(shape[dim]), *shape[dim + 1 :])


def _reshape(apart: _Apart, w: Writer, node: fx.Node, dim: int) -> fx.Node | None:
    x, sizes = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(sizes, list | tuple)
    if x not in apart.made and apart.batch not in x.meta["shape"]:
        return None  # several batches, one after the other, are no heads
    shape = apart.shape(node, dim)
    known = node.meta["shape"]
    sizes = [k if size == -1 and isinstance(k, int) else size for size, k in zip(sizes, known, strict=True)]
    if -1 in sizes and sizes[dim] != -1:
        return None  # one size may be left open, and here it is another
    wanted = [*sizes[:dim], -1, shape[dim + 1], *sizes[dim + 1 :]]
    return w.op(aten.reshape.default, (x, wanted), shape)


def _transpose(apart: _Apart, w: Writer, node: fx.Node, dim: int) -> fx.Node | None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if x not in apart.made:
        return None
    version, before = apart.made[x]
    rank = len(x.meta["shape"])
    order = list(range(rank))
    if op_name(node) == "permute":
        order = [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    else:
        a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    wide = [new for d in order for new in ((d, d + 1) if d == before else (d + (d > before),))]
    return w.permute(version, wide)


def _is_elementwise(node: fx.Node) -> bool:
    name = op_name(node)
    head = RULES.get(name, "").split(" | ")[0]
    return name in _OVER_LAST or (bool(head) and set(head) <= set(".,>"))


_OVER_LAST = ("softmax", "_softmax", "log_softmax", "_log_softmax")


def _elementwise(apart: _Apart, w: Writer, node: fx.Node, dim: int) -> fx.Node | None:
    rank = len(node.meta["shape"])
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("shape"), tuple)]
    if not any(n in apart.made for n in tensors):
        return None
    versions: dict[fx.Node, fx.Node] = {}
    for x in tensors:
        if x in apart.made:
            versions[x], at = apart.made[x]
            if len(x.meta["shape"]) != rank or at != dim:
                return None
        else:
            at = dim - (rank - len(x.meta["shape"]))  # broadcast from the right
            if at >= 0 and x.meta["shape"][at] != 1:
                return None
            versions[x] = w.merge(x, at, 0) if at >= 0 else x
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: versions.get(n, n))
    if op_name(node) in _OVER_LAST:
        along = int(args[1]) % rank  # type: ignore[arg-type]
        if along == dim:
            return None
        args = (args[0], along + (along > dim), *args[2:])
    made = w.op(node.target, tuple(args), apart.shape(node, dim))
    made.kwargs = kwargs
    return made


def _bmm(apart: _Apart, w: Writer, node: fx.Node, dim: int) -> fx.Node | None:
    pair = [apart.made.get(x) for x in node.args[:2]]  # type: ignore[arg-type]
    if dim != 0 or any(found is None or found[1] != 0 for found in pair):
        return None
    return w.op(aten.matmul.default, tuple(found[0] for found in pair if found), apart.shape(node, dim))


_WRITTEN: dict[str, Callable[[_Apart, Writer, fx.Node, int], fx.Node | None]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "permute": _transpose,
    "bmm": _bmm,
}
