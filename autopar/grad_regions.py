"""Write `torch.no_grad()` regions of a captured model into the graph itself.

torch.export keeps such a region as one op with a graph of its own. Here its ops move into the main graph, on detached
arguments: then nothing in them can carry a gradient, which is what the region says.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

__all__ = ["inline_no_grad"]

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_no_grad(graph_module: fx.GraphModule) -> None:
    """Rewrite the graph of an exported program in place. Regions never nest: torch.export cuts at every switch."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is _REGION:
            _inline(graph_module, node)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)  # the bodies


def _inline(graph_module: fx.GraphModule, region: fx.Node) -> None:
    enabled, body, *arguments = region.args
    assert isinstance(body, fx.Node)
    inner: fx.Graph = getattr(graph_module, str(body.target)).graph
    graph = region.graph
    copies: dict[fx.Node, Any] = {}
    placeholders = [n for n in inner.nodes if n.op == "placeholder"]
    with graph.inserting_before(region):
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            copies[placeholder] = argument if enabled else _detached(graph, argument, inner)
        for node in inner.nodes:
            if node.op == "output":
                _replace_results(region, fx.node.map_arg(node.args[0], lambda n: copies[n]))
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.erase_node(region)


def _detached(graph: fx.Graph, argument: Any, inner: fx.Graph) -> Any:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return argument
    if argument.op == "placeholder" and not value.requires_grad:
        return argument
    detached = graph.call_function(torch.ops.aten.detach.default, (argument,))
    first = next((n for n in inner.nodes if n.op == "call_function"), argument)
    detached.meta = {"val": value, "nn_module_stack": first.meta.get("nn_module_stack")}
    return detached


def _replace_results(region: fx.Node, results: Any) -> None:
    for user in list(region.users):
        assert user.target is operator.getitem, user
        user.replace_all_uses_with(results[user.args[1]])
        region.graph.erase_node(user)
