"""Put a conversion wherever a tensor does not lie as its reader wants it.

before    meta["placement"] and ["wants"] may differ along an edge
after     they agree: a `convert(x, src, dst, group="tp")` node stands between. A parameter that is used R|P everywhere
is
          marked `grad_partial` instead (its gradient is summed over tp once a step, not once a micro-batch)
requires  shard_parameters
ensures   every partial sum is reduced before an op that is not linear in it, and only once: readers that want the same
          placement share one conversion. The outputs are R
"""

from __future__ import annotations

from torch import fx

from autopar.errors import PassError
from autopar.placement import REPLICATE, Placement
from autopar.runtime.collectives import convert

__all__ = ["insert_collectives"]


def insert_collectives(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    made: dict[tuple[fx.Node, Placement, int], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            _mark_partial_gradient(node)
    for node in list(graph.nodes):
        if "leaving" in node.meta:
            _convert_on_leaving(graph, node)
    for node in list(graph.nodes):
        if node.op == "output":
            wants: tuple[Placement | None, ...] = (REPLICATE,) * len(node.all_input_nodes)
        elif "wants" in node.meta:
            wants = node.meta["wants"]
        else:
            continue
        for source, wanted in zip(node.all_input_nodes, wants, strict=True):
            if wanted is not None and _differs(source, wanted):
                node.replace_input_with(source, _converted(graph, made, source, wanted, node))
    graph_module.recompile()
    return graph_module


def _differs(source: fx.Node, wanted: Placement) -> bool:
    have = source.meta["placement"]
    if have == wanted or (source.meta.get("grad_partial") and wanted.kind == "R|P"):
        return False
    return not (have.is_replicated and wanted.is_replicated and not source.meta["grad"])


def _mark_partial_gradient(node: fx.Node) -> None:
    wanted = {w for user in node.users for s, w in _edges(user) if s is node}
    if node.meta["grad"] and node.meta["placement"] == REPLICATE and {w.kind for w in wanted} == {"R|P"}:
        node.meta["grad_partial"] = True


def _edges(user: fx.Node) -> list[tuple[fx.Node, Placement]]:
    wants = user.meta.get("wants", ())
    return [(s, w) for s, w in zip(user.all_input_nodes, wants, strict=bool(wants)) if w is not None]


def _convert_on_leaving(graph: fx.Graph, node: fx.Node) -> None:
    """Readers in other segments read one conversion made where the tensor is made."""
    outside = [u for u in node.users if u.meta["segment"] != node.meta["segment"] and u.op != "output"]
    with graph.inserting_after(node):
        leaving = _convert_node(graph, node, node.meta["leaving"], node.meta["segment"])
    for user in outside:
        user.replace_input_with(node, leaving)


def _converted(
    graph: fx.Graph,
    made: dict[tuple[fx.Node, Placement, int], fx.Node],
    source: fx.Node,
    wanted: Placement,
    user: fx.Node,
) -> fx.Node:
    key = (source, wanted, user.meta["segment"])
    if key not in made:
        same = source.meta["segment"] == user.meta["segment"] and source.op == "call_function"
        with graph.inserting_after(source) if same else graph.inserting_before(user):
            made[key] = _convert_node(graph, source, wanted, user.meta["segment"])
    return made[key]


def _convert_node(graph: fx.Graph, source: fx.Node, wanted: Placement, segment: int) -> fx.Node:
    if isinstance(source.meta["shape"], tuple) and source.meta["shape"] and isinstance(source.meta["shape"][0], tuple):
        raise PassError(
            "several tensors cannot be converted at once",
            where=f"insert_collectives: {source.meta.get('key', source.name)}",
        )
    have = source.meta["placement"]
    node = graph.call_function(convert, (source, str(have), str(wanted)), {"group": "tp"})
    path = source.meta.get("path", "")
    node.meta = {
        **{k: source.meta[k] for k in ("shape", "dtype", "grad", "val") if k in source.meta},
        "placement": wanted,
        "segment": segment,
        "path": path,
        "key": f"{path}::convert({source.name}, {wanted})",
    }
    return node
