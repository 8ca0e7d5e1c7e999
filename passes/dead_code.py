"""What a graph keeps although nothing reads it: inputs, outputs, and updates of the model's buffers."""

from __future__ import annotations

from torch import fx

from autopar.runtime.functional import update_buffer

__all__ = ["drop_dead_code", "is_update"]


def is_update(node: fx.Node) -> bool:
    return node.target is update_buffer


def drop_dead_code(graph: fx.Graph) -> None:
    """Erase, in place, what neither an output nor an update needs."""
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or is_update(n))
