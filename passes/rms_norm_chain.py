"""Recognise the rms norm written as pow, mean, add, rsqrt, mul (and casts), and make it one `rms_norm` node.

As five ops the chain offers the sharding ILP placements inside the norm that make sense to nobody, and costs a kernel
and a saved tensor each; as one node it is an op like layer_norm. The function repeats the chain op for op.
"""

from __future__ import annotations

from torch import fx

from autopar.blocks import op_name
from autopar.runtime.functional import rms_norm

__all__ = ["fuse_rms_norms"]


def fuse_rms_norms(graph: fx.Graph) -> None:
    """Replace every chain `weight * (x * rsqrt(mean(x^2) + eps))` in `graph`, in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and op_name(node) == "rsqrt":
            _fuse(graph, node)


def _fuse(graph: fx.Graph, rsqrt: fx.Node) -> None:
    found = _statistics(rsqrt)
    if found is None or len(rsqrt.users) != 1:
        return
    wide, eps = found
    normed = next(iter(rsqrt.users))
    if op_name(normed) != "mul" or set(normed.args) != {wide, rsqrt} or normed.kwargs:
        return
    x = _before_cast(wide)
    scaled = _scale(normed, x)
    if scaled is None:
        return
    last, weight, unit_offset = scaled
    compute_dtype = wide.meta["dtype"] if wide.meta["dtype"] != x.meta["dtype"] else None
    with graph.inserting_before(last):
        node = graph.call_function(
            rms_norm, (x, weight, eps), {"compute_dtype": compute_dtype, "unit_offset": unit_offset}
        )
    node.meta = {**last.meta}
    last.replace_all_uses_with(node)


def _statistics(rsqrt: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, eps) if `rsqrt` is rsqrt(mean(x^2, -1, keepdim) + eps)."""
    add = rsqrt.args[0]
    if not (isinstance(add, fx.Node) and op_name(add) == "add" and isinstance(add.args[1], float)):
        return None
    mean = add.args[0]
    if not (isinstance(mean, fx.Node) and op_name(mean) == "mean" and list(mean.args[1:]) == [[-1], True]):
        return None
    square = mean.args[0]
    if not (isinstance(square, fx.Node) and op_name(square) == "pow" and square.args[1] == 2):
        return None
    wide = square.args[0]
    return (wide, add.args[1]) if isinstance(wide, fx.Node) else None


def _before_cast(wide: fx.Node) -> fx.Node:
    """What was cast up to the dtype of the statistics, or the tensor itself."""
    if wide.op == "call_function" and op_name(wide) in ("to", "_to_copy"):
        source = wide.args[0]
        assert isinstance(source, fx.Node)
        return source
    return wide


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _scale(normed: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """(last node of the chain, weight, unit_offset) for what multiplies the normed tensor."""
    after = _only_user(normed)
    if after is None:
        return None
    if op_name(after) in ("to", "type_as", "_to_copy"):
        return _plain_scale(after, x)
    plain = _plain_scale(normed, x)
    return plain or _unit_offset_scale(normed, after, x)


def _plain_scale(normed: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    if normed.meta["dtype"] != x.meta["dtype"]:
        return None
    after = _only_user(normed)
    if after is None or op_name(after) != "mul" or after.kwargs:
        return None
    weight = next((a for a in after.args if a is not normed), None)
    if isinstance(weight, fx.Node) and weight.op == "get_attr":
        return after, weight, False
    return None


def _unit_offset_scale(normed: fx.Node, after: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Gemma: `(normed * (1.0 + weight.to(compute dtype))).to(x.dtype)`."""
    if op_name(after) != "mul":
        return None
    factor = next((a for a in after.args if a is not normed), None)
    if not (isinstance(factor, fx.Node) and op_name(factor) == "add" and factor.args[1] == 1.0):
        return None
    weight = factor.args[0]
    if isinstance(weight, fx.Node) and op_name(weight) in ("to", "_to_copy"):
        weight = weight.args[0]
    if not (isinstance(weight, fx.Node) and weight.op == "get_attr"):
        return None
    if after.meta["dtype"] == x.meta["dtype"]:
        return after, weight, True
    cast = _only_user(after)
    if cast is not None and op_name(cast) in ("to", "type_as") and cast.meta["dtype"] == x.meta["dtype"]:
        return cast, weight, True
    return None
