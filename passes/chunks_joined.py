"""Write a loss that is summed over chunks of tokens as that of all tokens. Plan-independent.

before    `hidden.flatten(0, 1).chunk(n)` or `.split(size)`, the same ops on every chunk, each ending in a sum over its
          tokens, the sums added up
after     these ops once, on the whole
requires  canonicalize, losses_apart
ensures   same values, up to the order of the additions. Chunks of joined rows and tokens go across rows, so that no
          batch could be cut, and are as many as the captured one fills. Chunks whose ops take tokens together, that are
          averaged one by one or added with weights of their own, stay
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.sharding_rules import rule_of
from autopar.cost_model.strategy_table import tensor_arguments
from autopar.cost_model.structural_rules import structural_rule
from autopar.passes.canonicalize import read_sizes_off_inputs
from autopar.passes.dead_code import drop_dead_code
from autopar.passes.known_ops import Writer

__all__ = ["chunks_joined"]

_NONE, _MEAN, _SUM = 0, 1, 2  # of torch's enumeration of reductions
_LOSSES = {"cross_entropy_loss": 3, "nll_loss": 3, "nll_loss_nd": 3}
"""Losses, and where their reduction stands among the arguments."""


def chunks_joined(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    chunks = _Chunks(graph)
    families: defaultdict[str, dict[int, fx.Node]] = defaultdict(dict)
    for node, number in chunks.sums():
        families[chunks.text(node)].setdefault(number, node)
    joined = False
    for sums in families.values():
        parts = [sums[i] for i in sorted(sums)]
        if set(sums) == set(range(chunks.count(parts[0]))) and _added_up(parts):
            _join(graph, chunks, parts)
            joined = True
    if joined:
        drop_dead_code(graph)
        read_sizes_off_inputs(graph)
        graph_module.recompile()
    return graph_module


class _Chunks:
    """Ops that treat the tokens of one chunk apart, and which chunk it is."""

    def __init__(self, graph: fx.Graph) -> None:
        self._number: dict[fx.Node, int] = {}  # of nodes that hold the tokens of a chunk, in dim 0, or their sum
        self._cut: dict[fx.Node, fx.Node] = {}  # such a node -> one of the ops that cut
        self._text: dict[fx.Node, str] = {}
        self._sums: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "call_function":
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        if node.target is operator.getitem and _cuts_tokens(node.args[0]):
            self._number[node], self._cut[node] = int(node.args[1]), node.args[0]  # type: ignore[arg-type, assignment]
            return
        read = [n for n in node.all_input_nodes if n in self._number]
        if len({self._number[n] for n in read}) != 1 or not isinstance(node.meta["shape"], tuple):
            return
        sums = self._is_sum(node)
        if sums or self._keeps_tokens(node, read):
            self._number[node], self._cut[node] = self._number[read[0]], self._cut[read[0]]
            self._sums += [node] if sums else []

    def _is_sum(self, node: fx.Node) -> bool:
        if node.meta["shape"] != () or any(n.meta["shape"] == () for n in node.all_input_nodes if n in self._number):
            return False
        if op_name(node) == "sum":
            return not node.kwargs and len(node.args) == 1
        return _reduction(node) == _SUM

    def _keeps_tokens(self, node: fx.Node, read: list[fx.Node]) -> bool:
        if _reduction(node) is not None:
            return _reduction(node) == _NONE
        tensors = tensor_arguments(node)
        rule = rule_of(node, tensors) or structural_rule(node, tensors)
        if rule is None or node.meta["shape"] == ():
            return False
        places = [i for i, t in enumerate(tensors) if t in read]
        return any(x.output == 0 and all(x.inputs[i] == 0 for i in places) for x in rule.letters)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._number

    def sums(self) -> list[tuple[fx.Node, int]]:
        return [(node, self._number[node]) for node in self._sums]

    def count(self, node: fx.Node) -> int:
        return len(self._cut[node].meta["shape"])

    def source(self, item: fx.Node) -> fx.Node | None:
        """What `item` is a chunk of."""
        cut = item.args[0] if item in self._number and item.target is operator.getitem else None
        whole = cut.args[0] if isinstance(cut, fx.Node) and _cuts_tokens(cut) else None
        return whole if isinstance(whole, fx.Node) else None

    def text(self, node: fx.Node) -> str:
        """Equal for what is done to one chunk and to another."""
        if node not in self._text:
            whole = self.source(node)
            if node not in self._number:
                self._text[node] = node.name
            elif whole is not None:
                self._text[node] = f"chunk({whole.name}, {node.args[0].args[1]})"  # type: ignore[union-attr]
            else:
                arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: _Text(self.text(n)))  # type: ignore[arg-type, return-value]
                self._text[node] = f"{node.target}{arguments}"
        return self._text[node]


class _Text:
    """Prints as its text inside fx's nested argument containers."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _reduction(node: fx.Node) -> int | None:
    """Of a loss; None for other ops."""
    place = _LOSSES.get(op_name(node))
    if place is None:
        return None
    found: Any = node.args[place] if len(node.args) > place else node.kwargs.get("reduction", _MEAN)
    return int(found)


def _cuts_tokens(node: Any) -> bool:
    """Whether `node` cuts dim 0, and that is rows and tokens joined."""
    if not isinstance(node, fx.Node) or op_name(node) not in ("chunk", "split", "split_with_sizes", "tensor_split"):
        return False
    if (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) != 0:
        return False
    size = node.args[0].meta["shape"][0]  # type: ignore[union-attr]
    return len(getattr(size, "free_symbols", ())) == 2


def _added_up(parts: list[fx.Node]) -> bool:
    """Whether nothing is done with the sums but to add them to one another, alike."""
    tops = set()
    for part in parts:
        while len(part.users) == 1 and op_name(user := next(iter(part.users))) == "add" and not user.kwargs:
            part = user
        tops.add(part)
    return len(tops) == 1 and parts[0] not in tops


def _join(graph: fx.Graph, chunks: _Chunks, parts: list[fx.Node]) -> None:
    whole: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(parts[0]):
        total = _on_the_whole(graph, chunks, parts[0], whole)
        zero = Writer(graph, parts[0]).op(torch.ops.aten.zeros.default, ([],), ())
    zero.meta.update(dtype=parts[0].meta["dtype"], grad=False)
    zero.kwargs = {"dtype": parts[0].meta["dtype"]}
    for part in parts:
        part.replace_all_uses_with(total if part is parts[0] else zero)


def _on_the_whole(graph: fx.Graph, chunks: _Chunks, node: fx.Node, whole: dict[fx.Node, fx.Node]) -> fx.Node:
    """`node` of all tokens instead of one chunk's."""
    if node not in chunks:
        return node
    if node not in whole:
        source = chunks.source(node)
        if source is None:
            source = graph.node_copy(node, lambda n: _on_the_whole(graph, chunks, n, whole))
            first = next(n for n in node.all_input_nodes if n in chunks)
            tokens = _on_the_whole(graph, chunks, first, whole).meta["shape"][:1]
            source.meta = {**node.meta, "shape": node.meta["shape"] and (*tokens, *node.meta["shape"][1:])}
            source.meta.pop("val", None)
        whole[node] = source
    return whole[node]
