"""What prices and memory need to know about single ops: which only re-view, which multiply matrices, element sizes.

Names are those of `autopar.blocks.op_name`: ATen names, or the name of a function of `autopar.runtime.functional`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.graph_walks import repeated_for_attention
from autopar.ir import Shape

__all__ = ["ATTENTION", "MATMULS", "ElementSizes", "contracted", "is_view", "matmul_flops", "numel", "storage_root"]

MATMULS = frozenset({"linear", "mm", "bmm", "matmul", "addmm", "baddbmm"})
ATTENTION = frozenset({"scaled_dot_product_attention"})

_VIEWS = frozenset(
    {"view", "reshape", "_unsafe_view", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "expand_as",
     "view_as", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "detach", "alias",
     "flatten", "unflatten", "narrow", "unsafe_split"}
)  # fmt: skip
_NO_KERNEL = frozenset({"sym_size", "_assert_tensor_metadata", "sym_numel", "size"})
_CASTS = frozenset({"to", "_to_copy", "type_as"})


@dataclass(frozen=True)
class ElementSizes:
    """Bytes per element when a model captured in `captured` runs in `activation` dtype (a mixed-precision plan)."""

    captured: torch.dtype
    activation: torch.dtype

    def of(self, dtype: torch.dtype | None) -> int:
        """Bytes of one element; 0 for a node that is no tensor."""
        if dtype is None:
            return 0
        return (self.activation if dtype == self.captured else dtype).itemsize


def numel(shape: Shape | None) -> sympy.Expr:
    """Elements of a shape (of all parts of a multi-output node), symbolic in batch and sequence; 0 for a non-tensor."""
    if shape is None:
        return sympy.Integer(0)
    if shape and isinstance(shape[0], tuple):
        return sympy.Add(*(numel(cast(Shape, part)) for part in shape))
    return sympy.Mul(*(sympy.sympify(dim) for dim in shape))


def is_view(node: fx.Node) -> bool:
    """True if the op launches no kernel: its output is its first input's storage, or no tensor at all."""
    name = op_name(node)
    if name in _NO_KERNEL:
        return True
    if not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0]
    if name in _CASTS:
        return bool(source.meta.get("dtype") == node.meta.get("dtype"))
    if name == "contiguous":
        return op_name(source) not in ("transpose", "permute", "expand", "t")
    if name in ("reshape", "flatten"):  # copies only what an expand repeated, and not for attention
        if repeated_for_attention(node) is not None:
            return True
        return not (_expanded(source) and numel(node.meta["shape"]) != numel(_root(source).meta["shape"]))
    return name in _VIEWS


def storage_root(node: fx.Node) -> fx.Node:
    """The node whose kernel made the storage that `node` is a view of."""
    return _root(node)


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _expanded(node: fx.Node) -> bool:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        if op_name(node) == "expand":
            return True
        node = node.all_input_nodes[0]
    return False


def matmul_flops(node: fx.Node) -> sympy.Expr:
    """Forward flops of a matrix multiplication: 2 x output elements x contracted length."""
    return 2 * numel(node.meta["shape"]) * contracted(node)


def contracted(node: fx.Node) -> sympy.Expr:
    """The length that a matrix multiplication sums over."""
    first = node.args[1] if op_name(node) in ("addmm", "baddbmm") else node.args[0]
    assert isinstance(first, fx.Node), f"{node}: no matrix operand"
    return sympy.sympify(first.meta["shape"][-1])
