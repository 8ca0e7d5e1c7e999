"""The exported program as a graph of the user's own tensors, repeated layers filled in."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from autopar.binding import graph_names
from autopar.repeated_layers import LayerGraph, is_mark, is_repeat

__all__ = ["graph_module", "plain_graph", "symbols_of"]

_CONSTANT = torch.export.graph_signature.InputKind.CONSTANT_TENSOR
_USER_INPUT = torch.export.graph_signature.InputKind.USER_INPUT


def plain_graph(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    shell: nn.Module,
    leaves: Mapping[str, Any],
    layers: Mapping[int, LayerGraph],
) -> fx.GraphModule:
    """A fresh GraphModule: state as get_attr of the user's tensors, inputs under the user's names, meta["path"] set.

    `exported.module()` would add guard functions and an input-checking hook; the bare graph has neither.
    """
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    copies: dict[fx.Node, Any] = {}
    find = _StateOf(exported, model, shell)
    input_names = iter(graph_names([n for n, v in leaves.items() if isinstance(v, torch.Tensor)]).values())
    placeholders = (n for n in exported.graph.nodes if n.op == "placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind == _USER_INPUT:
            copies[node] = graph.placeholder(next(input_names))
        else:
            name, attributes_value = find(spec)
            attributes[name] = attributes_value
            copies[node] = graph.get_attr(name)
        copies[node].meta = {**node.meta, "path": ""}
    for node in exported.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda n: copies[n])).meta["path"] = ""
        elif is_repeat(node):
            copies[node] = _fill_in(graph, node, layers[node.args[2]], copies)
        elif node.target is operator.getitem and is_repeat(node.args[0]):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op != "placeholder" and not is_mark(node):
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta["path"] = _path(node)
    return graph_module(attributes, graph)


def graph_module(attributes: Mapping[str, Any] | fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """`graph` over exactly these tensors; get_attr only looks them up, so no wrapper modules are needed.

    Its Python code is made at the first call: passes change the graph many times before anyone runs it.
    """
    owner = attributes if isinstance(attributes, fx.GraphModule) else dict(attributes)
    return _LazyGraphModule(owner, graph, "Traced")


def _fill_in(graph: fx.Graph, call: fx.Node, layer: LayerGraph, copies: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Copy the ops of `layer`, reading the tensors of `call`; return what the call returns."""
    local = {x: copies[y] for x, y in zip(layer.inputs, call.args[0], strict=True)}  # type: ignore[arg-type]
    here, there = _path(call), layer.path.removeprefix("model").removeprefix(".")
    for node in layer.tensor_ops():  # sizes are those of the layer that was run: equal, and computed before
        copy = graph.node_copy(node, lambda n: local[n] if n in local else copies[n])
        path = _path(node)
        inside = path == there or path.startswith(f"{there}.")
        copy.meta["path"] = here + path[len(there) :] if inside else path
        local[node] = copy
    return [local[n] for n in layer.results]


class _StateOf:
    """Name and tensor of a lifted input of the exported program: the user's own, under its canonical name."""

    def __init__(self, exported: torch.export.ExportedProgram, model: nn.Module, shell: nn.Module) -> None:
        self._constants = exported.constants
        self._state: dict[str, torch.Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._shell_buffers = dict(shell.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        self._canonical = {name: first.setdefault(id(tensor), name) for name, tensor in self._state.items()}

    def __call__(self, spec: torch.export.graph_signature.InputSpec) -> tuple[str, Any]:
        target = str(spec.target)
        if spec.kind == _CONSTANT:
            return f"_constants.{target.replace('.', '_')}", self._constants[target]
        name = target.removeprefix("model.")
        name = self._canonical.get(name, name)
        tensor = self._state[name]
        return name, self._shell_buffers[name] if name in self._shell_buffers and tensor.is_meta else tensor


def symbols_of(value: torch.Tensor, dim: int) -> list[sympy.Symbol]:
    """Symbols in the size of one dim of a fake tensor."""
    size: Any = value.shape[dim] if value.dim() > dim else None
    if not isinstance(size, torch.SymInt):
        return []
    return [s for s in size.node.expr.free_symbols if isinstance(s, sympy.Symbol)]


def _path(node: fx.Node) -> str:
    """Innermost user module, without the shell's prefix and export's call counters ("norm@1")."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0].split("@")[0] for entry in stack.values()]
    inner = paths[-1] if paths else ""
    inner = "" if "empty_nn_module_stack" in inner else inner
    return inner.removeprefix("model").removeprefix(".") if inner.startswith("model") else ""
