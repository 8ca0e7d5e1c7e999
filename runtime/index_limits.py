"""Indices of a batch against the tables they are looked up in, before any rank runs.

A token id beyond the vocabulary, a sequence longer than the position table or a label that is no class would end one
rank in the middle of a kernel, and leave its peers waiting for it. Indices that follow from the inputs alone are worked
out on the host first, where the inputs are there: on an accelerator that would cost a synchronisation, and a device
assert says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.blocks import op_name
from autopar.errors import SpecError
from autopar.graph_walks import ancestors, input_only, shapes_of
from autopar.ir import TracedModel

__all__ = ["IndexLimits"]


@dataclass(frozen=True)
class _Lookup:
    """`index`, a node, is looked up in a table of `size` rows or classes; `ignored` is a value that is not."""

    index: fx.Node
    table: str
    size: int
    ignored: int | None = None


class IndexLimits:
    """The lookups of a captured model whose indices follow from its inputs, and the graph that gives them."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        graph = traced.graph_module.graph
        free = input_only(graph)
        found = [lookup for node in graph.nodes if (lookup := _lookup(node)) is not None]
        self._lookups = [lookup for lookup in found if lookup.index in free and self._is_cheap(lookup.index)]
        wanted = ancestors(lookup.index for lookup in self._lookups)
        self._names = [str(n.target) for n in graph.nodes if n.op == "placeholder" and n in wanted]
        self._graph = _copied(traced.graph_module, wanted, [lookup.index for lookup in self._lookups])

    def _is_cheap(self, index: fx.Node) -> bool:
        """No more work than to look at every token once, and nothing that writes or lies on the meta device."""
        for node in ancestors([index]):
            if any(sum(size == self._traced.seq for size in shape) > 1 for shape in shapes_of(node)):
                return False
            if node.op == "get_attr" and _attribute(self._traced.graph_module, node).is_meta:
                return False
            schema = getattr(node.target, "_schema", None)  # of an op, not of a function
            if schema is not None and schema.is_mutable:
                return False
        return True

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise SpecError for an index outside its table, naming the input, the index and the size of the table."""
        if not self._lookups or any(inputs[name].device.type != "cpu" for name in self._names):
            return
        with torch.no_grad():
            indices = self._graph(**{name: inputs[name] for name in self._names})
        for lookup, index in zip(self._lookups, indices, strict=True):
            if lookup.ignored is not None:
                index = index[index != lookup.ignored]
            if index.numel():
                low, high = (int(bound) for bound in index.aminmax())
                if low < 0 or high >= lookup.size:
                    self._refuse(lookup, low if low < 0 else high, inputs)

    def _refuse(self, lookup: _Lookup, index: int, inputs: Mapping[str, Tensor]) -> None:
        names = _read_values(lookup.index)
        spec = next((s for s in self._traced.inputs if s.seq_dim is not None), None)
        if not names and spec is not None:
            length = inputs[spec.name].shape[spec.seq_dim or 0]
            what = f"sequences of {length} tokens read row {index} of {lookup.table}, which has {lookup.size} rows"
            raise SpecError(what, where="batch", try_=f"at most {lookup.size} tokens, or a model with more positions")
        name = " and ".join(names) or "the batch"
        if lookup.ignored is None:
            what = f"{name} holds {index}, and {lookup.table} has {lookup.size} rows (0 to {lookup.size - 1})"
            raise SpecError(what, where="batch", try_="the tokenizer of this model, or a larger table")
        what = f"{name} holds {index}, and {lookup.table} knows {lookup.size} classes (0 to {lookup.size - 1})"
        raise SpecError(what, where="batch", try_=f"{lookup.ignored} for targets that are not to count")


def _lookup(node: fx.Node) -> _Lookup | None:
    if node.op != "call_function":
        return None
    if op_name(node) == "embedding":
        table, index = node.args[:2]
        assert isinstance(table, fx.Node)
        size = table.meta["shape"][0]
        if isinstance(index, fx.Node) and isinstance(size, int):
            return _Lookup(index, str(table.target) if table.op == "get_attr" else "the table", size)
    elif op_name(node) in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        scores, index = node.args[:2]
        assert isinstance(scores, fx.Node)
        if not isinstance(index, fx.Node) or index.meta["dtype"].is_floating_point:
            return None
        shape = scores.meta["shape"]
        size = shape[-1] if shape[:-1] == index.meta["shape"] else shape[1]  # classes last, or [rows, classes, ...]
        if isinstance(size, int):
            ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
            return _Lookup(index, "the loss", size, int(ignored))  # type: ignore[arg-type]
    return None


def _read_values(index: fx.Node) -> list[str]:
    """Inputs whose values, not only sizes, an index is made of."""
    names: list[str] = []
    seen: set[fx.Node] = set()
    pending = [index]
    while pending:
        node = pending.pop()
        if node in seen or not shapes_of(node):  # a size
            continue
        seen.add(node)
        if node.op == "placeholder":
            names.append(str(node.target))
        pending += node.all_input_nodes
    return sorted(names)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Tensor:
    owner, _, name = str(node.target).rpartition(".")
    value: Tensor = getattr(module.get_submodule(owner), name)
    return value


def _copied(module: fx.GraphModule, wanted: set[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    """The part of a graph that gives `outputs`, on the CPU."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    root = torch.nn.Module()
    host = torch.device("cpu")
    for node in module.graph.nodes:
        if node not in wanted:
            continue
        if node.op == "get_attr":
            name = f"constant{len(copies)}"
            root.register_buffer(name, _attribute(module, node).detach().to(host))
            copies[node] = graph.get_attr(name)
            continue
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        arguments = (copies[node].args, copies[node].kwargs)
        copies[node].args, copies[node].kwargs = fx.node.map_aggregate(
            arguments, lambda a: host if isinstance(a, torch.device) else a
        )
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(root, graph, "IndexLimits")
