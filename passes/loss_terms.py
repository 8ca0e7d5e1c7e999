"""What a loss is made of: sums over tokens, each divided by a number that the inputs alone give.

    loss = sum over terms t of  f_t(sum_t) / (count_t * divisor_t)

`f_t` scales by constants. Only such a loss is the same however a batch is cut over replicas, sequences and
micro-batches: the sums add up, and the divisors, taken over the whole batch, are known before the model runs. A mean
cross entropy is one term; a masked mean `(l * m).sum() / m.sum()` is one; an auxiliary loss that is added is another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.errors import UnsupportedModelError
from autopar.graph_walks import holds, outputs_of, shapes_of
from autopar.ir import TracedModel
from autopar.runtime.losses import cross_entropy_sum

__all__ = ["Insert", "Term", "loss_node", "loss_terms", "numel", "refuse_terms_without_rows"]

aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # of torch's enumeration of reductions

Insert = Callable[[fx.Graph], fx.Node]
"""Adds nodes at the graph's insertion point and returns the last."""

_ADVICE = (
    "let forward return means over tokens, or a sum of such means, or pass loss_fn; "
    "without dp, cp and micro-batches any loss trains"
)


@dataclass(frozen=True)
class Term:
    """One summand of the loss.

    node         the op that averages or sums, in the captured graph
    total        inserts its sum over all tokens, 0-d
    count        inserts how many of this rank's tokens it averages over, 0-d; None for a sum
    sizes        the same as an expression in (batch, seq), for means over all elements
    steps        linear ops from `node` up to the loss, innermost first: (op, position of the term among its arguments)
    scalings     ops that divide or multiply it by a number of the inputs: (op, position of that number); a `where`
                 that keeps or drops it by a condition on them: (op, position of the branch it is)
    ignored      the target that counts nothing, if there is one
    """

    node: fx.Node
    total: Insert
    count: Insert | None = None
    sizes: sympy.Expr | None = None
    steps: tuple[tuple[fx.Node, int], ...] = ()
    scalings: tuple[tuple[fx.Node, int], ...] = ()
    ignored: int | None = None


def loss_node(graph: fx.Graph, traced: TracedModel) -> fx.Node:
    """The scalar loss among the outputs. Raises UnsupportedModelError if the model returns none."""
    if traced.loss is None:
        raise UnsupportedModelError(
            "the model returns no scalar loss", where="forward", try_="pass labels in the example, or a loss_fn"
        )
    loss = outputs_of(graph)[traced.loss]
    assert isinstance(loss, fx.Node)
    return loss


def loss_terms(graph: fx.Graph, traced: TracedModel) -> tuple[Term, ...]:
    """The summands of the loss of `graph`, a copy of the traced one. Raises UnsupportedModelError naming the op that is
    no mean or sum over tokens."""
    return tuple(_walk(loss_node(graph, traced)))


_ONE_TENSOR = ("to", "_to_copy", "reshape", "neg", "squeeze", "unsqueeze", "clone", "contiguous", "alias")


def _walk(node: fx.Node) -> list[Term]:
    """Terms under `node`, which reaches the loss by linear ops."""
    name = op_name(node) if node.op == "call_function" else node.op
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    if name in _ONE_TENSOR and len(operands) == 1:
        return _stepped(node, 0)
    if name in ("add", "sub") and len(operands) == 2:
        return [term for i in (0, 1) if not _is_zero(operands[i]) for term in _stepped(node, i)]
    if name == "where" and node.meta["shape"] == () and len(node.args) == 3 and not _learns(operands[0]):
        return _chosen(node)
    if name in ("mul", "div") and len(operands) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node):
        return _stepped(node, 0)
    if name == "mul" and len(operands) == 1 and not node.kwargs:
        return _stepped(node, 1)
    if name in ("mul", "div") and len(operands) == 2 and not node.kwargs:
        position = 0 if not _learns(operands[1]) else 1
        if not _learns(operands[1 - position]) and (name == "mul" or position == 0):
            return [
                replace(term, scalings=(*term.scalings, (node, 1 - position))) for term in _walk(operands[position])
            ]
    return [_leaf(node, name)]


def _chosen(node: fx.Node) -> list[Term]:
    """Terms of both branches of `where(n > 0, total / n, 0)`; a branch that is zero has none."""
    terms = []
    for i, branch in enumerate(node.args[1:], 1):
        if isinstance(branch, fx.Node) and not _is_zero(branch):
            terms += [replace(term, scalings=(*term.scalings, (node, i))) for term in _walk(branch)]
        elif branch != 0 and not isinstance(branch, fx.Node):
            return [_leaf(node, "where")]
    return terms


def _is_zero(node: fx.Node) -> bool:
    """What a loop over parts of a loss starts from."""
    return op_name(node) in ("zeros", "new_zeros", "zeros_like") and node.meta["shape"] == ()


def _stepped(node: fx.Node, position: int) -> list[Term]:
    below = node.args[position]
    assert isinstance(below, fx.Node)
    return [replace(term, steps=(*term.steps, (node, position))) for term in _walk(below)]


def _learns(node: fx.Node) -> bool:
    return bool(node.meta.get("grad"))


def _leaf(node: fx.Node, name: str) -> Term:
    build = _LEAVES.get(name)
    term = build(node) if build else None
    if term is None:
        raise UnsupportedModelError(
            f"the loss ends in {name}, which is not known to be a mean or a sum over tokens",
            where=str(node.meta.get("path") or "forward"),
            try_=_ADVICE,
        )
    return term


def refuse_terms_without_rows(terms: tuple[Term, ...], batch: sympy.Symbol) -> None:
    """Raise UnsupportedModelError for a term, such as a penalty on weights, that every part of a batch would add."""
    for node in (term.node for term in terms):
        if not any(holds(size, batch) for n in node.all_input_nodes for shape in shapes_of(n) for size in shape):
            raise UnsupportedModelError(
                f"a summand of the loss ({op_name(node)}) does not depend on the batch: every part would add it",
                where=str(node.meta.get("path") or "forward"),
                try_="weight decay of the optimizer for a penalty on weights, or leave it out",
            )


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _reduction(node: fx.Node) -> Term | None:
    """mean and sum of everything."""
    x = node.args[0]
    if not isinstance(x, fx.Node) or node.meta["shape"] != ():
        return None
    options = {"dtype": node.kwargs["dtype"]} if "dtype" in node.kwargs else {}

    def total(graph: fx.Graph) -> fx.Node:
        return graph.call_function(aten.sum.default, (x,), options)

    return Term(node, total, sizes=numel(x) if op_name(node) == "mean" else None)


def numel(x: fx.Node) -> sympy.Expr:
    """Elements of `x` as an expression in (batch, seq)."""
    product: sympy.Expr = sympy.Integer(1)
    for size in x.meta["shape"]:
        product = product * size
    return product


def _elementwise(reduction_at: int) -> Callable[[fx.Node], Term | None]:
    """Losses of one number an element; the argument at `reduction_at` says how they are reduced."""

    def build(node: fx.Node) -> Term | None:
        reduction = _argument(node, reduction_at, "reduction", _MEAN)
        arguments = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if reduction not in (_MEAN, _SUM) or len(arguments) != 2:
            return None
        widest = max(arguments, key=lambda a: len(a.meta["shape"]))
        return _as_sum(node, reduction_at, numel(widest) if reduction == _MEAN else None)

    return build


def _cross_entropy(node: fx.Node) -> Term | None:
    logits, target = node.args[0], _argument(node, 1, "target", None)
    if not isinstance(target, fx.Node) or not isinstance(logits, fx.Node):
        return None
    weight = _argument(node, 2, "weight", None)
    reduction, ignore = _argument(node, 3, "reduction", _MEAN), _argument(node, 4, "ignore_index", -100)
    smoothing = _argument(node, 5, "label_smoothing", 0.0)
    if reduction not in (_MEAN, _SUM):
        return None
    if target.meta["dtype"].is_floating_point:  # probabilities: every token counts
        tokens = numel(logits) / logits.meta["shape"][-1 if len(logits.meta["shape"]) == 1 else 1]
        return _as_sum(node, 3, tokens if reduction == _MEAN else None)
    if weight is not None or (node.target is aten.cross_entropy_loss.default and len(logits.meta["shape"]) != 2):
        # torch has the classes in dim 1; canonicalize moves them last where it can
        count = _weights_of_targets(weight, target, ignore) if reduction == _MEAN else None
        if smoothing and weight is not None:
            return None  # the smoothed part is weighed by the sum over classes
        return replace(_as_sum(node, 3, None), count=count, ignored=ignore if count else None)
    if len(logits.meta["shape"]) != len(target.meta["shape"]) + 1:
        return None

    def total(graph: fx.Graph) -> fx.Node:
        options = {"ignore_index": ignore, "label_smoothing": smoothing}
        return graph.call_function(cross_entropy_sum, _by_sequence(graph, logits, target, ignore), options)

    count = _weights_of_targets(None, target, ignore) if reduction == _MEAN else None
    return Term(node, total, count, ignored=ignore if count else None)


def _nll(node: fx.Node) -> Term | None:
    """nll_loss; of a log_softmax over the last dim it is the cross entropy of what goes into that."""
    scores, target = node.args[:2]
    weight = _argument(node, 2, "weight", None)
    reduction, ignore = _argument(node, 3, "reduction", _MEAN), _argument(node, 4, "ignore_index", -100)
    if reduction not in (_MEAN, _SUM) or not isinstance(scores, fx.Node) or not isinstance(target, fx.Node):
        return None
    count = _weights_of_targets(weight, target, ignore) if reduction == _MEAN else None
    logits = _under_log_softmax(scores)
    if weight is not None or logits is None or len(scores.meta["shape"]) != 2:
        return replace(_as_sum(node, 3, None), count=count, ignored=ignore if count else None)

    def total(graph: fx.Graph) -> fx.Node:
        return graph.call_function(cross_entropy_sum, (logits, target), {"ignore_index": ignore})

    return Term(node, total, count, ignored=ignore if count else None)


def _under_log_softmax(scores: fx.Node) -> fx.Node | None:
    """x where scores [tokens, classes] is log_softmax(x), or a view of it that keeps the classes last."""
    node = scores
    while node.op == "call_function" and op_name(node) == "reshape" and _keeps_last(node):
        node = node.all_input_nodes[0]
    if node.op != "call_function" or op_name(node) not in ("log_softmax", "_log_softmax"):
        return None
    if node.args[1] not in (-1, len(node.meta["shape"]) - 1) or len(node.meta["shape"]) != 2:
        return None
    below = node.args[0]
    return below if isinstance(below, fx.Node) else None


def _keeps_last(node: fx.Node) -> bool:
    return bool(node.meta["shape"][-1] == node.all_input_nodes[0].meta["shape"][-1])


def _as_sum(node: fx.Node, reduction_at: int, sizes: sympy.Expr | None) -> Term:
    """The op itself with reduction="sum"."""
    target = node.target
    assert callable(target)

    def total(graph: fx.Graph) -> fx.Node:
        if len(node.args) > reduction_at:
            args = (*node.args[:reduction_at], _SUM, *node.args[reduction_at + 1 :])
            return graph.call_function(target, args, dict(node.kwargs))
        return graph.call_function(target, node.args, {**node.kwargs, "reduction": _SUM})

    return Term(node, total, sizes=sizes)


def _weights_of_targets(weight: Any, target: fx.Node, ignore: int) -> Insert:
    """Targets that count, each by its class weight."""

    def count(graph: fx.Graph) -> fx.Node:
        counted = graph.call_function(aten.ne.Scalar, (target, ignore))
        if isinstance(weight, fx.Node):
            ignored = graph.call_function(aten.eq.Scalar, (target, ignore))
            safe = graph.call_function(aten.masked_fill.Scalar, (target, ignored, 0))
            each = graph.call_function(aten.index.Tensor, (weight, [safe]))
            counted = graph.call_function(aten.mul.Tensor, (each, counted))
        return graph.call_function(aten.sum.default, (counted,))

    return count


def _by_sequence(graph: fx.Graph, logits: fx.Node, target: fx.Node, ignore: int) -> tuple[fx.Node, fx.Node]:
    """(logits, target) in which "drop the last k logits, drop the first k labels" became k labels that are ignored:
    they add nothing to a sum and keep every token in its place, so that the sequence can be sharded."""
    if len(logits.meta["shape"]) != 3:
        return logits, target
    whole, labels = _cut(logits, 0), _cut(target, 1)
    if whole is None or labels is None or whole[1] != labels[1]:
        return logits, target
    if whole[0].meta["shape"][:-1] != labels[0].meta["shape"]:
        return logits, target
    padded = graph.call_function(aten.constant_pad_nd.default, (target, [0, whole[1]], ignore))
    padded.meta = {
        **target.meta,
        "shape": labels[0].meta["shape"],
        "key": f"{target.meta['path']}::shifted_labels#{whole[1] - 1}",
    }
    return whole[0], padded


def _cut(node: fx.Node, side: int) -> tuple[fx.Node, int] | None:
    """(the tensor of which `node` drops tokens of dim 1, how many): the last ones (side 0) or the first (side 1)."""
    if op_name(node) != "slice" or len(node.args) != 4 or node.args[1] != 1:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dropped = source.meta["shape"][1] - node.meta["shape"][1]
    if dropped not in range(1, 9) or node.args[2] not in ((None, 0), (int(dropped),))[side]:
        return None
    return source, int(dropped)


_LEAVES: dict[str, Callable[[fx.Node], Term | None]] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll,
    "nll_loss_nd": _nll,
    "mean": _reduction,
    "sum": _reduction,
    **dict.fromkeys(
        ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"], _elementwise(2)
    ),
    "binary_cross_entropy": _elementwise(3),
    "binary_cross_entropy_with_logits": _elementwise(4),
}
