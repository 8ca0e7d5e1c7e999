"""Capture a kind of layer once: later calls of an equal layer become one op that is filled in afterwards.

torch.export takes about 0.1 s to 0.3 s for a Transformer layer, because every op runs on fake tensors with symbolic
sizes. The model's own code around the layers runs as always, layer by layer; only the inside of a layer is not run
again. It would be the same graph, because all it can depend on is the same: the layer (see autopar.equal_layers) and
the arguments, compared by structure, value, shape, stride, type and by which of them are one tensor. Whatever else a
layer might do shows in the one that was run, and then nothing is repeated: it uses its own number, reads or leaks
tensors beside arguments and results, changes its arguments or its own attributes. As a last check the last layer of
every group is run, too, and has to give the graph of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from autopar.capture_errors import changed_root
from autopar.equal_layers import LayerNumber, groups_of_equal_layers, hide_numbers, state_of

__all__ = ["LayerGraph", "Repeats", "is_mark", "is_repeat", "layer_graphs"]

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


@torch.library.custom_op(
    "autopar::layer_mark", mutates_args=(), schema="(Tensor[] tensors, int capture, bool end) -> ()"
)
def _mark(tensors: list[Tensor], capture: int, end: bool) -> None:
    """Tells the captured graph which tensors a layer's call was given (end: returned)."""


@torch.library.custom_op(
    "autopar::layer_repeat", mutates_args=(), schema="(Tensor[] tensors, Tensor[] like, int capture) -> Tensor[]"
)
def _repeat(tensors: list[Tensor], like: list[Tensor], capture: int) -> list[Tensor]:
    raise AssertionError("a repeated layer was not filled in")


@_mark.register_fake
def _(tensors: list[Tensor], capture: int, end: bool) -> None:
    return None


@_repeat.register_fake
def _(tensors: list[Tensor], like: list[Tensor], capture: int) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in like]


_repeat.register_autograd(lambda ctx, *gradients: None)
has_side_effect(torch.ops.autopar.layer_mark.default)  # or torch.export drops it: it returns nothing


def is_mark(node: fx.Node) -> bool:
    return node.target is torch.ops.autopar.layer_mark.default


def is_repeat(node: fx.Node) -> bool:
    return node.target is torch.ops.autopar.layer_repeat.default


@dataclass
class Capture:
    """One call of a layer that was run.

    number    the marks in the graph carry it
    path      of the layer in the shell
    tensors   what the call returned as tensors, arguments that are passed through left out
    result    its return value with every tensor replaced by ("argument" | "result", index)
    last      the same call of the last equal layer, run as a check
    times     how often it was repeated
    """

    number: int
    path: str
    tensors: list[Tensor]
    result: Any
    last: Capture | None = None
    times: int = 0


class Repeats:
    """Wraps the equal layers of a shell; afterwards knows what was repeated, and whether that may be trusted."""

    def __init__(self, shell: nn.Module) -> None:
        self.captures: list[Capture] = []
        self.paths: list[str] = []
        self.doubt = ""
        self._numbers: list[LayerNumber] = []
        groups = list(groups_of_equal_layers(shell))
        for members, numbers in groups:
            self._numbers += hide_numbers(members, numbers)
            known: dict[Any, Capture] = {}
            for path, layer in members:
                layer.forward = self._wrapped(layer, path, known, last=path == members[-1][0])

    @property
    def trusted(self) -> bool:
        return not self.doubt and not any(n.used for n in self._numbers)

    @property
    def user_paths(self) -> tuple[str, ...]:
        """Paths of the repeated layers in the user's model."""
        return tuple(p.removeprefix("model.") for p in self.paths)

    def _wrapped(self, layer: nn.Module, path: str, known: dict[Any, Capture], *, last: bool) -> Callable[..., Any]:
        original = layer.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = _Call(layer, args, kwargs)
            if call.key is None:
                return original(*args, **kwargs)
            first = known.get(call.key)
            if first is None or last:
                capture, result = self._run(original, call, path, args, kwargs)
                if capture is not None and first is None:
                    known[call.key] = capture
                elif first is not None:
                    first.last = capture
                return result
            self.paths.append(path)
            first.times += 1
            return self._repeated(first, call)

        return forward

    def _run(
        self, original: Callable[..., Any], call: _Call, path: str, args: Any, kwargs: Any
    ) -> tuple[Capture | None, Any]:
        number = len(self.captures)
        _mark(call.tensors, number, False)
        attributes = _attributes(call.layer)
        result = original(*args, **kwargs)
        if _attributes(call.layer) != attributes:
            self.doubt = f"{path} changes its own attributes"
        capture = _describe(result, call, number, path)
        self.captures.append(capture or Capture(number, path, [], None))
        _mark([] if capture is None else capture.tensors, number, True)
        return capture, result

    def _repeated(self, first: Capture, call: _Call) -> Any:
        results = _repeat(call.tensors, first.tensors, first.number) if first.tensors else []
        with torch._C.DisableTorchFunction():
            if any(r.requires_grad != t.requires_grad for r, t in zip(results, first.tensors, strict=True)):
                self.doubt = f"{first.path} returns tensors with and without gradient"
        places = {"argument": call.tensors, "result": results}

        def fill(leaf: Any) -> Any:
            return places[leaf.kind][leaf.index] if isinstance(leaf, _Place) else leaf

        return pytree.tree_map(fill, first.result)


@dataclass(frozen=True)
class _Place:
    kind: str
    index: int


class _Call:
    """The tensors of one call, state of the layer included, and a key equal for calls that must do the same.

    The key is None if the call has something whose effect cannot be compared: an object, or hooks inside the layer.
    """

    def __init__(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self.layer = layer
        state = state_of(layer)
        self.tensors = list({id(t): t for t in [*leaves, *state] if isinstance(t, Tensor)}.values())
        place = {id(t): i for i, t in enumerate(self.tensors)}
        with torch._C.DisableTorchFunction():  # reading a shape is an op to torch.export, and not a cheap one
            described = [_description(leaf, place) for leaf in leaves]
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in list(layer.modules())[1:])
        known = not hooked and None not in described
        self.key = (
            (spec, tuple(described), tuple(place[id(t)] for t in state), torch.is_grad_enabled()) if known else None
        )


def _description(leaf: Any, place: dict[int, int]) -> Any:
    if isinstance(leaf, Tensor):
        sizes = tuple(_size(s) for s in (*leaf.shape, *leaf.stride()))
        return (place[id(leaf)], sizes, leaf.dtype, leaf.requires_grad, leaf.layout, type(leaf))
    if isinstance(leaf, torch.SymInt):
        return ("size", _size(leaf))
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else None


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _describe(result: Any, call: _Call, number: int, path: str) -> Capture | None:
    """The capture of a call from what it returned; None if that holds something that cannot be repeated."""
    leaves, spec = pytree.tree_flatten(result)
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    given = {id(t): _Place("argument", i) for i, t in enumerate(call.tensors)}
    made: dict[int, Tensor] = {id(t): t for t in leaves if isinstance(t, Tensor) and id(t) not in given}
    places = {**given, **{key: _Place("result", i) for i, key in enumerate(made)}}
    filled = [places[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Capture(number, path, list(made.values()), spec.unflatten(filled))


def _attributes(layer: nn.Module) -> list[Any]:
    """What a call may change beside tensors: the attributes of all modules, one level deep."""
    return [(name, [(k, id(v)) for k, v in vars(m).items()]) for name, m in layer.named_modules()]


@dataclass(frozen=True)
class LayerGraph:
    """The nodes of a layer that was run: what it read, its ops in order, what it returned."""

    path: str
    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    def self_contained(self) -> bool:
        """True if the ops read and change nothing but the inputs and each other, and only the results are read."""
        inside, readable = set(self.nodes), set(self.inputs)
        for node in self.nodes:
            if any(n not in inside and n not in readable and is_tensor(n) for n in node.all_input_nodes):
                return False
            root = changed_root(node)
            if root is not None and root not in inside:
                return False
            leaks = node not in self.results and is_tensor(node) and not _returns_its_argument(node)
            if leaks and any(u not in inside for u in node.users):
                return False
        return True

    def same_as(self, other: LayerGraph) -> bool:
        """True if `other` has the same tensor ops in the same order on the same tensors and sizes."""
        place = dict(zip(self.inputs, other.inputs, strict=True))
        ours, theirs = self.tensor_ops(), other.tensor_ops()
        if len(ours) != len(theirs):
            return False
        for x, y in zip(ours, theirs, strict=True):
            arguments = fx.node.map_arg((x.args, x.kwargs), lambda n: _size_or(place.get(n, n)))
            wanted = fx.node.map_arg((y.args, y.kwargs), _size_or)
            if x.target != y.target or repr(arguments) != repr(wanted):
                return False
            place[x] = y
        return tuple(place.get(n, n) for n in self.results) == other.results

    def tensor_ops(self) -> list[fx.Node]:
        """The ops without arithmetic of sizes, which torch.export records where a size is first needed."""
        return [n for n in self.nodes if is_tensor(n)]


def _size_or(node: fx.Node) -> Any:
    return node if is_tensor(node) else node.meta["val"]


def layer_graphs(graph: fx.Graph, repeats: Repeats) -> dict[int, LayerGraph] | None:
    """The graphs of the layers that were run, by number; None if what was repeated may not be trusted."""
    if not repeats.trusted:
        return None
    graphs: dict[int, LayerGraph] = {}
    begin, inputs = -1, ()
    inside: list[fx.Node] = []
    for node in graph.nodes:
        if is_mark(node):
            tensors, number, end = node.args
            if end != (begin == number):
                return None
            if end:
                graphs[number] = LayerGraph(repeats.captures[number].path, inputs, tuple(inside), tuple(tensors))
            begin, inside, inputs = (-1 if end else number), [], tuple(tensors)
        elif begin >= 0 and node.op == "call_function":
            inside.append(node)
    return graphs if _hold(graphs, repeats) else None


def _hold(graphs: dict[int, LayerGraph], repeats: Repeats) -> bool:
    for capture in repeats.captures:
        if capture.times and not (capture.number in graphs and graphs[capture.number].self_contained()):
            return False
        if capture.last is not None and not graphs[capture.number].same_as(graphs[capture.last.number]):
            return False
    return True


def _returns_its_argument(node: fx.Node) -> bool:
    """True for `x.to(x.dtype)`: the tensor is x, and whoever reads x after this layer seems to read this node."""
    source = node.args[0] if node.args else None
    if not (isinstance(source, fx.Node) and isinstance(node.target, torch._ops.OpOverload)):
        return False
    return node.target.overloadpacket is torch.ops.aten.to and node.meta["val"].dtype == source.meta["val"].dtype


def is_tensor(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool)
