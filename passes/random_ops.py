"""Ops that draw from the process's generator, other than dropout: ranks that hold copies would draw different numbers.

Dropout is seeded by place and row (seed_dropout). Noise, stochastic depth or Gumbel samples are not: under a plan they
would differ between the ranks of one replica, and between a plan and one process.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.errors import UnsupportedModelError
from autopar.plan import Plan

__all__ = ["refuse_random_ops"]

# Seeded, or free of draws where their probability is zero.
_SEEDED = ("dropout", "scaled_dot_product_attention")


def refuse_random_ops(graph: fx.Graph, plan: Plan) -> None:
    """Raise UnsupportedModelError if ranks of `plan` would draw on their own."""
    if plan.degrees.world_size == 1:
        return
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or op_name(node) in _SEEDED:
            continue
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise UnsupportedModelError(
                f"{op_name(node)} draws from each process's own generator, so that ranks would disagree",
                where=str(node.meta.get("path") or "forward"),
                try_="nn.Dropout, which is seeded alike on all ranks, or pass the random numbers in with the batch",
            )
