"""Recompute what the plan says of a layer; `autopar.recomputation` defines what each mode keeps.

before    `call_module` of a layer
after     full           the same call of a CheckpointedBlock around the layer. With checkpoint_segment = k, consecutive
                         layers of a stage that have nothing but each other between them share one, k at a time
          selective-ops  a CheckpointedBlock whose graph takes a tape; kept outputs are `keep_output(tape, op, ...)`
          selective      the attention core inside the layer is a CheckpointedBlock
requires  outline_blocks
ensures   same values and gradients
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from autopar.ir import Segment
from autopar.passes.outline_blocks import outline
from autopar.plan import Plan
from autopar.recomputation import attention_cores, kept_products, recomputed_together
from autopar.runtime.recompute import OWN_OPS, CheckpointedBlock, keep_output

__all__ = ["checkpoint_blocks"]


def checkpoint_blocks(graph_module: fx.GraphModule, segments: Sequence[Segment], plan: Plan) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    calls = {n.meta["segment"]: n for n in graph_module.graph.nodes if n.op == "call_module"}
    for node in calls.values():
        mode, name = plan.checkpoint_mode(node.meta["path"]), str(node.target)
        block = getattr(graph_module, name)
        if mode == "selective":
            _checkpoint_attention(block)
        elif mode == "selective-ops":
            _keep_products(block)
            setattr(graph_module, name, CheckpointedBlock(block, taped=True))
    for number, group in enumerate(recomputed_together(segments, plan)):
        layers = [calls[s.index] for s in group if s.index in calls]  # an unused layer has no call
        if len(layers) > 1:
            name, meta = f"segment_{number}", {k: layers[0].meta[k] for k in ("segment", "path")}
            outline(graph_module, _with_items(layers), name, meta)
        elif layers:
            name = str(layers[0].target)
        else:
            continue
        setattr(graph_module, name, CheckpointedBlock(getattr(graph_module, name)))
    graph_module.recompile()
    return graph_module


def _checkpoint_attention(block: fx.GraphModule) -> None:
    for number, core in enumerate(attention_cores(list(block.graph.nodes))):
        name = f"attention_{number}"
        outline(block, core, name, {k: core[-1].meta[k] for k in ("segment", "path")})
        setattr(block, name, CheckpointedBlock(getattr(block, name)))
    block.recompile()


def _keep_products(block: fx.GraphModule) -> None:
    nodes = [n for n in block.graph.nodes if n.op == "call_function"]
    kept, unread = kept_products(nodes)
    with block.graph.inserting_before(next(iter(block.graph.nodes))):
        tape = block.graph.placeholder("tape")
    tape.meta = {"shape": None, "dtype": None, "grad": False, "path": ""}
    for node in nodes:
        if node in kept or node in unread:
            own = getattr(node.target, "__name__", "")
            op = own if own in OWN_OPS else node.target
            node.target, node.args = keep_output, (tape, op, *node.args)
            node.meta["wants"] = (None, *node.meta["wants"]) if "wants" in node.meta else None
            if node in unread:
                node.kwargs = {**node.kwargs, "unread": True}
    block.recompile()


def _is_item_of(node: fx.Node, call: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem and node.args[0] is call


def _with_items(calls: list[fx.Node]) -> list[fx.Node]:
    """The calls with what takes a call's several outputs apart, in order."""
    return [n for call in calls for n in (call, *(u for u in call.users if _is_item_of(u, call)))]
