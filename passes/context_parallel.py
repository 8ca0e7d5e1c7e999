"""Cut the sequence over cp.

before    every rank runs whole sequences
after     the residual stream and what follows from it holds seq / cp tokens a rank; attention is the kernel that goes
          round the ranks, or has its rows of the mask. Inputs stay whole on every rank: masks, positions and shifted
          labels are computed whole and cut where they meet the stream, so that they are right at chunk borders
requires  sum_loss; seq_len divides by 2 cp (the engine pads)
ensures   placements over cp agree along every edge. In meta["shape"] `seq` now is the local length and a whole sequence
          is `cp * seq`; parameters are marked `grad_partial` over cp where ranks see different tokens
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.propagation import propagate
from autopar.ir import TracedModel
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.invariants import check_invariants
from autopar.passes.localize_shapes import localize_shapes
from autopar.passes.shard_parameters import write_placements
from autopar.placement import Placement, Shard
from autopar.plan import Plan
from autopar.runtime.attention import context_attention

__all__ = ["context_parallel", "uses_zigzag"]


def context_parallel(traced: TracedModel, plan: Plan) -> fx.GraphModule:
    """Rewrite `traced.graph_module` in place and return it."""
    graph_module, ranks = traced.graph_module, plan.degrees.cp
    write_placements(propagate(traced, plan, axis="cp"))
    zigzag = uses_zigzag(graph_module.graph)
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            _go_round_ranks(node, plan)
    insert_collectives(graph_module, ranks, "cp", zigzag=zigzag)
    check_invariants(graph_module.graph, after="insert_collectives", axis="cp")
    localize_shapes(graph_module, ranks)
    for node in graph_module.graph.nodes:
        _rename_sizes(node, ranks, traced.seq)
        node.meta["placement_cp"], node.meta["zigzag"] = node.meta.get("placement"), zigzag
        for key in ("placement", "wants", "leaving"):
            node.meta.pop(key, None)
    graph_module.recompile()
    return graph_module


def uses_zigzag(graph: fx.Graph) -> bool:
    """Causal attention is balanced by giving each rank an early and a late chunk; without it chunks stay in order."""
    return any(
        op_name(n) == "scaled_dot_product_attention" and _argument(n, 5, "is_causal", False)
        for n in graph.nodes
        if n.op == "call_function"
    )


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _go_round_ranks(node: fx.Node, plan: Plan) -> None:
    """The kernel for cut keys, where that is the strategy."""
    wants = node.meta.get("wants", ())
    if not wants or wants[1] != Shard(2):
        return
    options = {"is_causal": bool(_argument(node, 5, "is_causal", False)), "scale": node.kwargs.get("scale")}
    node.target, node.args = context_attention, tuple(node.args[:3])
    node.kwargs = {**options, "kind": plan.context_parallel, "group": "cp"}
    if "cp_ring" not in plan.overlap:
        node.kwargs = {**node.kwargs, "overlap": False}


def _rename_sizes(node: fx.Node, ranks: int, seq: sympy.Symbol) -> None:
    """`seq` becomes the local length: whole dims are `ranks * seq`, the cut one keeps its name."""
    placement: Placement | None = node.meta.get("placement")
    cut = placement.dim if placement is not None and placement.is_shard else None

    def rename(shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            d if isinstance(d, int) or i == cut else d.xreplace({seq: ranks * seq}) for i, d in enumerate(shape)
        )

    shape = node.meta.get("shape")
    if isinstance(shape, tuple):
        several = bool(shape) and isinstance(shape[0], tuple)
        node.meta["shape"] = tuple(rename(s) for s in shape) if several else rename(shape)
