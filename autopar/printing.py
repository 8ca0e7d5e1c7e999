"""A stable text form of a graph, for golden tests and for printing what a pass changed.

One line a node: `%linear_1 [batch, seq, 64] S(2) = linear(%rms_norm, model.layers.0.up_proj.weight)`. Names count ops
by kind in order of execution, so they do not depend on how the graph was built or on the torch release.
"""

from __future__ import annotations

import difflib
from collections import Counter
from typing import Any

from torch import fx

from autopar.blocks import op_name

__all__ = ["diff_graphs", "format_graph"]


def format_graph(graph: fx.Graph) -> str:
    """The whole graph, one line a node; state that is only read appears by its name where it is used."""
    names = _names(graph)
    lines = []
    for node in graph.nodes:
        if node.op == "get_attr":
            continue
        if node.op == "output":
            lines.append(f"return {_format(node.args[0], names)}")
            continue
        head = f"{names[node]}{_type(node)}"
        if node.op == "placeholder":
            lines.append(f"{head} = input")
        else:
            arguments = [_format(a, names) for a in node.args]
            arguments += [f"{k}={_format(v, names)}" for k, v in sorted(node.kwargs.items()) if k != "pin_memory"]
            callee = op_name(node) if node.op == "call_function" else str(node.target)
            lines.append(f"{head} = {callee}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def diff_graphs(before: str, after: str, name: str) -> str:
    """Unified diff of two `format_graph` texts; empty if a pass changed nothing."""
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), "before", name, lineterm="", n=1))


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    count: Counter[str] = Counter()
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            names[node] = str(node.target)
            placement = node.meta.get("placement")
            if placement is not None and placement.is_shard:
                names[node] += f":{placement}"
            continue
        base = str(node.target) if node.op in ("placeholder", "call_module") else op_name(node)
        names[node] = f"%{base}" if not count[base] else f"%{base}_{count[base]}"
        count[base] += 1
    return names


def _type(node: fx.Node) -> str:
    shape, placement = node.meta.get("shape"), node.meta.get("placement")
    text = f" [{', '.join(map(str, shape))}]" if isinstance(shape, tuple) else ""
    return text + (f" {placement}" if placement is not None else "")


def _format(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format(v, names) for v in value)}]"
    return str(value)
