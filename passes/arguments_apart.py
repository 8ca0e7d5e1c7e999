"""One node for each tensor argument of an op whose sharding rule tells arguments by their place. Plan-independent.

before    attention that reads one tensor as keys and values, or as all three; other ops that read a tensor twice beside
          another one
after     every further reading is of a node of its own, a cast to the dtype the tensor has
requires  canonicalize, which would take such casts away
ensures   same values. `x * x` stays: its rule knows that it is not linear (strategy_table)
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.sharding_rules import RULES

__all__ = ["arguments_apart"]


def arguments_apart(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and op_name(node) in RULES:
            read = [a for a in node.args if isinstance(a, fx.Node) and isinstance(a.meta.get("shape"), tuple)]
            several = len(set(read)) > 1 or op_name(node) == "scaled_dot_product_attention"
            if len(read) > len(set(read)) and several:
                _set_apart(graph, node)
    graph_module.recompile()
    return graph_module


def _set_apart(graph: fx.Graph, node: fx.Node) -> None:
    args = list(node.args)
    seen: set[fx.Node] = set()
    for i, x in enumerate(args):
        if not isinstance(x, fx.Node):
            continue
        if x in seen:
            with graph.inserting_before(node):
                again = graph.call_function(torch.ops.aten.to.dtype, (x, x.meta["dtype"]))
            again.meta = {**x.meta, "path": node.meta["path"]}
            args[i] = again
        seen.add(x)
    node.args = tuple(args)
