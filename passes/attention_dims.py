"""Attention on [batch, heads, seq, width], whatever dims the model joined. Plan-independent.

before    scaled_dot_product_attention of [batch * heads, seq, width], [1, batch * heads, seq, width], [batch, seq,
          width] or [batch, groups, repeats, seq, width]; reshapes that undo each other
after     attention of four dims, with batch and heads apart where the model had them apart just before
requires  canonicalize
ensures   same values, up to the rounding of the kernel that torch has for other ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.ir import Dim, Shape
from autopar.passes.canonicalize import read_sizes_off_inputs
from autopar.passes.dead_code import drop_dead_code

__all__ = ["attention_dims"]

aten = torch.ops.aten
_MASK = 3


def attention_dims(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    attentions = [n for n in graph.nodes if n.op == "call_function" and op_name(n) == "scaled_dot_product_attention"]
    rewrites = (_apart, _with_one_head, _with_joined_groups)
    changed = [any(rewrite(graph, node) for rewrite in rewrites) for node in attentions]
    if not any(changed):
        return graph_module
    for node in list(graph.nodes):
        source = _reshaped(node)
        before = _reshaped(source) if source is not None else None
        if before is not None and before.meta["shape"] == node.meta["shape"]:
            node.replace_all_uses_with(before)
    read_sizes_off_inputs(graph)
    drop_dead_code(graph)
    graph_module.recompile()
    return graph_module


def _reshaped(node: fx.Node) -> fx.Node | None:
    """What a reshape reads."""
    if node.op != "call_function" or op_name(node) != "reshape":
        return None
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    return source


def _mask(node: fx.Node) -> fx.Node | None:
    mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _for_all_heads(mask: fx.Node | None) -> bool:
    return mask is None or len(mask.meta["shape"]) == 2


def _apart(graph: fx.Graph, node: fx.Node) -> bool:
    """Read q, k and v before they were joined to [b * h, s, d] or [1, b * h, s, d]."""
    sources = [_reshaped(x) for x in node.args[:3]]  # type: ignore[arg-type]
    for source, joined in zip(sources, node.args[:3], strict=True):
        if source is None or not _joins(source.meta["shape"], joined.meta["shape"]):  # type: ignore[union-attr]
            return False
    if not _for_all_heads(_mask(node)):
        return False
    shape = (*sources[0].meta["shape"][:3], sources[2].meta["shape"][3])  # type: ignore[union-attr]
    _replace(graph, node, sources, shape)
    return True


def _joins(before: Shape, after: Shape) -> bool:
    if len(before) != 4 or after[-2:] != before[2:] or after[:-3] not in ((), (1,)):
        return False
    return bool(after[-3] == before[0] * before[1] and not isinstance(before[0], int))


def _with_one_head(graph: fx.Graph, node: fx.Node) -> bool:
    """[n, s, d] is [n, 1, s, d]."""
    if len(node.meta["shape"]) != 3:
        return False

    def one_more(x: fx.Node) -> fx.Node:
        shape = (x.meta["shape"][0], 1, *x.meta["shape"][1:])
        return _made(graph, node, aten.unsqueeze.default, (x, 1), x, shape)

    mask = _mask(node)
    with graph.inserting_before(node):
        tensors = [one_more(x) for x in node.args[:3]]  # type: ignore[arg-type]
        if mask is not None and len(mask.meta["shape"]) == 3:
            mask = one_more(mask)
    batch, *rest = node.meta["shape"]
    _replace(graph, node, tensors, (batch, 1, *rest), mask)
    return True


def _with_joined_groups(graph: fx.Graph, node: fx.Node) -> bool:
    """[b, g, r, s, d] is [b, g * r, s, d]."""
    shapes: list[Shape] = [x.meta["shape"] for x in node.args[:3]]  # type: ignore[union-attr]
    groups = shapes[0][1:-2]
    known = all(isinstance(size, int) for size in groups)
    if len(groups) < 2 or not known or any(s[:-2] != shapes[0][:-2] for s in shapes) or not _for_all_heads(_mask(node)):
        return False
    heads = int(sympy.Mul(*groups))
    with graph.inserting_before(node):
        tensors = [_reshape(graph, node, x, (x.meta["shape"][0], heads, *x.meta["shape"][-2:])) for x in node.args[:3]]  # type: ignore[union-attr,arg-type]
    _replace(graph, node, tensors, (shapes[0][0], heads, shapes[0][-2], shapes[2][-1]))
    return True


def _replace(graph: fx.Graph, node: fx.Node, tensors: list[Any], shape: Shape, mask: fx.Node | None = None) -> None:
    """Attention of `tensors`, with a result of `shape`, in place of `node`."""
    options = {k: v for k, v in node.kwargs.items() if k != "attn_mask"}
    args = (*tensors, mask if mask is not None else _mask(node), *node.args[_MASK + 1 :])
    with graph.inserting_before(node):
        attention = _made(graph, node, node.target, args, node, shape)
        attention.kwargs = options
        result = _reshape(graph, node, attention, node.meta["shape"])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _reshape(graph: fx.Graph, near: fx.Node, x: fx.Node, shape: Shape) -> fx.Node:
    """`x` with sizes read off itself where they are symbols."""
    sizes: list[Any] = []
    for size in shape:
        sizes.append(size if isinstance(size, int) else _size_of(graph, near, x, size))
    assert sizes.count(-1) <= 1, (shape, x)
    return _made(graph, near, aten.reshape.default, (x, sizes), x, shape)


def _size_of(graph: fx.Graph, near: fx.Node, x: fx.Node, size: Dim) -> Any:
    """A node that reads `size` off a dim of `x`; -1 for one that several dims make up."""
    if size not in x.meta["shape"]:
        return -1
    read = graph.call_function(aten.sym_size.int, (x, x.meta["shape"].index(size)))
    read.meta = {"size": size, "shape": None, "dtype": None, "path": near.meta["path"]}
    return read


def _made(
    graph: fx.Graph, near: fx.Node, target: Callable[..., Any] | str, args: tuple[Any, ...], like: fx.Node, shape: Shape
) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = {**like.meta, "shape": shape, "path": near.meta["path"]}
    return node
