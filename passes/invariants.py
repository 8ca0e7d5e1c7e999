"""What must hold of a graph after every pass; a violation is a PassError that names pass and node."""

from __future__ import annotations

from torch import fx

from autopar.errors import PassError

__all__ = ["check_invariants"]


def check_invariants(graph: fx.Graph, *, after: str, axis: str = "tp") -> None:
    """Lint, and check that tensors carry their metadata and lie as their readers want once collectives are in."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise PassError(f"the graph is malformed: {error}", where=after) from error
    for node in graph.nodes:
        if node.op in ("call_function", "call_module", "get_attr") and "grad" not in node.meta:
            raise PassError("node without metadata", where=f"{after}: {node.name}")
        if after in ("insert_collectives", "localize_shapes"):
            _check_edges(node, after, axis)


def _check_edges(node: fx.Node, after: str, axis: str) -> None:
    for source, wanted in zip(node.all_input_nodes, node.meta.get("wants", ()), strict="wants" in node.meta):
        if wanted is None:
            continue
        have = source.meta["placement"]
        grad = source.meta["grad"]
        if have == wanted or (
            have.is_replicated and wanted.is_replicated and (not grad or axis in source.meta.get("grad_partial", ()))
        ):
            continue
        raise PassError(f"reads {source.name} as {wanted}, it lies as {have}", where=f"{after}: {node.meta['key']}")
