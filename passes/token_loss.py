"""Turn the model's mean loss into (sum over tokens, number of tokens), which are the same however a batch is cut.

before    the loss output is cross_entropy_loss(reduction=mean) over non-ignored targets, or another mean, perhaps
scaled after     the graph returns `loss_sum` of shape [1]; `token_count` builds the graph of the count from the inputs
alone requires  canonicalize
ensures   sum of loss_sum over all micro-batches and replicas / sum of counts = the model's loss on the whole batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.errors import UnsupportedModelError
from autopar.ir import TracedModel
from autopar.passes.dead_code import drop_dead_code, is_update
from autopar.passes.prepare import copy_graph
from autopar.runtime.losses import cross_entropy_sum

__all__ = ["loss_term", "sum_loss", "token_count"]

aten = torch.ops.aten
_MEAN, _SUM = 1, 2
_LINEAR = ("to", "reshape", "mul", "div", "neg", "squeeze", "unsqueeze")


def sum_loss(graph_module: fx.GraphModule, traced: TracedModel) -> fx.GraphModule:
    """Make `loss_sum` [1] the only output of `graph_module`, in place."""
    graph = graph_module.graph
    loss = _loss_node(graph, traced)
    term = _term(loss)
    with graph.inserting_before(term.node):
        total = term.make_sum(graph)
        total.meta = {**term.node.meta}
    term.node.replace_all_uses_with(total)
    output = _output(graph)
    loss = total if loss is term.node else loss
    with graph.inserting_before(output):
        vector = graph.call_function(aten.reshape.default, (loss, [1]))
        vector.meta = {**loss.meta, "shape": (1,), "key": "::loss_sum#0"}
    output.args = ((vector,),)
    return _clean(graph_module)


def loss_term(traced: TracedModel) -> fx.Node:
    """The op that averages, below any scaling by constants. Raises UnsupportedModelError if there is none."""
    return _term(_loss_node(traced.graph_module.graph, traced)).node


def token_count(traced: TracedModel) -> fx.GraphModule | None:
    """A graph from the model inputs it needs to the number of loss terms (0-d); None if the loss already is a sum."""
    graph_module = copy_graph(traced.graph_module)
    graph = graph_module.graph
    term = _term(_loss_node(graph, traced))
    output = _output(graph)
    with graph.inserting_before(output):
        count = term.make_count(graph)
    if count is None:
        return None
    output.args = (count,)
    for node in [n for n in graph.nodes if is_update(n)]:
        graph.erase_node(node)  # counting is no step
    _clean(graph_module)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
        elif node.op == "get_attr" and node.meta["grad"]:
            raise UnsupportedModelError("the number of loss terms depends on activations", where="loss", try_=_ADVICE)
    counter = fx.GraphModule(graph_module, graph, "TokenCount")
    counter.meta["ignore_index"] = term.ignore_index
    return counter


@dataclass(frozen=True)
class _Term:
    """The averaging op under the loss: how to make it a sum, and what it averages over."""

    node: fx.Node
    make_sum: Callable[[fx.Graph], fx.Node]
    make_count: Callable[[fx.Graph], fx.Node | None]
    ignore_index: int = -100


_ADVICE = "let forward return one mean cross entropy over tokens, or pass loss_fn"


def _loss_node(graph: fx.Graph, traced: TracedModel) -> fx.Node:
    if traced.loss is None:
        raise UnsupportedModelError(
            "the model returns no scalar loss", where="forward", try_="pass labels in the example, or a loss_fn"
        )
    loss = _output(graph).args[0][traced.loss]  # type: ignore[index]
    assert isinstance(loss, fx.Node)
    return loss


def _output(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return output


def _term(loss: fx.Node) -> _Term:
    """Walk down from the loss through scaling by constants to the op that averages."""
    node = loss
    while (below := _below_scaling(node)) is not None:
        node = below
    build = _TERMS.get(op_name(node)) if node.op == "call_function" else None
    term = build(node) if build else None
    if term is None:
        raise UnsupportedModelError(
            f"the loss ends in {op_name(node)}, which is not known to be a mean over tokens",
            where=str(node.meta.get("path") or "forward"),
            try_=_ADVICE,
        )
    return term


def _below_scaling(node: fx.Node) -> fx.Node | None:
    """What `node` multiplies by a constant, or by a number the batch brings along (`num_items_in_batch`)."""
    if node.op != "call_function" or op_name(node) not in _LINEAR:
        return None
    first = node.args[0]
    others = [n for n in node.all_input_nodes if n is not first]
    twice = sum(a is first for a in node.args) > 1
    return first if isinstance(first, fx.Node) and not twice and all(_is_number(n) for n in others) else None


def _is_number(node: fx.Node) -> bool:
    """A 0-d value computed from 0-d inputs alone: the same for every part of a batch."""
    if node.op == "placeholder":
        return bool(node.meta["shape"] == ())
    computed = node.op == "call_function" and node.meta["shape"] == () and bool(node.all_input_nodes)
    return computed and all(_is_number(n) for n in node.all_input_nodes)


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _cross_entropy(node: fx.Node) -> _Term | None:
    logits, target = node.args[0], _argument(node, 1, "target", None)
    weight = _argument(node, 2, "weight", None)
    reduction, ignore = _argument(node, 3, "reduction", _MEAN), _argument(node, 4, "ignore_index", -100)
    smoothing = _argument(node, 5, "label_smoothing", 0.0)
    if weight is not None or reduction not in (_MEAN, _SUM):
        return None
    if not isinstance(target, fx.Node) or not isinstance(logits, fx.Node):
        return None
    if target.meta["dtype"].is_floating_point or len(logits.meta["shape"]) != len(target.meta["shape"]) + 1:
        return None
    if node.target is aten.cross_entropy_loss.default and len(logits.meta["shape"]) != 2:
        return None  # torch has the classes in dim 1 there; canonicalize moves them where it can

    def make_sum(graph: fx.Graph) -> fx.Node:
        options = {"ignore_index": ignore, "label_smoothing": smoothing}
        return graph.call_function(cross_entropy_sum, _by_sequence(graph, logits, target, ignore), options)

    def make_count(graph: fx.Graph) -> fx.Node | None:
        if reduction == _SUM:
            return None
        return graph.call_function(aten.sum.default, (graph.call_function(aten.ne.Scalar, (target, ignore)),))

    return _Term(node, make_sum, make_count, ignore)


def _by_sequence(graph: fx.Graph, logits: Any, target: fx.Node, ignore: int) -> tuple[fx.Node, fx.Node]:
    """(logits, target) in which "drop the last logit, drop the first label" became a label that is ignored: it adds
    nothing to a sum and keeps every token in its place, so that the sequence can be sharded."""
    if len(logits.meta["shape"]) != 3:
        return logits, target
    whole, labels = _cut(logits, 0), _cut(target, 1)
    if whole is None or labels is None or whole.meta["shape"][:-1] != labels.meta["shape"]:
        return logits, target
    padded = graph.call_function(aten.constant_pad_nd.default, (target, [0, 1], ignore))
    padded.meta = {**target.meta, "shape": labels.meta["shape"], "key": f"{target.meta['path']}::shifted_labels#0"}
    return whole, padded


def _cut(node: fx.Node, side: int) -> fx.Node | None:
    """The tensor of which `node` drops one token of dim 1: the last (side 0) or the first (side 1)."""
    if op_name(node) != "slice" or len(node.args) < 4 or node.args[1] != 1 or len(node.args) > 4:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    one_less = source.meta["shape"][1] - node.meta["shape"][1] == 1
    return source if one_less and node.args[2] in ((None, 0), (1,))[side] else None


def _mean(node: fx.Node) -> _Term | None:
    x = node.args[0]
    if len(node.args) > 1 or node.kwargs or not isinstance(x, fx.Node):
        return None

    def make_sum(graph: fx.Graph) -> fx.Node:
        return graph.call_function(aten.sum.default, (x,))

    return _Term(node, make_sum, lambda graph: _numel(graph, x))


def _squared_error(node: fx.Node) -> _Term | None:
    x, y = node.args[:2]
    reduction = _argument(node, 2, "reduction", _MEAN)
    if reduction not in (_MEAN, _SUM) or not isinstance(x, fx.Node):
        return None
    target = node.target
    assert callable(target)

    def make_sum(graph: fx.Graph) -> fx.Node:
        return graph.call_function(target, (x, y, _SUM))

    return _Term(node, make_sum, lambda graph: _numel(graph, x) if reduction == _MEAN else None)


def _numel(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Number of elements from sizes of the inputs, without running the model."""
    shape = x.meta["shape"]
    total: Any = 1
    for size in shape:
        factor = size if isinstance(size, int) else _input_size(graph, size)
        total = factor if total == 1 else graph.call_function(torch.mul, (total, factor))
    return graph.call_function(torch.as_tensor, (total,))


def _input_size(graph: fx.Graph, size: Any) -> fx.Node:
    for node in graph.nodes:
        if node.op == "placeholder" and size in node.meta["shape"]:
            dim = node.meta["shape"].index(size)
            return graph.call_function(torch.as_tensor, (graph.call_function(aten.sym_size.int, (node, dim)),))
    raise UnsupportedModelError(f"the loss averages over {size}, not an input size", where="loss", try_=_ADVICE)


_TERMS: dict[str, Callable[[fx.Node], _Term | None]] = {
    "cross_entropy_loss": _cross_entropy,
    "mean": _mean,
    "mse_loss": _squared_error,
    "l1_loss": _squared_error,
}


def _clean(graph_module: fx.GraphModule) -> fx.GraphModule:
    drop_dead_code(graph_module.graph)
    graph_module.recompile()
    return graph_module
