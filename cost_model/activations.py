"""Bytes that autograd keeps for the backward pass, read off the graph.

Rules (checked against `torch.autograd.graph.saved_tensors_hooks`): an op keeps tensors only if its output needs grad;
one storage per alias class counts once; parameters are held anyway and do not count. A converted input (gathered,
reduced) is a storage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.op_facts import ATTENTION, MATMULS, ElementSizes, is_view, numel, storage_root
from autopar.placement import Placement

__all__ = ["KeptTensor", "kept_tensors", "local_bytes"]

_KEEP_INPUT = frozenset(
    {"pow", "silu", "gelu", "relu6", "cos", "sin", "log", "abs", "square", "softplus", "elu", "leaky_relu", "hardtanh",
     "clamp"}
)  # fmt: skip
_KEEP_OUTPUT = frozenset(
    {"rsqrt", "sqrt", "tanh", "exp", "sigmoid", "relu", "softmax", "_softmax", "log_softmax", "reciprocal"}
)
_KEEP_OTHER = MATMULS | {"mul", "div", "_grouped_mm", "transformers.grouped_mm_fallback"}


@dataclass(frozen=True)
class KeptTensor:
    """A tensor kept by `keeper`. `slot` is the input slot of the keeper it came in by, None if the keeper made it.

    `root` is the node whose storage it is; `elements` and `element_bytes` describe that storage at global shape.
    """

    keeper: fx.Node
    slot: int | None
    root: fx.Node
    elements: sympy.Expr
    element_bytes: int
    tag: str = ""


def kept_tensors(nodes: list[fx.Node], sizes: ElementSizes, *, fused: bool = False) -> list[KeptTensor]:
    """Everything kept by the given nodes; storages may repeat (see `local_bytes`).

    fused: norms and gated activations are kernels of their own (Transformer Engine) that keep their inputs and
    recompute the rest; rotary keeps nothing that grows with the batch.
    """
    rule = _kept_fused if fused else _kept
    return [kept for node in nodes if node.meta.get("grad") for kept in rule(node, sizes)]


def _kept_fused(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    if op_name(node) == "rms_norm":
        x = node.all_input_nodes[0]
        return [_input(node, x, sizes), _own(node, _rows(x), 4, "1/rms")]
    kept = _kept(node, sizes)
    if op_name(node) == "mul":
        kept = [k for k in kept if op_name(k.root) not in _KEEP_INPUT and len(k.root.meta["shape"]) > 2]
        if any(op_name(n) == "cat" or op_name(n) == "cos" for n in node.all_input_nodes):
            return []
    return kept


def _kept(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    name = op_name(node)
    if is_view(node):
        return []
    if name in _KEEP_OTHER:
        return _other_operands(node, sizes)
    if name in _KEEP_INPUT:
        return [_input(node, node.all_input_nodes[0], sizes)]
    if name in _KEEP_OUTPUT:
        return [_own(node, numel(node.meta["shape"]), sizes.of(node.meta["dtype"]), "")]
    rule = _RULES.get(name)
    return rule(node, sizes) if rule is not None else []


def _other_operands(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    """Each factor of a product if the other needs grad; a bias is no factor, and a number keeps nothing."""
    name = op_name(node)
    operands = [n for n in node.all_input_nodes if n.meta.get("dtype") is not None]
    bias = operands[0] if name in ("addmm", "baddbmm") else operands[2] if len(operands) > 2 else None
    pair = [n for n in operands if n is not bias]
    if len(pair) == 1:
        return [_input(node, pair[0], sizes)] if _repeated(node, pair[0]) else []
    a, b = pair[:2]
    kept = [_input(node, a, sizes)] if b.meta.get("grad") else []
    return kept + ([_input(node, b, sizes)] if a.meta.get("grad") else [])


def _layer_norm(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    x = node.all_input_nodes[0]
    return [_input(node, x, sizes), _own(node, 2 * _rows(x), max(4, sizes.activation.itemsize), "mean, rstd")]


def _embedding(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    indices = next(n for n in node.all_input_nodes if n.meta["dtype"] in (torch.int64, torch.int32))
    return [_input(node, indices, sizes)]


def _dropout(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    chance = node.args[1] if len(node.args) > 1 else 0.0
    return [_own(node, numel(node.meta["shape"]), 1, "mask")] if chance else []


def _mask(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    slot = 1 if op_name(node) == "masked_fill" else 0
    return [_input(node, node.all_input_nodes[slot], sizes)] if len(node.all_input_nodes) > slot else []


def _input(node: fx.Node, source: fx.Node, sizes: ElementSizes) -> KeptTensor:
    root = storage_root(source)
    return KeptTensor(
        node, node.all_input_nodes.index(source), root, numel(root.meta["shape"]), sizes.of(root.meta["dtype"])
    )


def _own(node: fx.Node, elements: sympy.Expr, element_bytes: int, tag: str) -> KeptTensor:
    return KeptTensor(node, None, node, elements, element_bytes, tag)


def _repeated(node: fx.Node, operand: fx.Node) -> bool:
    return sum(argument is operand for argument in node.args) > 1


def _rows(node: fx.Node) -> sympy.Expr:
    return numel(node.meta["shape"]) / sympy.sympify(node.meta["shape"][-1])


def _attention(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    """Flash: q, k, v, the output and an fp32 log-sum-exp per row."""
    operands = [n for n in node.all_input_nodes[:3] if n.meta.get("dtype") is not None]
    kept = [_input(node, n, sizes) for n in operands]
    kept.append(_own(node, numel(node.meta["shape"]), sizes.of(node.meta["dtype"]), ""))
    wide = max(4, sizes.activation.itemsize)
    kept.append(_own(node, sympy.Mul(*(sympy.sympify(d) for d in node.meta["shape"][:-1])), wide, "logsumexp"))
    return kept


def _rms_norm(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    """The eager chain: the widened input, 1/rms per row, the normed input of the weight's multiplication."""
    x = node.all_input_nodes[0]
    compute = node.kwargs.get("compute_dtype", node.args[3] if len(node.args) > 3 else None)
    wide_bytes = compute.itemsize if isinstance(compute, torch.dtype) else sizes.of(x.meta["dtype"])
    own_bytes = sizes.of(x.meta["dtype"])
    elements = numel(x.meta["shape"])
    cast = wide_bytes != own_bytes
    kept = [_own(node, elements, wide_bytes, "wide") if cast else _input(node, x, sizes)]
    kept.append(_own(node, _rows(x), wide_bytes, "1/rms"))
    kept.append(_own(node, elements, own_bytes, "normed"))
    return kept


def _cross_entropy(node: fx.Node, sizes: ElementSizes) -> list[KeptTensor]:
    """Log-probabilities in fp32 (or wider), the targets, and the total weight."""
    logits, target = node.all_input_nodes[:2]
    wide = max(4, sizes.of(logits.meta["dtype"]))
    return [_own(node, numel(logits.meta["shape"]), wide, "log_probs"), _input(node, target, sizes)]


_RULES: Mapping[str, Callable[[fx.Node, ElementSizes], list[KeptTensor]]] = {
    **dict.fromkeys(ATTENTION, _attention),
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "cross_entropy_sum": _cross_entropy,
    "dropout": _dropout,
    "where": _mask,
    "masked_fill": _mask,
}


def local_bytes(
    kept: list[KeptTensor],
    elements: Mapping[KeptTensor, float],
    strategies: Mapping[fx.Node, tuple[tuple[Placement | None, ...], Placement]],
    tp: int,
    parameters: frozenset[str] = frozenset(),
    *,
    gathers_again: bool = False,
) -> float:
    """Bytes of distinct storages on one rank: the sum of `local_storages`."""
    return sum(local_storages(kept, elements, strategies, tp, parameters, gathers_again=gathers_again).values())


def local_storages(
    kept: list[KeptTensor],
    elements: Mapping[KeptTensor, float],
    strategies: Mapping[fx.Node, tuple[tuple[Placement | None, ...], Placement]],
    tp: int,
    parameters: frozenset[str] = frozenset(),
    *,
    gathers_again: bool = False,
) -> dict[tuple[fx.Node, str], float]:
    """Bytes of each distinct storage on one rank, by the node that made it. gathers_again: a gathered input is kept as
    its shard and gathered anew in the backward (Megatron's sequence parallel). `strategies` gives (inputs, output)
    placements; a node that has none is replicated. `elements` are the evaluated `KeptTensor.elements`."""
    storages: dict[tuple[fx.Node, str], float] = {}
    for tensor in kept:
        if tensor.root.op == "get_attr" and str(tensor.root.target) in parameters:
            continue
        made = strategies.get(tensor.root)
        have = made[1] if made else None
        key, shard = tensor.tag, have
        if tensor.slot is not None:
            wanted = strategies[tensor.keeper][0][tensor.slot] if tensor.keeper in strategies else None
            source = tensor.keeper.all_input_nodes[tensor.slot]
            carried = strategies[source][1] if source in strategies else None
            again = gathers_again and carried is not None and carried.is_shard
            if wanted is not None and carried is not None and _makes_storage(carried, wanted) and not again:
                key, shard = f"as {wanted}", wanted
        elif tensor.tag == "log_probs" and tensor.keeper in strategies:
            shard = strategies[tensor.keeper][0][0]
        part = tp if shard is not None and shard.is_shard else 1
        storages[tensor.root, key] = elements[tensor] * tensor.element_bytes / part
    return storages


def _makes_storage(have: Placement, wanted: Placement) -> bool:
    return have != wanted and not (have.is_replicated and wanted.is_replicated)
