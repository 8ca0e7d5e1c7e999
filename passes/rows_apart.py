"""Check that rows of a batch do not meet before the loss: a batch may be cut only if no op mixes them.

A graph with batch statistics or an in-batch contrastive loss runs under any plan without an error and trains another
model. The sharding rules know which dim of an op goes where; wherever the batch dim of an argument is reduced, cut,
normalised over, or appears twice in the result, rows have met.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.dim_maps import is_mapped
from autopar.cost_model.sharding_rules import LOSSES, rule_of
from autopar.cost_model.strategy_table import tensor_arguments
from autopar.cost_model.structural_rules import structural_rule
from autopar.errors import UnsupportedModelError
from autopar.ir import TracedModel

__all__ = ["check_rows_apart"]

# Without a rule for sharding, but known to work along other dims or to mix everything.
_MIXES = {"batch_norm", "cudnn_batch_norm", "native_batch_norm", "unique", "nonzero", "logsumexp"}


def check_rows_apart(traced: TracedModel, term: fx.Node) -> None:
    """Raise UnsupportedModelError if an op before the loss `term` mixes rows."""
    for node in traced.graph_module.graph.nodes:
        if node is term:
            break
        if node.op == "call_function" and node.meta["grad"] and _mixes(node, traced):
            _refuse(node)
    if op_name(term) in LOSSES:
        logits = term.args[0]
        assert isinstance(logits, fx.Node)
        if logits.meta["shape"][-1] == traced.batch:
            _refuse(term)


def _refuse(node: fx.Node) -> None:
    raise UnsupportedModelError(
        f"{op_name(node)} mixes the rows of a batch, so the batch cannot be cut over replicas or micro-batches",
        where=node.meta["path"] or "forward",
        try_="pin dp=1 with one micro-batch, or move what compares rows out of the model",
    )


def _mixes(node: fx.Node, traced: TracedModel) -> bool:
    shape = node.meta["shape"]
    if not isinstance(shape, tuple) or is_mapped(node):
        return False
    tensors = tensor_arguments(node)
    carriers = [(i, d) for i, t in enumerate(tensors) for d in _batch_dims(t, traced)]
    if not carriers:
        return False
    if op_name(node) in _MIXES:
        return True
    several = bool(shape) and isinstance(shape[0], tuple)
    if not several and sum(size == traced.batch for size in shape) > 1:
        return True
    rule = rule_of(node, tensors) or structural_rule(node, tensors)
    if rule is None:
        return _unknown_mixes(node, tensors, carriers, traced)
    kept = {(i, d) for x in rule.letters if x.output is not None for i, d in enumerate(x.inputs) if d is not None}
    return any(carrier not in kept for carrier in carriers)


def _unknown_mixes(node: fx.Node, tensors: list[fx.Node], carriers: list[tuple[int, int]], traced: TracedModel) -> bool:
    """An op without a rule mixes rows if it says that it works along them, or if no result has any."""
    if not _batch_dims(node, traced):
        return True
    target = node.target
    names = [a.name for a in target._schema.arguments] if isinstance(target, torch._ops.OpOverload) else []
    dim = node.kwargs.get("dim")
    if "dim" in names and names.index("dim") < len(node.args):
        dim = node.args[names.index("dim")]
    return isinstance(dim, int) and (0, dim % len(tensors[0].meta["shape"])) in carriers


def _batch_dims(node: fx.Node, traced: TracedModel) -> list[int]:
    shape = node.meta["shape"]
    if shape and isinstance(shape[0], tuple):
        shape = shape[0]
    return [d for d, size in enumerate(shape) if size == traced.batch]
