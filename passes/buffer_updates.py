"""Buffers that forward changes (counters, running statistics): each is stored once, at the end of the graph.

before    in-place ops on a buffer, wherever the model has them
after     readers read a copy of the buffer taken at the start, or the new value; `update_buffer` comes last. An update
          computed from buffers alone has ops of its own for that, so that every stage can do it
requires  functionalize found the last value of each
ensures   recomputation neither repeats an update nor sees its result. Updates happen once for every micro-batch
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch import fx

from autopar.errors import UnsupportedModelError
from autopar.graph_walks import holds, output_node
from autopar.ir import TracedModel
from autopar.passes.dead_code import is_update
from autopar.plan import Plan
from autopar.runtime.functional import update_buffer

__all__ = ["check_updates", "store_updates", "updated_buffers"]


def store_updates(graph: fx.Graph, values: Mapping[fx.Node, fx.Node]) -> None:
    """Write `values` (buffer -> its last value) back at the end of `graph`, in place."""
    if not values:
        return
    first = next(n for n in graph.nodes if n.op == "call_function")
    output = output_node(graph)
    for buffer in values:
        with graph.inserting_before(first):
            before = graph.call_function(torch.ops.aten.clone.default, (buffer,))
        before.meta = {**buffer.meta, "path": ""}
        for reader in [user for user in buffer.users if user is not before]:
            reader.replace_input_with(buffer, before)
    for buffer, value in values.items():
        with graph.inserting_before(output):
            new = _again(graph, value) if _reads_no_batch(value) else value
            update = graph.call_function(update_buffer, (buffer, new))
        update.meta = {**buffer.meta, "path": ""}


def _reads_no_batch(value: fx.Node) -> bool:
    """Whether `value` is computed from buffers alone."""
    if value.op != "call_function":
        return value.op == "get_attr" and not value.meta.get("grad", False)
    if value.target is torch.ops.aten.sym_size.int:
        return False  # a micro-batch is smaller than the batch
    return all(_reads_no_batch(n) for n in value.all_input_nodes)


def _reads_no_rows(value: fx.Node, batch: sympy.Symbol) -> bool:
    """Whether `value` is computed from buffers and sizes that rows have no part in."""
    if value.op != "call_function":
        return value.op == "get_attr" and not value.meta.get("grad", False)
    if value.target is torch.ops.aten.sym_size.int:
        return not holds(value.meta["size"], batch)
    return all(_reads_no_rows(n, batch) for n in value.all_input_nodes)


def _again(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """A copy of `value` and of what it is computed from, outside every module."""
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node.op != "call_function":
            return node
        if node not in copies:
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = graph.node_copy(node, copied)
            copies[node].meta = {**node.meta, "path": ""}
        return copies[node]

    return copied(value)


def updated_buffers(graph: fx.Graph) -> list[str]:
    return [str(node.args[0].target) for node in graph.nodes if is_update(node)]


def check_updates(traced: TracedModel, plan: Plan) -> None:
    """Raise UnsupportedModelError where an update would not be the model's own under `plan`."""
    rows = plan.degrees.dp * plan.micro_batches
    for node in traced.graph_module.graph.nodes:
        if not is_update(node):
            continue
        name = str(node.args[0].target)
        # Rotary tables that follow the length of a sequence: every rank and stage computes that from whole inputs.
        whole = _reads_no_rows(node.args[1], traced.batch)
        if plan.degrees.cp * plan.degrees.pp * rows > 1 and not whole:
            raise UnsupportedModelError(
                "a buffer is changed in forward by what it sees of the batch: of a part it would see something else",
                where=name,
                try_="a plan with dp=1, cp=1, pp=1 and one micro-batch, or such state outside the model",
            )
        if plan.virtual_stages > 1:
            raise UnsupportedModelError(
                "a buffer is changed in forward, which interleaved stages of one rank would do in turns",
                where=name,
                try_="virtual_stages=1",
            )
