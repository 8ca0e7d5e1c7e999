"""Give every tensor its placement over tp, as the plan says.

before    nodes without placements
after     meta["placement"] on every tensor node; meta["wants"] on every op: the placement of each argument;
          meta["leaving"] where a tensor lies otherwise outside its segment; a vocabulary-sharded embedding and loss are
          the kernels that know which rows a rank owns
requires  canonicalize, token_loss; a plan whose degrees, parameters and ops fit the model (PlanMismatchError)
ensures   every op's strategy is one that the sharding rules allow
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.propagation import Propagation, propagate
from autopar.ir import TracedModel
from autopar.plan import Plan
from autopar.runtime.losses import (
    vocab_parallel_cross_entropy_loss,
    vocab_parallel_cross_entropy_sum,
    vocab_parallel_embedding,
)

__all__ = ["shard_parameters", "write_placements"]


def shard_parameters(traced: TracedModel, plan: Plan) -> fx.GraphModule:
    """Annotate `traced.graph_module` in place and return it."""
    result = propagate(traced, plan)
    write_placements(result)
    for node in result.strategy:
        _choose_kernel(node, result, plan.degrees.tp)
    traced.graph_module.recompile()
    return traced.graph_module


def write_placements(result: Propagation) -> None:
    """meta["placement"], ["wants"] and ["leaving"] of every node of a propagation."""
    for node, placement in result.placement.items():
        node.meta["placement"] = placement
        if node in result.leaving and result.leaving[node] != placement:
            node.meta["leaving"] = result.leaving[node]
    for node, strategy in result.strategy.items():
        node.meta["wants"] = strategy.inputs


def _choose_kernel(node: fx.Node, result: Propagation, ranks: int) -> None:
    wants = result.strategy[node].inputs
    if op_name(node) == "embedding" and result.strategy[node].output.is_partial and wants[0] is not None:
        weight, ids = node.args[:2]
        if wants[0].is_shard:
            padding = node.args[2] if len(node.args) > 2 else -1
            node.target, node.args = vocab_parallel_embedding, (ids, weight)
            node.meta["wants"] = (wants[1], wants[0]) if node.all_input_nodes[0] is ids else wants
            size = {"vocab": weight.meta["shape"][0]}  # type: ignore[union-attr]
            node.kwargs = {"group": "tp", "padding_idx": None if padding == -1 else padding, **size}
    elif op_name(node) in _VOCAB_KERNELS and wants[0] is not None and wants[0].dim == len(_logits_shape(node)) - 1:
        options = {**dict(zip(_LOSS_OPTIONS, node.args[4:], strict=False)), **node.kwargs}
        node.target, node.args = _VOCAB_KERNELS[op_name(node)], tuple(node.args[:2])
        node.kwargs = {**{k: v for k, v in options.items() if k in _LOSS_OPTIONS}, "group": "tp"}
        if _logits_shape(node)[-1] % ranks:
            node.kwargs = {**node.kwargs, "vocab": _logits_shape(node)[-1]}


_LOSS_OPTIONS = ("ignore_index", "label_smoothing")
_VOCAB_KERNELS = {
    "cross_entropy_loss": vocab_parallel_cross_entropy_loss,
    "cross_entropy_sum": vocab_parallel_cross_entropy_sum,
}


def _logits_shape(node: fx.Node) -> tuple[Any, ...]:
    logits = node.args[0]
    assert isinstance(logits, fx.Node)
    shape: tuple[Any, ...] = logits.meta["shape"]
    return shape
