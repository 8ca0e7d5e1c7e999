"""Put a conversion wherever a tensor does not lie as its reader wants it.

before    meta["placement"] and ["wants"] may differ along an edge
after     they agree: a `convert(x, src, dst, group="tp")` node stands between. A parameter that is used R|P everywhere
is
          marked `grad_partial` instead (its gradient is summed over the axis once a step, not per micro-batch)
requires  shard_parameters
ensures   every partial sum is reduced before an op that is not linear in it, and only once: readers that want the same
          placement share one conversion. The outputs are R
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.blocks import op_name
from autopar.errors import PassError
from autopar.placement import CONVERSIONS, LAST_RESORT, REPLICATE, Placement
from autopar.runtime.collectives import convert

__all__ = ["insert_collectives"]


def insert_collectives(
    graph_module: fx.GraphModule, ranks: int, axis: str = "tp", *, zigzag: bool = False
) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it. `zigzag`: shards of a dim are the chunks r and 2n-1-r of 2n."""
    graph = graph_module.graph
    made = _Made(graph, ranks, axis, zigzag)
    for node in list(graph.nodes):
        if node.op == "get_attr":
            _mark_partial_gradient(node, axis)
    for node in list(graph.nodes):
        if "leaving" in node.meta:
            _convert_on_leaving(made, node)
    for node in list(graph.nodes):
        _convert_arguments(made, node)
    graph_module.recompile()
    return graph_module


def _convert_arguments(made: _Made, node: fx.Node) -> None:
    """Conversions before `node`, for every argument that does not lie as it wants it."""
    wants: tuple[Placement | None, ...] = node.meta.get("wants", ())
    if node.op == "output":
        wants = (REPLICATE,) * len(node.all_input_nodes)
    for source, wanted in zip(node.all_input_nodes, wants, strict=bool(wants)):
        if wanted is None or not _differs(source, wanted, made.axis):
            continue
        if op_name(node) == "getitem" and _is_several(source):
            _convert_item(made, node, wanted)
        else:
            node.replace_input_with(source, made.converted(source, wanted, node))


def _differs(source: fx.Node, wanted: Placement, axis: str) -> bool:
    have = source.meta["placement"]
    if have == wanted or (axis in source.meta.get("grad_partial", ()) and wanted.kind == "R|P"):
        return False
    return not (have.is_replicated and wanted.is_replicated and not source.meta["grad"])


def _mark_partial_gradient(node: fx.Node, axis: str) -> None:
    wanted = {w for user in node.users for s, w in _edges(user) if s is node}
    if node.meta["grad"] and node.meta["placement"] == REPLICATE and {w.kind for w in wanted} == {"R|P"}:
        node.meta["grad_partial"] = (*node.meta.get("grad_partial", ()), axis)


def _edges(user: fx.Node) -> list[tuple[fx.Node, Placement]]:
    wants = user.meta.get("wants", ())
    return [(s, w) for s, w in zip(user.all_input_nodes, wants, strict=bool(wants)) if w is not None]


def _convert_on_leaving(made: _Made, node: fx.Node) -> None:
    """Readers in other segments read one conversion made where the tensor is made."""
    outside = [u for u in node.users if u.meta["segment"] != node.meta["segment"] and u.op != "output"]
    with made.graph.inserting_after(node):
        leaving = made.convert(node, node.meta["leaving"], node.meta["segment"])
    for user in outside:
        user.replace_input_with(node, leaving)


def _is_several(node: fx.Node) -> bool:
    shape = node.meta["shape"]
    return bool(shape) and isinstance(shape[0], tuple)


def _convert_item(made: _Made, item: fx.Node, wanted: Placement) -> None:
    """Several tensors cannot be converted at once: take the item as it lies, and convert that."""
    source = item.all_input_nodes[0]
    item.meta["placement"] = source.meta["placement"]
    item.meta["wants"] = (source.meta["placement"],)
    with made.graph.inserting_after(item):
        converted = made.convert(item, wanted, item.meta["segment"])
    item.replace_all_uses_with(converted, delete_user_cb=lambda user: user is not converted)


class _Made:
    """Makes conversions over one axis, and remembers them so that readers share."""

    def __init__(self, graph: fx.Graph, ranks: int, axis: str, zigzag: bool) -> None:
        self.graph, self.ranks, self.axis, self.zigzag = graph, ranks, axis, zigzag
        self._known: dict[tuple[fx.Node, Placement, int], fx.Node] = {}

    def converted(self, source: fx.Node, wanted: Placement, user: fx.Node) -> fx.Node:
        key = (source, wanted, user.meta["segment"])
        if key not in self._known:
            same = source.meta["segment"] == user.meta["segment"] and source.op == "call_function"
            with self.graph.inserting_after(source) if same else self.graph.inserting_before(user):
                self._known[key] = self.convert(source, wanted, user.meta["segment"])
        return self._known[key]

    def convert(self, source: fx.Node, wanted: Placement, segment: int) -> fx.Node:
        if _is_several(source):
            where = f"insert_collectives: {source.meta.get('key', source.name)}"
            raise PassError("several tensors cannot be converted at once", where=where)
        have = source.meta["placement"]
        if (have.kind, wanted.kind) not in CONVERSIONS | LAST_RESORT:
            where = f"insert_collectives: {source.meta.get('key', source.name)}"
            raise PassError(f"nothing converts {have} to {wanted} over {self.axis}", where=where)
        options: dict[str, Any] = {"group": self.axis, **({"zigzag": True} if self.zigzag else {})}
        for placement in (have, wanted):
            size = source.meta["shape"][placement.dim] if placement.is_shard and placement.left == 1 else None
            if isinstance(size, int) and size % self.ranks:  # a vocabulary: nothing else is cut unevenly
                options["uneven"] = (placement.dim, size)
        node = self.graph.call_function(convert, (source, str(have), str(wanted)), options)
        path = source.meta.get("path", "")
        node.meta = {
            **{k: source.meta[k] for k in ("shape", "dtype", "grad", "val") if k in source.meta},
            "placement": wanted,
            "segment": segment,
            "path": path,
            "key": f"{path}::convert({source.name}, {wanted})",
        }
        return node
