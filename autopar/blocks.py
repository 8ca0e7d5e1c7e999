"""Annotate a captured graph: module paths, plan keys, gradient flow, and its cut into layers and glue.

Two layers (see autopar.layers) are of one class if their nodes are the same ops on the same shapes with the same
wiring; prices and strategies are then computed once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.ir import ParameterSpec, Segment
from autopar.layers import Layer, layers_of

__all__ = ["annotate", "op_name"]

# Outputs of these carry no gradient although they may be floating point.
_NO_GRADIENT = {
    "detach", "zeros_like", "ones_like", "full_like", "new_ones", "new_zeros", "new_full", "argmax", "bernoulli",
}  # fmt: skip


def annotate(graph: fx.Graph, parameters: Mapping[str, ParameterSpec]) -> tuple[Segment, ...]:
    """Set `meta["grad"]`, `["segment"]` and `["key"]` of every node from its path; return the segments in order.

    Requires `meta["path"]`, `["shape"]`, `["dtype"]` (see autopar.ir).
    """
    _mark_gradient_flow(graph, parameters)
    _name_ops(graph)
    return _cut(graph, parameters)


def op_name(node: fx.Node) -> str:
    """Short op name: `linear` for `aten.linear.default`, `library.linear` for one of another library, the function's
    name for a function."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _overload_name(target)
    return getattr(target, "__name__", str(target))


@cache
def _overload_name(target: torch._ops.OpOverload) -> str:
    """A search asks for millions of names, and a schema is slow to read."""
    library, _, name = target._schema.name.partition("::")
    return str(name if library in ("aten", "prim") else f"{library}.{name}")


def _mark_gradient_flow(graph: fx.Graph, parameters: Mapping[str, ParameterSpec]) -> None:
    for node in graph.nodes:
        if node.op == "get_attr":
            spec = parameters.get(str(node.target))
            node.meta["grad"] = spec is not None and spec.requires_grad
        elif node.op == "call_function":
            dtype = node.meta.get("dtype")
            differentiable = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
            flows = differentiable and op_name(node) not in _NO_GRADIENT
            node.meta["grad"] = flows and any(n.meta.get("grad", False) for n in node.all_input_nodes)
        else:
            node.meta["grad"] = False


def _name_ops(graph: fx.Graph) -> None:
    ordinal: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function":
            base = f"{node.meta['path']}::{op_name(node)}"
            node.meta["key"] = f"{base}#{ordinal[base]}"
            ordinal[base] += 1


def _cut(graph: fx.Graph, parameters: Mapping[str, ParameterSpec]) -> tuple[Segment, ...]:
    """Assign every node to a segment by its path, glue by its position in the order of execution."""
    ops = [n for n in graph.nodes if n.op == "call_function"]
    members = layers_of(ops)
    ahead = _following(members)
    last_use = {layer.path: i for i, layer in enumerate(members) if layer is not None}
    family = {layer.path: layer.family for layer in members if layer is not None}
    plan: list[tuple[str, str]] = []  # (kind, path) of each segment
    here = ("glue", "prologue")
    for position, (node, layer) in enumerate(zip(ops, members, strict=True)):
        if node.meta["dtype"] is None and (not plan or plan[0][0] == "glue"):
            # A size is used wherever it is needed, so it belongs to no layer: every stage computes it for itself.
            plan = plan or [("glue", "prologue")]
            node.meta["segment"] = 0
            continue
        unfinished = here[0] == "layer" and last_use[here[1]] > position
        here = _next_segment(here, layer, ahead[position], unfinished, family)
        if not plan or plan[-1] != here:
            plan.append(here)
        node.meta["segment"] = len(plan) - 1
    for node in graph.nodes:
        if node.op != "call_function":
            users = [u.meta["segment"] for u in node.users if "segment" in u.meta]
            node.meta["segment"] = min(users, default=0) if node.op != "output" else max(len(plan) - 1, 0)
    nodes: list[list[fx.Node]] = [[] for _ in plan]
    for node in ops:
        nodes[node.meta["segment"]].append(node)
    return tuple(
        Segment(i, kind, path, _structure(nodes[i]), _parameters_of(nodes[i], parameters))
        for i, (kind, path) in enumerate(plan)
    )


def _following(members: list[Layer | None]) -> list[Layer | None]:
    """For each position the first layer at or after it."""
    ahead: list[Layer | None] = []
    layer: Layer | None = None
    for member in reversed(members):
        layer = member or layer
        ahead.append(layer)
    return ahead[::-1]


def _next_segment(
    here: tuple[str, str], layer: Layer | None, ahead: Layer | None, unfinished: bool, family: Mapping[str, str]
) -> tuple[str, str]:
    """Segment of the next node. Glue between two layers of one family goes with the layer before it."""
    if layer is not None:
        return ("layer", layer.path)
    if here[0] == "glue" or unfinished:
        return here
    if ahead is None:
        return ("glue", "epilogue")
    return here if ahead.family == family[here[1]] else ("glue", f"before {ahead.family}")


def _parameters_of(nodes: Iterable[fx.Node], parameters: Mapping[str, ParameterSpec]) -> tuple[str, ...]:
    used = dict.fromkeys(
        str(source.target)
        for node in nodes
        for source in node.all_input_nodes
        if source.op == "get_attr" and source.target in parameters
    )
    return tuple(used)


def _structure(nodes: Iterable[fx.Node]) -> str:
    """Hash of ops, constants, shapes and wiring; equal for layers that differ only in which weights they hold."""
    local: dict[fx.Node, str] = {}
    outside: dict[fx.Node, str] = {}

    def refer(node: fx.Node) -> str:
        if node in local:
            return local[node]
        if node not in outside:
            what = "param" if node.op == "get_attr" else "input"
            kind = (node.meta.get("shape"), node.meta.get("dtype"), node.meta["grad"])
            outside[node] = f"{what}{len(outside)}:{kind}"
        return outside[node]

    lines = []
    for node in nodes:
        arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: _Reference(refer(n)))  # type: ignore[arg-type, return-value]
        target = node.target if isinstance(node.target, torch._ops.OpOverload) else op_name(node)  # no addresses
        lines.append(f"{target} {arguments} {node.meta.get('shape')} {node.meta.get('dtype')}")
        local[node] = f"n{len(local)}"
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


class _Reference:
    """Prints as its text inside fx's nested argument containers."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def __repr__(self) -> str:
        return str(self.text)
