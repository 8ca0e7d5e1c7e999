"""Questions about a captured graph that search, passes and runtime all ask."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sympy
from torch import fx

from autopar.blocks import op_name
from autopar.ir import Dim, Segment, Shape
from autopar.plan import Plan

__all__ = [
    "alike",
    "ancestors",
    "before_repeat",
    "has_no_mask",
    "holds",
    "input_only",
    "joined_apart",
    "output_node",
    "outputs_of",
    "repeated_for_attention",
    "shapes_of",
    "stage_of_segments",
]

ATTENTION = "scaled_dot_product_attention"


def output_node(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return output


def outputs_of(graph: fx.Graph) -> Sequence[Any]:
    """What the graph returns, in order: nodes, or plain values."""
    found: Any = output_node(graph).args[0]
    return tuple(found)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and all they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def alike(nodes: Sequence[fx.Node], twins: Sequence[fx.Node]) -> bool:
    """Whether these ops, in order, are the same ones wired alike. Layers of one class are no more where a pass put
    something into one of them."""
    if len(nodes) != len(twins):
        return False
    twin_of: dict[fx.Node, fx.Node] = dict(zip(nodes, twins, strict=True))
    inside = set(twins)
    for node, twin in twin_of.items():
        sources, others = node.all_input_nodes, twin.all_input_nodes
        if op_name(node) != op_name(twin) or node.meta["shape"] != twin.meta["shape"] or len(sources) != len(others):
            return False
        if any(
            twin_of.get(a, b) is not b or (a not in twin_of and b in inside)
            for a, b in zip(sources, others, strict=True)
        ):
            return False
    return True


def input_only(graph: fx.Graph) -> set[fx.Node]:
    """Nodes computed from model inputs and buffers alone, without gradient: cheaper to repeat than to send."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        # get_attr and placeholder nodes have no inputs
        may_repeat = node.op in ("placeholder", "get_attr", "call_function") and not node.meta["grad"]
        if may_repeat and all(s in free for s in node.all_input_nodes):
            free.add(node)
    return free


def joined_apart(nodes: Iterable[fx.Node], received: Collection[fx.Node]) -> fx.Node | None:
    """The first of `nodes`, in order, that several trained parameters reach before they meet anything that depends on
    `received`, and whose gradient comes back along several paths; None if there is none."""
    dependent, read = set(received), dict[fx.Node, frozenset[fx.Node]]()
    for node in nodes:
        if node in dependent or not node.meta.get("grad"):
            continue
        if any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
            continue
        own = frozenset([node]) if node.op == "get_attr" else frozenset()
        read[node] = own.union(*(read.get(source, frozenset()) for source in node.all_input_nodes))
        if len(read[node]) > 1 and len(node.users) > 1:
            return node
    return None


def shapes_of(node: fx.Node) -> list[Shape]:
    """The shape of every tensor that `node` gives; none for a number."""
    shape = node.meta.get("shape")
    if shape is None:
        return []
    return list(shape) if shape and isinstance(shape[0], tuple) else [shape]


def before_repeat(repeated: object) -> fx.Node | None:
    """x [b, kv, s, d] if `repeated` is reshape(expand(unsqueeze(x, 2))) with every head repeated in place."""
    merged = repeated if isinstance(repeated, fx.Node) and op_name(repeated) in ("reshape", "view") else None
    widened = merged.args[0] if merged is not None else None
    if not (isinstance(widened, fx.Node) and op_name(widened) == "expand" and len(widened.meta["shape"]) == 5):
        return None
    opened = widened.args[0]
    if not (isinstance(opened, fx.Node) and op_name(opened) == "unsqueeze" and opened.args[1] == 2):
        return None
    x = opened.args[0]
    assert isinstance(x, fx.Node)
    b, heads, times, s, d = widened.meta["shape"]
    same = (
        x.meta["shape"] == (b, heads, s, d) and merged is not None and merged.meta["shape"] == (b, heads * times, s, d)
    )
    return x if same else None


def repeated_for_attention(node: fx.Node) -> fx.Node | None:
    """`before_repeat` of keys or values that only attention without a mask reads: its kernels repeat heads themselves
    (passes/native_gqa.py), so that nothing is copied."""
    if not node.users or not all(op_name(u) == ATTENTION and has_no_mask(u) for u in node.users):
        return None
    return before_repeat(node)


def has_no_mask(attention: fx.Node) -> bool:
    """Whether an attention is given no mask."""
    return (attention.args[3] if len(attention.args) > 3 else attention.kwargs.get("attn_mask")) is None


def holds(size: Dim, symbol: sympy.Symbol) -> bool:
    """Whether `symbol` is part of a size, alone or as a factor."""
    return symbol in getattr(size, "free_symbols", ())


def stage_of_segments(segments: Sequence[Segment], plan: Plan) -> list[int]:
    """Stage of every segment, by its index. Glue goes with the layer after it, the epilogue with the last stage."""
    stage_of_layer = {path: i for i, stage in enumerate(plan.layer_paths()) for path in stage}
    result, following = [], len(plan.stages) - 1
    for segment in reversed(segments):
        following = stage_of_layer.get(segment.path, following) if segment.kind == "layer" else following
        result.append(following)
    result.reverse()
    if result and segments[0].kind == "glue":
        result[0] = 0
    return result
