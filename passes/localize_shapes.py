"""Make shape arguments local: the sizes a model wrote for whole tensors, divided where a rank holds a shard.

before    `reshape(q, [batch, seq, heads, head_dim])` on a rank that holds heads / n of them
after     `reshape(q, [batch, seq, heads // n, head_dim])`; sizes that are symbolic are divided in the graph
requires  insert_collectives; meta["shape"] stays global
ensures   the graph runs on local tensors; the user's module attributes are untouched
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from autopar.blocks import op_name
from autopar.placement import Placement

__all__ = ["localize_shapes"]

# position of the list of sizes among the arguments
_SIZES = {"reshape": 1, "expand": 1, "view": 1}


def localize_shapes(graph_module: fx.GraphModule, ranks: int) -> fx.GraphModule:
    """Rewrite `graph_module` in place for the `ranks` of the axis its placements are over, and return it."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        placement = node.meta.get("placement")
        name = op_name(node)
        if name == "sym_size":
            _globalize_size(graph, node, ranks)
        elif placement is not None and placement.is_shard and name in _SIZES:
            _divide_size(graph, node, _SIZES[name], placement.dim, ranks)
        elif placement is not None and placement.is_shard and name == "unflatten":
            _divide_unflattened(graph, node, placement.dim, ranks)
        elif name in ("split", "split_with_sizes"):
            _divide_split(graph, node, ranks)
    graph_module.recompile()
    return graph_module


def _divide_size(graph: fx.Graph, node: fx.Node, position: int, dim: int, ranks: int) -> None:
    sizes = list(node.args[position])  # type: ignore[arg-type]
    sizes[dim] = _divided(graph, node, sizes[dim], ranks)
    node.update_arg(position, sizes)


def _divide_unflattened(graph: fx.Graph, node: fx.Node, dim: int, ranks: int) -> None:
    """The sizes of an unflatten stand for the dims from its own on."""
    first, sizes = node.args[1], list(node.args[2])  # type: ignore[arg-type]
    assert isinstance(first, int)
    at = dim - first % (len(node.meta["shape"]) - len(sizes) + 1)
    if 0 <= at < len(sizes):
        sizes[at] = _divided(graph, node, sizes[at], ranks)
        node.update_arg(2, sizes)


def _divided(graph: fx.Graph, node: fx.Node, size: Any, ranks: int) -> Any:
    if isinstance(size, int):
        return size if size == -1 else -(-size // ranks)  # a vocabulary is filled up
    with graph.inserting_before(node):
        local = graph.call_function(operator.floordiv, (size, ranks))
        local.meta = {**size.meta, "segment": node.meta["segment"], "placement": None}
    return local


def _divide_split(graph: fx.Graph, node: fx.Node, ranks: int) -> None:
    """The piece size of a split along the sharded dim: pieces of a strided shard shrink with it."""
    placement: Placement | None = node.meta.get("placement")
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    if placement is None or not placement.is_shard or placement.dim != dim % len(node.meta["shape"][0]):
        return
    pieces = node.args[1]
    if isinstance(pieces, list | tuple):
        node.update_arg(1, [_divided(graph, node, p, ranks) for p in pieces])
    else:
        node.update_arg(1, _divided(graph, node, pieces, ranks))


def _globalize_size(graph: fx.Graph, node: fx.Node, ranks: int) -> None:
    """A size read off a sharded tensor is local; the model means the whole one."""
    source, dim = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(dim, int)
    placement = source.meta.get("placement")
    if placement is None or not placement.is_shard or placement.dim != dim:
        return
    with graph.inserting_after(node):
        whole = graph.call_function(operator.mul, (node, ranks))
    whole.meta = {**node.meta}
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
