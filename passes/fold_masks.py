"""Fold attention masks that are constant. Plan-independent.

before    scaled_dot_product_attention reads a mask tensor that capture materialised from the sequence length alone
after     a mask that is exactly causal is `is_causal=True`, one that hides nothing is no mask; others stay
requires  canonicalize
ensures   same values; the flash kernel becomes available and no [batch, 1, seq, seq] tensor is built

The proof is numeric: the mask is computed at a few lengths. That is sound only where every length behaves alike, so the
probe has to exceed every number the mask's ops mention (a sliding window of 4096 looks causal at any length below it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.ir import InputSpec
from autopar.passes.dead_code import drop_dead_code, is_update

__all__ = ["fold_masks"]

_LONGEST_PROBE = 4100
_BATCH_PROBE = 2
# These read the shape of a tensor, not its values.
_SHAPE_ONLY = {"sym_size", "zeros_like", "ones_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full"}


def fold_masks(graph_module: fx.GraphModule, inputs: tuple[InputSpec, ...]) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    verdicts: dict[fx.Node, str] = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or op_name(node) != "scaled_dot_product_attention":
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in verdicts:
            verdicts[mask] = _classify(graph_module, mask, inputs)
        if verdicts[mask] != "keep":
            _set_mask(node, causal=verdicts[mask] == "causal")
    drop_dead_code(graph_module.graph)
    graph_module.recompile()
    return graph_module


def _set_mask(node: fx.Node, *, causal: bool) -> None:
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    options = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p", "is_causal")}
    node.args = (*node.args[:3], None, dropout, causal)
    node.kwargs = options


def _classify(graph_module: fx.GraphModule, mask: fx.Node, inputs: tuple[InputSpec, ...]) -> str:
    """ "causal", "open" (hides nothing) or "keep"."""
    order = _ancestors(graph_module, mask)
    longest = _longest_literal(order)
    if order is None or longest is None or longest + 3 > _LONGEST_PROBE:
        return "keep"
    seen = {_verdict(_evaluate(graph_module, order, mask, inputs, length)) for length in (5, max(longest + 3, 9))}
    return seen.pop() if len(seen) == 1 else "keep"


def _ancestors(graph_module: fx.GraphModule, mask: fx.Node) -> list[fx.Node] | None:
    """Everything `mask` is computed from, in order; None if that includes parameters or values of an input."""
    if mask.op == "placeholder":
        return None
    wanted: set[fx.Node] = set()
    stack = [mask]
    while stack:
        node = stack.pop()
        if node in wanted:
            continue
        wanted.add(node)
        if node.op == "get_attr" and _may_change(graph_module, node):
            return None
        reads_values = node.op == "call_function" and op_name(node) not in _SHAPE_ONLY
        for source in node.all_input_nodes:
            if source.op == "placeholder" and reads_values:
                return None
            stack.append(source)
    return [n for n in mask.graph.nodes if n in wanted]


def _may_change(graph_module: fx.GraphModule, state: fx.Node) -> bool:
    """Whether a step or a checkpoint may give a tensor other values: parameters, frozen ones too, and buffers that
    forward writes."""
    value = _attribute(graph_module, str(state.target))
    return isinstance(value, torch.nn.Parameter) or any(is_update(user) for user in state.users)


def _longest_literal(order: list[fx.Node] | None) -> int | None:
    """Largest length-like number in the ops: integers below 2^31 and sizes of buffers; floats only as fill values."""
    longest = 1
    for node in order or ():
        if node.op == "get_attr":
            longest = max([longest, *node.meta["shape"]])

        def visit(value: Any) -> Any:
            nonlocal longest
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31:
                longest = max(longest, abs(value))
            return value

        fx.node.map_aggregate((node.args, node.kwargs), visit)
    return longest


def _evaluate(
    graph_module: fx.GraphModule, order: list[fx.Node], mask: fx.Node, inputs: tuple[InputSpec, ...], length: int
) -> torch.Tensor | None:
    specs = {spec.name: spec for spec in inputs}
    values: dict[fx.Node, Any] = {}
    for node in order:
        if node.op == "placeholder":
            spec = specs[str(node.target)]
            sizes = [_size(d, i, spec, length) for i, d in enumerate(spec.shape)]
            values[node] = torch.zeros(sizes, dtype=spec.dtype)
        elif node.op == "get_attr":
            values[node] = _attribute(graph_module, str(node.target))
            if values[node].is_meta:
                return None
        else:
            assert callable(node.target)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    result = values[mask]
    return result if isinstance(result, torch.Tensor) else None


def _size(dim: Any, index: int, spec: InputSpec, length: int) -> int:
    if index == spec.batch_dim:
        return _BATCH_PROBE
    return int(dim) if isinstance(dim, int) else length


def _attribute(graph_module: fx.GraphModule, target: str) -> Any:
    value: Any = graph_module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _verdict(mask: torch.Tensor | None) -> str:
    if mask is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return "keep"
    if mask.dtype == torch.bool:
        open_ = mask
    else:
        open_ = mask == 0
        closed = mask[~open_]
        if closed.numel() and float(closed.max()) > torch.finfo(mask.dtype).min / 2:
            return "keep"
    if bool(open_.all()):
        return "open"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if bool((open_ == causal).all()) else "keep"
