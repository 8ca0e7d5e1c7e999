"""Bring a captured graph to the one form the rules know. Plan-independent; numerics stay bit-identical.

before    whatever torch.export wrote: bookkeeping ops, casts to the same dtype, slices of everything, in-place ops,
          Conv1D as view-addmm-view, rms norm as five ops
after     none of these: `linear` for Conv1D, `rms_norm` as one node, out-of-place ops, `reshape` for `view`
requires  the contract of autopar.ir
ensures   same values at every batch and sequence; no dead nodes. PassError as functionalize
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.passes.dead_code import drop_dead_code
from autopar.passes.functionalize import functionalize
from autopar.passes.rms_norm_chain import fuse_rms_norms
from autopar.runtime.losses import cross_entropy_loss

__all__ = ["canonicalize", "read_sizes_off_inputs"]

aten = torch.ops.aten


def canonicalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function":
            _drop_bookkeeping(graph, node)
    functionalize(graph)
    for node in list(graph.nodes):
        if node.target in (aten.unflatten.int, aten.flatten.using_ints):
            _as_reshape(graph, node)
    read_sizes_off_inputs(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_no_op(node):
            node.replace_all_uses_with(_first(node))
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _linear_from_addmm(graph, node)
            _loss_by_token(graph, node)
            _rename(node)
    fuse_rms_norms(graph)
    drop_dead_code(graph)
    graph_module.recompile()
    return graph_module


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


_BOOKKEEPING = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range"}


def _drop_bookkeeping(graph: fx.Graph, node: fx.Node) -> None:
    if op_name(node) in _BOOKKEEPING:
        graph.erase_node(node)


def _is_no_op(node: fx.Node) -> bool:
    """True if the op returns its first argument unchanged."""
    test = _NO_OPS.get(op_name(node))
    first = node.args[0] if node.args else None
    return test is not None and isinstance(first, fx.Node) and test(node, first)


def _same_type(node: fx.Node, x: fx.Node) -> bool:
    return bool(node.meta["dtype"] == x.meta["dtype"] and node.meta["shape"] == x.meta["shape"])


def _slices_all(node: fx.Node, x: fx.Node) -> bool:
    start, step = (node.args[2] if len(node.args) > 2 else None), (node.args[4] if len(node.args) > 4 else 1)
    end = node.args[3] if len(node.args) > 3 else None
    return bool(start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= 2**31)))


def _drops_nothing(node: fx.Node, x: fx.Node) -> bool:
    return bool(node.args[1] == 0 or node.args[2] is False)


def _neutral(value: float) -> Callable[[fx.Node, fx.Node], bool]:
    def test(node: fx.Node, x: fx.Node) -> bool:
        other = node.args[1]
        number = isinstance(other, int | float) and not isinstance(other, bool)
        return bool(number and other == value and not node.kwargs and _same_type(node, x))

    return test


_NO_OPS: dict[str, Callable[[fx.Node, fx.Node], bool]] = {
    "to": _same_type,
    "type_as": _same_type,
    "_to_copy": _same_type,
    "expand": _same_type,
    "expand_as": _same_type,
    "view": _same_type,
    "reshape": _same_type,
    "slice": _slices_all,
    "dropout": _drops_nothing,
    "add": _neutral(0),
    "mul": _neutral(1),
    "lift_fresh": lambda node, x: True,
    "alias": lambda node, x: True,
}


def _as_reshape(graph: fx.Graph, node: fx.Node) -> None:
    """Dims that are joined or taken apart, with the sizes of the others written out."""
    x = _first(node)
    rank = len(x.meta["shape"])
    if node.target is aten.unflatten.int:
        first = last = int(node.args[1]) % rank  # type: ignore[arg-type]
        middle = list(node.args[2])  # type: ignore[arg-type]
    else:
        ends = [*node.args[1:], *[0, -1][len(node.args) - 1 :]]
        first, last = (int(d) % max(rank, 1) for d in ends)  # type: ignore[arg-type]
        middle = [-1]

    def size(dim: int) -> int | fx.Node:
        known = x.meta["shape"][dim]
        if isinstance(known, int):
            return known
        with graph.inserting_before(node):
            read = graph.call_function(aten.sym_size.int, (x, dim))
        read.meta = {"size": known, "shape": None, "dtype": None, "path": node.meta.get("path", "")}
        return read

    sizes = [*map(size, range(first)), *middle, *map(size, range(last + 1, rank))]
    node.target, node.args, node.kwargs = aten.reshape.default, (x, sizes), {}


def read_sizes_off_inputs(graph: fx.Graph) -> None:
    """Read sizes of activations off the inputs they come from, compute those that follow from such sizes, and write
    down those that are numbers: no activation has to be at hand for a size."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder":
            for dim, size in enumerate(node.meta["shape"]):
                if not isinstance(size, int) and size not in known:
                    with graph.inserting_after(node):
                        known[size] = graph.call_function(aten.sym_size.int, (node, dim))
                    known[size].meta = {"size": size, "shape": None, "dtype": None, "path": ""}
        elif node.target is aten.sym_size.int and node not in known.values():
            size = node.meta.get("size")
            found = size if isinstance(size, int) else _computed(graph, size, known)
            if isinstance(found, int):
                _write_number(node, found)
            elif found is not None:
                node.replace_all_uses_with(found)
            if found is not None:
                graph.erase_node(node)


_ARITHMETIC = {sympy.Add: operator.add, sympy.Mul: operator.mul, sympy.Mod: operator.mod}


def _computed(graph: fx.Graph, size: Any, known: dict[Any, fx.Node]) -> fx.Node | None:
    """A node that gives `size`, made of sizes of inputs beside them; None if it does not follow from any."""
    if size in known:
        return known[size]
    target = _ARITHMETIC.get(getattr(size, "func", None))
    terms: tuple[Any, ...] = getattr(size, "args", ())
    if isinstance(size, sympy.floor):
        target, terms = operator.floordiv, sympy.fraction(sympy.together(size.args[0]))
    parts = [int(x) if x.is_Integer else _computed(graph, x, known) for x in terms]
    if target is None or any(part is None for part in parts):
        return None
    made, so_far = parts[0], terms[0]
    for part, expression in zip(parts[1:], terms[1:], strict=True):
        so_far = size if target is operator.floordiv else size.func(so_far, expression)
        last = next(n for n in reversed(graph.nodes) if n in known.values())
        with graph.inserting_after(last):
            made = graph.call_function(target, (made, part))
        made.meta = {"size": so_far, "shape": None, "dtype": None, "path": ""}
        known[so_far] = made
    return known[size]


def _write_number(node: fx.Node, number: int) -> None:
    """`number` in place of `node` wherever it is read."""
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: number if n is node else n)


def _rename(node: fx.Node) -> None:
    """One name for ops that say the same. A local shard need not be viewable where the global tensor was; reshape is
    view without that demand."""
    if node.target is aten.view.default:
        node.target = aten.reshape.default
    elif node.target is aten.type_as.default:
        node.target, node.args = aten.to.dtype, (node.args[0], node.meta["dtype"])


def _loss_by_token(graph: fx.Graph, node: fx.Node) -> None:
    """Cross entropy of flattened logits becomes that of [batch, seq, vocab]: the sequence keeps its dim."""
    if node.target is not aten.cross_entropy_loss.default or len(node.args) > 3 or node.kwargs.get("reduction", 1) != 1:
        return
    weight = node.args[2] if len(node.args) > 2 else node.kwargs.get("weight")
    logits, target = node.args[:2]
    assert isinstance(logits, fx.Node)
    if weight is not None or not isinstance(target, fx.Node) or target.meta["dtype"].is_floating_point:
        return
    if len(logits.meta["shape"]) > 2:
        logits = _classes_last(graph, logits, node)
    else:
        whole, labels = _unflattened(logits), _unflattened(target)
        if whole is None or labels is None or whole.meta["shape"][:-1] != labels.meta["shape"]:
            return
        logits, target = whole, labels
    options = {k: v for k, v in node.kwargs.items() if k in ("ignore_index", "label_smoothing")}
    with graph.inserting_before(node):
        loss = graph.call_function(cross_entropy_loss, (logits, target), options)
    loss.meta = {**node.meta}
    node.replace_all_uses_with(loss)
    graph.erase_node(node)


def _classes_last(graph: fx.Graph, logits: fx.Node, loss: fx.Node) -> fx.Node:
    """[batch, classes, ...], as torch wants it, with the classes moved to the end."""
    rank = len(logits.meta["shape"])
    source = logits.args[0] if op_name(logits) == "transpose" else None
    if isinstance(source, fx.Node) and rank == 3 and {d % 3 for d in logits.args[1:] if isinstance(d, int)} == {1, 2}:
        return source  # the model moved them there just before
    order = [0, *range(2, rank), 1]
    with graph.inserting_before(loss):
        moved = graph.call_function(aten.permute.default, (logits, order))
    moved.meta = {**logits.meta, "shape": tuple(logits.meta["shape"][d] for d in order)}
    return moved


def _unflattened(node: Any) -> fx.Node | None:
    """What a reshape made flat, if it joined [batch, seq] and nothing else."""
    source = node.args[0] if isinstance(node, fx.Node) and op_name(node) in ("reshape", "view", "flatten") else None
    if not isinstance(source, fx.Node):
        return None
    kept = len(node.meta["shape"]) - 1
    same = not kept or source.meta["shape"][-kept:] == node.meta["shape"][-kept:]
    return source if same and len(source.meta["shape"]) == kept + 2 else None


def _linear_from_addmm(graph: fx.Graph, node: fx.Node) -> None:
    """`view(addmm(b, view(x, [-1, k]), W), [..., n])` is `linear(x, W.t(), b)` without flattening the sequence."""
    if node.target is not aten.addmm.default or node.kwargs or len(node.users) != 1:
        return
    bias, flat, weight = node.args
    after = next(iter(node.users))
    if not (isinstance(flat, fx.Node) and op_name(flat) in ("view", "reshape")):
        return
    x = _first(flat)
    wanted = (*x.meta["shape"][:-1], node.meta["shape"][-1])
    if op_name(after) not in ("view", "reshape") or after.meta["shape"] != wanted:
        return
    if flat.meta["shape"][-1] != x.meta["shape"][-1]:
        return
    assert isinstance(weight, fx.Node)
    assert isinstance(bias, fx.Node)
    with graph.inserting_before(after):
        transposed = graph.call_function(aten.t.default, (weight,))
        transposed.meta = {**node.meta, "shape": tuple(reversed(weight.meta["shape"])), "dtype": weight.meta["dtype"]}
        linear = graph.call_function(aten.linear.default, (x, transposed, bias))
        linear.meta = {**node.meta, "shape": wanted}
    after.replace_all_uses_with(linear)
    graph.erase_node(after)
    graph.erase_node(node)
