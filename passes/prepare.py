"""The plan-independent passes, run once between capture and search."""

from __future__ import annotations

import copy
from dataclasses import replace

import sympy
from torch import fx

from autopar.blocks import annotate, op_name
from autopar.cost_model.strategy_table import ops_without_rule
from autopar.errors import UnsupportedModelError
from autopar.graph_walks import shapes_of
from autopar.ir import TracedModel
from autopar.passes.arguments_apart import arguments_apart
from autopar.passes.attention_dims import attention_dims
from autopar.passes.buffer_updates import updated_buffers
from autopar.passes.canonicalize import canonicalize
from autopar.passes.chunks_joined import chunks_joined
from autopar.passes.fold_masks import fold_masks
from autopar.passes.heads_apart import heads_apart
from autopar.passes.known_ops import known_ops
from autopar.passes.losses_apart import losses_apart
from autopar.plain_graph import graph_module as new_graph_module

__all__ = ["copy_graph", "prepare"]


def prepare(traced: TracedModel) -> TracedModel:
    """The passes in order on a copy of the graph; keys, gradient flow and segments are computed anew."""
    graph_module = copy_graph(traced.graph_module)
    dense = _dense_gradients(graph_module.graph)
    canonicalize(graph_module)
    losses_apart(graph_module)
    chunks_joined(graph_module)
    known_ops(graph_module)
    attention_dims(graph_module)
    heads_apart(graph_module, traced.batch)
    fold_masks(graph_module, traced.inputs)
    arguments_apart(graph_module)
    _refuse_sizes_of_values(graph_module.graph, {traced.batch, traced.seq})
    segments = annotate(graph_module.graph, traced.parameters)
    prepared = replace(traced, graph_module=graph_module, segments=segments)
    return replace(prepared, notices=(*traced.notices, *dense, *_notices(prepared)))


def _dense_gradients(graph: fx.Graph) -> list[str]:
    """Embeddings with sparse=True get dense gradients, which sums over ranks and shards take; what was changed."""
    tables = [n for n in graph.nodes if n.op == "call_function" and op_name(n) == "embedding"]
    changed = [n for n in tables if n.args[4:] == (True,)]
    for node in changed:
        node.args = node.args[:4]
    return [f"{n.meta['path'] or 'forward'}: the gradient of this embedding is dense (sparse=True)" for n in changed]


def _refuse_sizes_of_values(graph: fx.Graph, known: set[sympy.Symbol]) -> None:
    """Sizes that depend on values, as of `logits[mask]`, can neither be priced nor cut."""
    for node in graph.nodes:
        sizes = [size for shape in shapes_of(node) for size in shape]
        if any(getattr(size, "free_symbols", set()) - known for size in sizes):
            raise UnsupportedModelError(
                f"the size of the result of {op_name(node)} depends on values",
                where=str(node.meta.get("path") or "forward"),
                try_="keep all elements and mark those left out: torch.where(mask, target, -100) for a masked loss",
            )


def _notices(traced: TracedModel) -> list[str]:
    updated = [
        f"buffer {name} is changed in forward: once for every micro-batch of a step"
        for name in updated_buffers(traced.graph_module.graph)
    ]
    return updated + [
        f"{op} ({count} in the layers) has no sharding rule: it runs replicated over tp, its arguments are gathered"
        for op, count in ops_without_rule(traced).items()
    ]


def copy_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same tensors, with the nodes' meta copied one level deep."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = copy.copy(node.meta)
    return new_graph_module(graph_module, graph)
