"""Recompute the layers the plan says: keep a layer's inputs for backward and run it again.

before    `call_module` of a layer
after     the same call of a CheckpointedBlock around the layer, where the plan's mode is "full"
requires  outline_blocks
ensures   same values and gradients; PlanMismatchError for a mode that is not built
"""

from __future__ import annotations

from torch import fx

from autopar.errors import PlanMismatchError
from autopar.plan import Plan
from autopar.runtime.stage import CheckpointedBlock

__all__ = ["checkpoint_blocks"]


def checkpoint_blocks(graph_module: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    for node in graph_module.graph.nodes:
        if node.op != "call_module":
            continue
        mode = plan.checkpoint_mode(node.meta["path"])
        if mode == "full":
            name = str(node.target)
            setattr(graph_module, name, CheckpointedBlock(getattr(graph_module, name)))
        elif mode != "none":
            raise PlanMismatchError(
                f"checkpoint mode {mode!r} is not built yet", where=node.meta["path"], try_="none or full"
            )
    return graph_module
