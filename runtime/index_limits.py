"""Indices of a batch against the tables they are looked up in, before any rank runs.

A token id beyond the vocabulary, a sequence longer than the position table or a label that is no class would end one
rank in the middle of a kernel, and leave its peers waiting for it. Indices that follow from the inputs alone are worked
out on the host first, where the inputs are there: on an accelerator that would cost a synchronisation, and a device
assert says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """The lookups of a captured model whose indices follow from its inputs, and the graphs that give them.

    Most indices are an input's own values, moved about: there a look at the input says that all is well, and nothing is
    worked out. What follows from sizes alone is worked out when they change.
    """

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        graph = traced.graph_module.graph
        free = input_only(graph)
        found = [lookup for node in graph.nodes if (lookup := _lookup(node)) is not None]
        cheap = [lookup for lookup in found if lookup.index in free and self._is_cheap(lookup.index)]
        self._direct = [lookup for lookup in cheap if _source(lookup) is not None]
        sized = [lookup for lookup in cheap if not _read_values(lookup.index)]
        derived = [lookup for lookup in cheap if lookup not in self._direct and lookup not in sized]
        self._exact, self._sized, self._derived = (_Indices(traced, some) for some in (self._direct, sized, derived))
        self._sizes: tuple[torch.Size, ...] = ()

    def _is_cheap(self, index: fx.Node) -> bool:
        """No more work than to look at every token once: no weights, which would be a model of its own (a teacher whose
        best guess is the target), and nothing that writes or lies on the meta device."""
        for node in ancestors([index]):
            if any(sum(size == self._traced.seq for size in shape) > 1 for shape in shapes_of(node)):
                return False
            if node.op == "get_attr":
                held = _attribute(self._traced.graph_module, node)
                if held.is_meta or held.is_floating_point() or isinstance(held, torch.nn.Parameter):
                    return False
            schema = getattr(node.target, "_schema", None)  # of an op, not of a function
            if schema is not None and schema.is_mutable:
                return False
        return True

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise SpecError for an index outside its table, naming the input, the index and the size of the table."""
        names = {*self._exact.names, *self._sized.names, *self._derived.names}
        if any(inputs[name].device.type != "cpu" for name in names):
            return
        if any(_outside(lookup, inputs[_source(lookup) or ""]) is not None for lookup in self._direct):
            self._look(self._exact, inputs)
        sizes = tuple(inputs[name].shape for name in self._sized.names)
        if sizes != self._sizes:
            self._look(self._sized, inputs)
            self._sizes = sizes
        self._look(self._derived, inputs)

    def _look(self, indices: _Indices, inputs: Mapping[str, Tensor]) -> None:
        for lookup, index in indices.worked_out(inputs):
            outside = _outside(lookup, index)
            if outside is not None:
                raise self._refusal(lookup, outside, inputs)

    def _refusal(self, lookup: _Lookup, index: int, inputs: Mapping[str, Tensor]) -> SpecError:
        names, table, size = _read_values(lookup.index), lookup.table, lookup.size
        spec = next((s for s in self._traced.inputs if s.seq_dim is not None), None)
        if not names and spec is not None:
            length = inputs[spec.name].shape[spec.seq_dim or 0]
            longest = length - (index - size + 1)  # positions may begin beyond row 0
            fits = f"at most {longest} tokens" if 0 < longest < length else "sequences of another length"
            what = f"sequences of {length} tokens read row {index} of {table}, which has {size} rows"
            return SpecError(what, where="batch", try_=f"{fits}, or a model with more positions")
        name, own = " and ".join(names) or "the batch", lookup in self._direct
        does = f"{name} {'holds' if own else 'give' if len(names) > 1 else 'gives'} {'' if own else 'index '}{index}"
        if lookup.ignored is not None:
            what = f"{does}, and {table} knows {size} classes (0 to {size - 1})"
            return SpecError(what, where="batch", try_=f"{lookup.ignored} for targets that are not to count")
        what = f"{does}, and {table} has {size} rows (0 to {size - 1})"
        moved = f"other values of {name}, shorter sequences if it counts tokens"
        return SpecError(
            what, where="batch", try_=f"{'the tokenizer of this model' if own else moved}, or a larger table"
        )


class _Indices:
    """The indices of some lookups, and the inputs by name that they are worked out from."""

    def __init__(self, traced: TracedModel, lookups: Sequence[_Lookup]) -> None:
        self._lookups = tuple(lookups)
        wanted = ancestors(lookup.index for lookup in lookups)
        nodes = traced.graph_module.graph.nodes
        self.names = [str(n.target) for n in nodes if n.op == "placeholder" and n in wanted]
        self._graph = _copied(traced.graph_module, wanted, [lookup.index for lookup in lookups])

    def worked_out(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[_Lookup, Tensor]]:
        """Raises SpecError where an index on the way to them is out of range itself."""
        if not self._lookups:
            return
        try:
            with torch.no_grad():
                indices = self._graph(**{name: inputs[name] for name in self.names})
        except (RuntimeError, IndexError) as error:
            raise SpecError(
                f"what {' and '.join(self.names)} look up cannot be worked out: {error}",
                where="batch",
                try_="values and lengths that the model alone can run",
            ) from error
        yield from zip(self._lookups, indices, strict=True)


def _outside(lookup: _Lookup, index: Tensor) -> int | None:
    """A value that has no row and is not ignored. One pass where there is none: a copy of the others would cost more
    than all the rest."""
    if not index.numel():
        return None
    low, high = (int(bound) for bound in index.aminmax())
    if low >= 0 and high < lookup.size:
        return None
    outside = index < 0 if high < lookup.size else (index < 0) | (index >= lookup.size)
    if lookup.ignored is not None:
        outside &= index != lookup.ignored
    if not outside.any():
        return None
    low, high = (int(bound) for bound in index[outside].aminmax())
    return low if low < 0 else high


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


_MOVES = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "slice", "select", "narrow", "transpose", "permute",
          "expand", "contiguous", "clone", "alias", "detach", "to", "_to_copy", "pad", "constant_pad_nd")  # fmt: skip
"""Ops whose values are those of their input; padding adds one of its own."""


def _source(lookup: _Lookup) -> str | None:
    """The input whose values, all or some of them, are the index."""
    node = lookup.index
    while node.op == "call_function" and op_name(node) in _MOVES:
        tensors = [n for n in node.all_input_nodes if shapes_of(n)]
        if len(tensors) != 1 or not _adds_nothing(node, lookup):
            return None
        node = tensors[0]
    return str(node.target) if node.op == "placeholder" and not node.meta["dtype"].is_floating_point else None


def _adds_nothing(node: fx.Node, lookup: _Lookup) -> bool:
    """Nothing but what no table is looked up for, or has a row for."""
    if op_name(node) not in ("pad", "constant_pad_nd"):
        return True
    given = node.args[2:] if op_name(node) == "pad" else ("constant", *node.args[2:])
    mode, value = (*given, *("constant", 0)[len(given) :])[:2]
    mode, value = node.kwargs.get("mode", mode), node.kwargs.get("value", value)
    fill = 0 if value is None else value
    return mode != "constant" or fill == lookup.ignored or (isinstance(fill, int | float) and 0 <= fill < lookup.size)


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
