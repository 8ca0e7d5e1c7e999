"""Keep batch and heads in dims of their own, so that heads can be sharded. Plan-independent; bit-identical.

before    `reshape(transpose(reshape(x, [s, b * h, d]), 0, 1), [b, h, s, d])`: nn.MultiheadAttention joins batch and
          heads, and takes them apart again
after     `permute(reshape(x, [s, b, h, d]), [1, 2, 0, 3])`
requires  canonicalize
ensures   same values at every batch and sequence
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.passes.dead_code import drop_dead_code

__all__ = ["heads_apart"]

aten = torch.ops.aten


def heads_apart(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        joined = _joined(node)
        if joined is None:
            continue
        batch, heads, seq, width = node.args[1]
        with graph.inserting_before(node):
            apart = graph.call_function(aten.reshape.default, (joined.args[0], [seq, batch, heads, width]))
            moved = graph.call_function(aten.permute.default, (apart, [1, 2, 0, 3]))
        b, h, s, d = node.meta["shape"]
        apart.meta, moved.meta = {**joined.meta, "shape": (s, b, h, d)}, dict(node.meta)
        node.replace_all_uses_with(moved)
    drop_dead_code(graph)
    graph_module.recompile()
    return graph_module


def _joined(node: fx.Node) -> fx.Node | None:
    """The reshape that joins batch and heads, if `node` is the one that takes them apart."""
    transposed = _source(node, "reshape", 4)
    joined = _source(transposed, "transpose", 3) if transposed is not None else None
    x = _source(joined, "reshape", 3) if joined is not None else None
    if x is None or transposed is None or joined is None or {d % 3 for d in transposed.args[1:3]} != {0, 1}:  # type: ignore[operator]
        return None
    b, h, s, d = node.meta["shape"]
    fits = len(x.meta["shape"]) == 3 and x.meta["shape"] == (s, b, h * d) and joined.meta["shape"] == (s, b * h, d)
    return joined if fits else None


def _source(node: Any, name: str, rank: int) -> fx.Node | None:
    """The tensor that `node` reads, if it is such an op with a result of that rank."""
    if node.op != "call_function" or op_name(node) != name or len(node.meta["shape"]) != rank:
        return None
    source: fx.Node = node.args[0]
    return source
