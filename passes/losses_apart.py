"""Write a loss that is summed out of a vector of losses as a sum of scalars. Plan-independent.

before    `torch.stack(losses).sum()`, `.mean()`, `torch.dot(weights, torch.stack(losses))`, perhaps scaled element by
          element in between; a constant zero, as `torch.tensor(0.)`, that such a sum starts from
after     additions of 0-d losses, each with its own factor; `zeros` for the constant
requires  canonicalize, before known_ops writes `stack` as `cat`
ensures   same values, up to the order of the additions. A vector that is no such stack stays
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.blocks import op_name
from autopar.passes.dead_code import drop_dead_code

__all__ = ["losses_apart"]

aten = torch.ops.aten
_ELEMENTWISE = ("add", "sub", "mul", "div", "neg", "to", "_to_copy")


def losses_apart(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    for node in _scalars(graph):
        with graph.inserting_before(node):
            result = _as_sum(graph, node)
        if result is not None:
            node.replace_all_uses_with(result)
    for node in _scalars(graph):
        for constant in [n for n in node.all_input_nodes if _is_constant_zero(graph_module, n)]:
            with graph.inserting_before(node):
                zero = graph.call_function(aten.zeros.default, ([],), {"dtype": constant.meta["dtype"]})
            zero.meta = {**constant.meta}
            node.replace_input_with(constant, zero)
    drop_dead_code(graph)
    graph_module.recompile()
    return graph_module


def _scalars(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.meta["shape"] == () and n.meta.get("grad")]


def _is_constant_zero(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Of a constant in the code of forward; a buffer that is zero now may hold something else later."""
    lifted = False
    while node.op == "call_function" and op_name(node) in ("lift_fresh_copy", "detach", "to", "_to_copy", "clone"):
        lifted |= op_name(node) == "lift_fresh_copy"
        node = node.all_input_nodes[0]
    if not lifted or node.op != "get_attr" or node.meta["shape"] != ():
        return False
    value: Any = functools.reduce(getattr, str(node.target).split("."), graph_module)
    return isinstance(value, Tensor) and not value.is_meta and value.item() == 0


def _as_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """`node`, a sum, mean or dot product over a vector with a stack of scalars in it, as additions; None if it is
    something else."""
    name, vectors = op_name(node), [a for a in node.args if isinstance(a, fx.Node)]
    if name not in ("sum", "mean", "dot", "matmul") or node.kwargs or not any(map(_holds_stack, vectors)):
        return None
    if len(vectors) != (2 if name in ("dot", "matmul") else 1):
        return None
    count = vectors[0].meta["shape"][0]
    total: fx.Node | None = None
    for i in range(count):
        first, *second = (_element(graph, node, v, i) for v in vectors)
        each = _scalar(graph, node, aten.mul.Tensor, (first, *second)) if second else first
        total = each if total is None else _scalar(graph, node, aten.add.Tensor, (total, each))
    return _scalar(graph, node, aten.div.Tensor, (total, count)) if name == "mean" else total


def _holds_stack(vector: fx.Node) -> bool:
    shape = vector.meta["shape"]
    if vector.op != "call_function" or not isinstance(shape, tuple) or len(shape) != 1 or not isinstance(shape[0], int):
        return False
    if op_name(vector) in ("stack", "cat"):
        return _parts(vector) is not None
    return op_name(vector) in _ELEMENTWISE and any(
        _holds_stack(n) for n in vector.all_input_nodes if n.meta["shape"] == shape
    )


def _parts(vector: fx.Node) -> list[fx.Node] | None:
    """What a stack or cat puts together, if that is one element each."""
    parts = vector.args[0]
    wanted = () if op_name(vector) == "stack" else (1,)
    if not isinstance(parts, list | tuple) or any(part.meta["shape"] != wanted for part in parts):  # type: ignore[union-attr]
        return None
    return list(parts)


def _element(graph: fx.Graph, near: fx.Node, vector: fx.Node, i: int) -> fx.Node:
    """Element i of `vector`, 0-d."""
    if not _holds_stack(vector):
        return _scalar(graph, near, aten.select.int, (vector, 0, i), vector.meta["grad"])
    parts = _parts(vector) if op_name(vector) in ("stack", "cat") else None
    if parts is not None:
        part = parts[i]
        return part if part.meta["shape"] == () else _scalar(graph, near, aten.reshape.default, (part, []))
    args = fx.node.map_arg(
        vector.args, lambda n: _element(graph, near, n, i) if n.meta["shape"] == vector.meta["shape"] else n
    )
    return _scalar(graph, near, vector.target, args, options=vector.kwargs, dtype=vector.meta["dtype"])


def _scalar(
    graph: fx.Graph,
    near: fx.Node,
    target: Any,
    args: Any,
    grad: bool = True,
    *,
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> fx.Node:
    node = graph.call_function(target, args, dict(options or {}))
    node.meta = {**near.meta, "shape": (), "grad": grad, "dtype": dtype or near.meta["dtype"]}
    return node
