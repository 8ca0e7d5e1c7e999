"""Hide tensor-parallel communication behind the products beside it, where the plan asks for it.

before    a conversion over tp, then column-parallel linears that read it; a row-parallel linear, then a conversion
after     tp_linear: conversion and its linears are one `column_linears`, which reduces the input gradient under the
          weight gradients. tp_ring: under sequence sharding they go round the ring, and a row-parallel linear with its
          reduce-scatter is one `linear_scattered`
requires  insert_collectives, localize_shapes
ensures   the same values; what was asked for and could not be done is in `graph_module.meta["unapplied"]`, by layer
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from autopar.ir import TracedModel
from autopar.passes.dead_code import drop_dead_code
from autopar.placement import CONVERSIONS, Placement, parse_placement
from autopar.plan import Plan
from autopar.runtime.collectives import convert
from autopar.runtime.overlapped_linear import column_linears, linear_scattered

__all__ = ["overlap_collectives"]

linear = torch.ops.aten.linear.default


def overlap_collectives(traced: TracedModel, plan: Plan) -> fx.GraphModule:
    """Rewrite `traced.graph_module` in place and return it."""
    graph_module = traced.graph_module
    wanted = {name for name in plan.overlap if name in ("tp_linear", "tp_ring")}
    if not wanted:
        return graph_module
    paths = {segment.index: segment.path for segment in traced.segments if segment.kind == "layer"}
    done: dict[str, set[str]] = defaultdict(set)
    reasons: dict[str, dict[str, str]] = defaultdict(dict)
    for node in list(graph_module.graph.nodes):
        layer = paths.get(node.meta.get("segment", -1))
        if layer is None or node.target is not convert or node.kwargs.get("group") != "tp":
            continue
        if plan.checkpoint_mode(layer) == "selective-ops":
            reasons[layer] = dict.fromkeys(
                wanted, "checkpoint selective-ops keeps the output of each product by itself"
            )
            continue
        for name, outcome in _rewritten(node, wanted).items():
            if outcome is None:
                done[layer].add(name)
            else:
                reasons[layer].setdefault(name, outcome)
    drop_dead_code(graph_module.graph)
    graph_module.recompile()
    graph_module.meta["unapplied"] = tuple(
        (path, name, reasons[path].get(name, "no linear reads or makes a tensor that is communicated"))
        for path in paths.values()
        for name in sorted(wanted - done[path])
    )
    return graph_module


def _rewritten(node: fx.Node, wanted: set[str]) -> dict[str, str | None]:
    """What each wanted overlap did with a conversion: None it is applied, else why not. Nothing if it is no matter."""
    src, dst = (parse_placement(str(text)) for text in node.args[1:3])
    if CONVERSIONS[src.kind, dst.kind][1] in ("all_reduce", "reduce_scatter") and node.meta["grad"]:
        return _columns(node, src, dst, wanted)
    if CONVERSIONS[src.kind, dst.kind][0] == "reduce_scatter" and "tp_ring" in wanted:
        return {"tp_ring": _row(node, dst)}
    if CONVERSIONS[src.kind, dst.kind][0] == "all_reduce" and "tp_ring" in wanted:
        return {"tp_ring": "the stream between layers is not sharded along the sequence"}
    return {}


def _columns(node: fx.Node, src: Placement, dst: Placement, wanted: set[str]) -> dict[str, str | None]:
    readers = [user for user in node.users if user.op != "output"]
    why = _why_no_columns(node, readers)
    ring = "tp_ring" in wanted and src.is_shard and why is None
    outcome: dict[str, str | None] = {"tp_linear": why}
    if "tp_ring" in wanted:
        outcome["tp_ring"] = why if src.is_shard else "the stream between layers is not sharded along the sequence"
    if ring or ("tp_linear" in wanted and why is None):
        _fuse_columns(node, readers, src, dst, ring)
    # A gather that goes round the ring hides the reduction of its gradient too.
    return {name: reason for name, reason in outcome.items() if name in wanted}


def _why_no_columns(node: fx.Node, readers: list[fx.Node]) -> str | None:
    for reader in readers:
        if reader.target is not linear or reader.args[0] is not node:
            return f"{_short(reader)} reads what is communicated, not only linears"
        if any(not isinstance(a, fx.Node | None) or (a is not None and a.op != "get_attr") for a in reader.args[1:]):
            return f"{_short(reader)} has a weight that is computed"
    if len({reader.meta["placement"] for reader in readers}) > 1:
        return "its readers lie differently"
    return None if readers else "nothing reads it"


def _fuse_columns(node: fx.Node, readers: list[fx.Node], src: Placement, dst: Placement, ring: bool) -> None:
    graph, first = node.graph, readers[0]
    weights = tuple(reader.args[1] for reader in readers)
    biases = tuple(reader.args[2] if len(reader.args) > 2 else None for reader in readers)
    for state in (*weights, *biases):
        if isinstance(state, fx.Node):
            first.prepend(state)  # reads nothing, so it may stand anywhere
    options: dict[str, Any] = {"src": str(src), "dst": str(dst), "group": "tp", "ring": ring, "wide": False}
    with graph.inserting_before(first):
        fused = graph.call_function(column_linears, (node.args[0], weights, biases), options)
    fused.meta = dict(first.meta)
    fused.meta.pop("wants", None)
    fused.meta["key"] = f"{first.meta['key']}+{len(readers) - 1}" if len(readers) > 1 else first.meta["key"]
    if len(readers) == 1:
        first.replace_all_uses_with(fused)
        graph.erase_node(first)
        return
    fused.meta["shape"] = tuple(reader.meta["shape"] for reader in readers)
    after = fused
    for position, reader in enumerate(readers):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (fused, position))
        after.meta = {key: value for key, value in reader.meta.items() if key != "wants"}
        reader.replace_all_uses_with(after)
        graph.erase_node(reader)


def _row(node: fx.Node, dst: Placement) -> str | None:
    """A row-parallel linear and the reduce-scatter of its sum as one node; or why not."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.target is not linear:
        return f"{_short(source)} makes the sum, not a linear"
    if len(source.users) > 1:
        return "the sum has another reader"
    if dst.left != 1 or source.meta["segment"] != node.meta["segment"]:
        return "the sum is scattered elsewhere"
    with node.graph.inserting_before(node):
        options: dict[str, Any] = {"dst": str(dst), "group": "tp", "wide": False}
        fused = node.graph.call_function(linear_scattered, source.args, options)
    fused.meta = {key: value for key, value in node.meta.items() if key != "wants"}
    fused.meta["key"] = source.meta["key"]
    node.replace_all_uses_with(fused)
    node.graph.erase_node(node)
    fused.graph.erase_node(source)
    return None


def _short(node: fx.Node) -> str:
    return str(node.meta.get("key", node.name))
