"""Make every layer a submodule: the unit of checkpointing, of parameter sharding and of compilation.

before    one flat graph
after     each layer segment is one `call_module` of a GraphModule that owns the layer's parameters under their original
          names; glue stays flat
requires  insert_collectives, localize_shapes (nodes of a segment stand together)
ensures   same values; a module's inputs are exactly what the layer reads from outside
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar.ir import Segment
from autopar.passes.dead_code import drop_dead_code

__all__ = ["attribute", "outline", "outline_blocks"]


def outline_blocks(graph_module: fx.GraphModule, segments: Sequence[Segment]) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    taken: set[str] = set()
    for segment in segments:
        if segment.kind == "layer":
            name = segment.path.replace(".", "_")
            # A layer of the root has the name of a module whose weights stand in the graph under theirs.
            name = f"{name}_{segment.index}" if name in taken or hasattr(graph_module, name) else name
            taken.add(name)
            _outline(graph_module, segment, name)
    drop_dead_code(graph_module.graph)
    graph_module.recompile()
    return graph_module


def attribute(module: Any, path: str) -> Any:
    """The object at a dotted path below `module`."""
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _outline(graph_module: fx.GraphModule, segment: Segment, name: str) -> None:
    inside = [n for n in graph_module.graph.nodes if n.op == "call_function" and n.meta.get("segment") == segment.index]
    if inside:
        outline(graph_module, inside, name, {"segment": segment.index, "path": segment.path})


def outline(graph_module: fx.GraphModule, inside: list[fx.Node], name: str, meta: dict[str, Any]) -> fx.GraphModule:
    """Make `inside`, nodes in order that nothing from outside interrupts, a submodule `name`; return it.

    `meta` says of the call what does not follow from its outputs. Nodes are copied with their metadata.
    """
    graph, members = graph_module.graph, set(inside)
    sources = dict.fromkeys(s for n in inside for s in n.all_input_nodes if s not in members)
    inputs = [s for s in sources if s.op != "get_attr"]
    outputs = [n for n in inside if any(u not in members for u in n.users)]
    block = _block_graph(inside, list(sources), outputs)
    owned = [str(n.target) for n in (*sources, *inside) if n.op in ("get_attr", "call_module")]
    block_module = fx.GraphModule({path: attribute(graph_module, path) for path in owned}, block, "Block")
    graph_module.add_submodule(name, block_module)
    with graph.inserting_after(inside[-1]):
        call = graph.call_module(name, tuple(inputs))
    call.meta = {**meta, "shape": None, "grad": any(o.meta["grad"] for o in outputs)}
    _replace_outputs(graph, call, outputs, members)
    for node in reversed(inside):
        graph.erase_node(node)
    return block_module


def _block_graph(inside: list[fx.Node], sources: list[fx.Node], outputs: list[fx.Node]) -> fx.Graph:
    block = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in sorted(sources, key=lambda s: s.op == "get_attr"):
        is_state = source.op == "get_attr"
        copies[source] = block.get_attr(str(source.target)) if is_state else block.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in inside:
        copies[node] = block.node_copy(node, lambda n: copies[n])
        copies[node].meta = dict(node.meta)
    results = tuple(copies[o] for o in outputs)
    block.output(results[0] if len(results) == 1 else results)
    return block


def _replace_outputs(graph: fx.Graph, call: fx.Node, outputs: list[fx.Node], members: set[fx.Node]) -> None:
    if len(outputs) == 1:
        call.meta = {**outputs[0].meta, **{k: call.meta[k] for k in ("segment", "path")}}
        outputs[0].replace_all_uses_with(call, delete_user_cb=lambda u: u not in members and u is not call)
        return
    after = call
    for position, output in enumerate(outputs):
        with graph.inserting_after(after):
            part = graph.call_function(operator.getitem, (call, position))
        part.meta = dict(output.meta)
        output.replace_all_uses_with(part, delete_user_cb=lambda u: u not in members and u is not call)
        after = part
