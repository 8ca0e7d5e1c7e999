"""Replace in-place ops by out-of-place ones. Plan-independent.

before    capture keeps `x.add_(y)`, `x[:, 1:] = y` (slice, copy_) as the model wrote them
after     `x1 = add(x, y)`; `x1 = slice_scatter(x, copy(slice(x), y))`; later readers of x read x1. A buffer of the
          model is stored at the end, see buffer_updates
requires  the contract of autopar.ir
ensures   no op changes its arguments, so passes may reorder, duplicate and cut. PassError if a tensor that is changed
          stays visible under another name that is read later
"""

from __future__ import annotations

from torch import _ops, fx, ops

from autopar.blocks import op_name
from autopar.errors import PassError
from autopar.passes.buffer_updates import store_updates

__all__ = ["functionalize"]

# The result of these may share memory with their first argument, so that an in-place op on one shows in the other.
_VIEWS = {
    "view", "reshape", "slice", "select", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "split",
    "chunk", "unflatten", "flatten", "detach", "contiguous", "to", "type_as", "alias", "unbind", "narrow",
    "view_as",
}  # fmt: skip


def _is_view(node: fx.Node) -> bool:
    """True if the result may share memory with the first argument; an item of a tuple if the op behind it does so."""
    if op_name(node) == "getitem":
        source = node.args[0]
        return isinstance(source, fx.Node) and source.op == "call_function" and op_name(source) in _VIEWS
    return node.op == "call_function" and op_name(node) in _VIEWS


def functionalize(graph: fx.Graph) -> None:
    """Rewrite `graph` in place."""
    buffers: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and _changes_first_argument(node):
            _replace(graph, node, buffers)
    store_updates(graph, buffers)


def _changes_first_argument(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, _ops.OpOverload) and target._schema.is_mutable and op_name(node).endswith("_")


def _replace(graph: fx.Graph, node: fx.Node, buffers: dict[fx.Node, fx.Node]) -> None:
    """Make `node` out of place; a buffer it changes is noted in `buffers` with its new value."""
    name = op_name(node)
    packet = getattr(ops.aten, name[:-1], None)
    changed = node.args[0]
    assert isinstance(node.target, _ops.OpOverload)
    assert isinstance(changed, fx.Node)
    if packet is None or not hasattr(packet, node.target._overloadname):
        raise _refusal(node, "has no out-of-place form")
    node.target = getattr(packet, node.target._overloadname)
    if name == "copy_" and node.meta.get("grad", True):
        _widen(graph, node)
    value, after = node, node
    if name == "detach_":  # changes no value, so what was read before stays as it is
        for user in [u for u in changed.users if node < u]:
            user.replace_input_with(changed, node)
        return
    _redirect(changed, value, after)
    while _is_view(changed):
        parent = changed.args[0]
        assert isinstance(parent, fx.Node)
        with graph.inserting_after(after):
            value = _write_back(graph, node, parent, changed, value)
        after = value
        _redirect(parent, value, after)
        changed = parent
    root = next((b for b, v in buffers.items() if v is changed), changed)  # changed before: its value stands for it
    if root.op == "get_attr" and not root.meta["grad"]:
        buffers[root] = value
    elif changed.op != "call_function":
        raise _refusal(node, "changes an input or a parameter of the model")


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    """`copy` has no derivative: what is copied becomes the value, in the shape and dtype of what it is copied to."""
    changed, source = node.args[:2]
    if not isinstance(source, fx.Node) or not isinstance(changed, fx.Node):
        return
    if source.meta["dtype"] != changed.meta["dtype"]:
        with graph.inserting_before(node):
            source = graph.call_function(ops.aten.to.dtype, (source, changed.meta["dtype"]))
            source.meta = {**node.meta, "shape": node.args[1].meta["shape"]}  # type: ignore[union-attr]
    node.target, node.args = ops.aten.expand_as.default, (source, changed)


def _write_back(graph: fx.Graph, node: fx.Node, parent: fx.Node, view: fx.Node, value: fx.Node) -> fx.Node:
    """The parent tensor with `value` in the place its `view` showed."""
    if op_name(view) == "slice":
        result = graph.call_function(ops.aten.slice_scatter.default, (parent, value, *view.args[1:]))
    elif op_name(view) == "select":
        result = graph.call_function(ops.aten.select_scatter.default, (parent, value, *view.args[1:]))
    else:
        raise _refusal(node, f"changes a tensor through a {op_name(view)} view of it")
    result.meta = {**parent.meta, "path": node.meta["path"]}
    return result


def _redirect(old: fx.Node, new: fx.Node, after: fx.Node) -> None:
    """Readers of `old` later than `after` read `new`; refuse if a view of `old` taken before is read later."""
    order = {n: i for i, n in enumerate(old.graph.nodes)}
    for user in list(old.users):
        if order[user] > order[after]:
            user.replace_input_with(old, new)
        elif _is_view(user) and any(order[u] > order[after] and u is not new for u in user.users):
            raise _refusal(after, "changes a tensor of which a view taken before is read later")


def _refusal(node: fx.Node, reason: str) -> PassError:
    name = op_name(node)
    return PassError(
        f"in-place {name} {reason}",
        where=f"functionalize: {node.meta.get('path') or 'model'}",
        try_="write the out-of-place form in forward",
    )
