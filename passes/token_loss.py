"""Turn the model's loss into sums over tokens, which are the same however a batch is cut.

before    the loss output is a sum of means (or sums) over tokens, perhaps scaled; see loss_terms
after     the graph returns `loss_sum`, a vector of one sum for each term; `token_count` builds the graph of what they
          are divided by, from the inputs alone
requires  canonicalize
ensures   (sum of loss_sum over all micro-batches and replicas) / (divisors of the whole batch), added up, is the
          model's loss on the whole batch. A loss that is none of this stays whole where the plan cuts no batch
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.errors import UnsupportedModelError
from autopar.graph_walks import ancestors, holds, output_node
from autopar.ir import TracedModel
from autopar.passes.dead_code import drop_dead_code, is_update
from autopar.passes.ends_unseen import seen_ends
from autopar.passes.loss_terms import Insert, Term, loss_node, loss_terms, numel
from autopar.passes.prepare import copy_graph
from autopar.passes.rows_apart import check_rows_apart
from autopar.plan import Plan
from autopar.runtime.tokens import over_replicas

__all__ = ["cuts_batch", "sum_loss", "summed", "token_count"]

aten = torch.ops.aten


def cuts_batch(plan: Plan) -> bool:
    """Whether a step of `plan` sees its global batch in several parts."""
    return plan.degrees.dp * plan.degrees.cp * plan.micro_batches > 1


def sum_loss(graph_module: fx.GraphModule, traced: TracedModel, plan: Plan, *, others: bool = False) -> fx.GraphModule:
    """Make `loss_sum` [terms] the only output of `graph_module`, in place; with `others` it takes the loss's place."""
    graph = graph_module.graph
    output = output_node(graph)
    terms, _ = _terms(graph, traced, plan)
    sums = [_summed(graph, term) for term in terms] or [loss_node(graph, traced)]
    # Gathered after the last of them: a term of an early layer must not draw the others into that layer.
    meta = max((x.meta for x in sums), key=lambda meta: int(meta["segment"]))
    with graph.inserting_before(output):
        vectors = [
            _new(graph, aten.reshape.default, (x, [1]), {**meta, "dtype": x.meta["dtype"]}, f"::loss_term#{i}", (1,))
            for i, x in enumerate(sums)
        ]
        vector = vectors[0]
        if len(vectors) > 1:
            vector = _new(graph, aten.cat.default, (vectors,), meta, "::loss_sum#1", (len(vectors),))
    vector.meta["key"] = "::loss_sum#0"
    if others:
        loss = loss_node(graph, traced)
        output.args = (tuple(vector if x is loss else x for x in output.args[0]),)  # type: ignore[union-attr]
    else:
        output.args = ((vector,),)
    return _clean(graph_module)


def summed(traced: TracedModel, plan: Plan) -> TracedModel:
    """The model with `loss_sum` as its only output, as a step runs it."""
    graph_module = sum_loss(copy_graph(traced.graph_module), traced, plan)
    return replace(traced, graph_module=graph_module, outputs=("loss_sum",))


def token_count(traced: TracedModel, plan: Plan) -> fx.GraphModule:
    """A graph from the model inputs it needs to what the terms of `loss_sum` are divided by, [terms] in fp64.

    meta: "ignored", the target that counts nothing in any term, or None if some term counts every token; "whole",
    whether the loss is one that a batch cannot be cut for; "rows_apart", whether rows may be added to it; "seen_ends",
    of passes/ends_unseen.py where the plan may make sequences longer.
    """
    graph_module = copy_graph(traced.graph_module)
    graph = graph_module.graph
    terms, divisors = _terms(graph, traced, plan)
    lengthens = plan.degrees.cp > 1 or plan.shards_sequence
    seen = seen_ends(graph, traced, terms) if lengthens else ("", "")
    output_node(graph).args = (divisors,)
    for node in [n for n in graph.nodes if is_update(n)]:
        graph.erase_node(node)  # counting is no step
    _clean(graph_module)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
        elif node.op == "get_attr" and node.meta["grad"]:
            raise UnsupportedModelError(
                "what the loss is divided by depends on weights",
                where="loss",
                try_=_DIVISORS,
            )
    counter = fx.GraphModule(graph_module, graph, "TokenCount")
    ignored = {term.ignored for term in terms}
    counter.meta["ignored"] = ignored.pop() if len(ignored) == 1 else None
    counter.meta["rows_apart"] = cuts_batch(plan) or _rows_apart(traced)  # a plan that cuts the batch is refused else
    counter.meta["whole"], counter.meta["seen_ends"] = not terms, seen
    return counter


def _rows_apart(traced: TracedModel) -> bool:
    try:
        check_rows_apart(traced)
    except UnsupportedModelError:
        return False
    return True


def _terms(graph: fx.Graph, traced: TracedModel, plan: Plan) -> tuple[tuple[Term, ...], fx.Node]:
    """Terms of the loss and a node of their divisors. None: the loss is no such sum, and the plan cuts no batch."""
    try:
        terms = loss_terms(graph, traced)
        return terms, _stacked_divisors(graph, traced, terms)
    except UnsupportedModelError:
        if cuts_batch(plan) or traced.loss is None:
            raise
        return (), _stacked_divisors(graph, traced, ())


def _stacked_divisors(graph: fx.Graph, traced: TracedModel, terms: tuple[Term, ...]) -> fx.Node:
    with graph.inserting_before(output_node(graph)):
        divisors = _Divisors(graph, traced)
        each = [divisors.of(term) for term in terms] or [divisors.one()]
        divisors.finish()
        return graph.call_function(torch.stack, (each,))


def _new(graph: fx.Graph, target: Any, args: Any, meta: dict[str, Any], key: str, shape: tuple[int, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {**meta, "key": key, "shape": shape}
    return node


def _summed(graph: fx.Graph, term: Term) -> fx.Node:
    """The term's sum with the scaling between it and the loss done again on it."""
    with graph.inserting_after(term.node):
        anchor = graph.call_function(aten.alias.default, (term.node,))  # a place in order, erased below
    with graph.inserting_before(anchor):
        value = term.total(graph)
        value.meta = {**term.node.meta}
    graph.erase_node(anchor)
    for i, (step, position) in enumerate(term.steps):
        with graph.inserting_before(step):
            value = _again(graph, step, position, value, f"::loss_scaling#{i}")
    return value


def _again(graph: fx.Graph, step: fx.Node, position: int, value: fx.Node, key: str) -> fx.Node:
    """`step` applied to the term alone."""
    if op_name(step) not in ("add", "sub"):
        args = tuple(value if i == position else a for i, a in enumerate(step.args))
        node = graph.call_function(step.target, args, dict(step.kwargs))  # type: ignore[arg-type]
    else:
        alpha = step.kwargs.get("alpha", 1) if position else 1
        factor = -alpha if position and op_name(step) == "sub" else alpha  # type: ignore[operator]
        if factor == 1:
            return value
        node = graph.call_function(aten.mul.Tensor, (value, factor))
    node.meta = {**step.meta, "key": f"{value.meta['key']}{key}"}
    return node


class _Divisors:
    """Builds the divisors of the whole batch: sums over this rank's rows, added over dp, then what is made of them."""

    def __init__(self, graph: fx.Graph, traced: TracedModel) -> None:
        self._graph, self._batch = graph, traced.batch
        self._inputs = {n: n.meta["shape"] for n in graph.nodes if n.op == "placeholder"}
        self._sums: list[fx.Node] = []
        self._made: dict[fx.Node, Any] = {}
        # Totals are the elements of one vector, summed over dp at once; its argument is known when all of them are.
        self._vector = graph.call_function(over_replicas, (None,), {"group": "dp"})

    def of(self, term: Term) -> fx.Node:
        """What divides the term, 0-d fp64; 1 for a plain sum."""
        result = self.one()
        if term.count is not None:
            result = self._total(term.count)
        if term.sizes is not None:
            result = self._size(term.sizes)
        for step, position in term.scalings:
            if op_name(step) == "where":
                result = self._where(step, position, result)
                continue
            factor = self._call(torch.as_tensor, self._whole(step.args[position]), **_DOUBLE)
            result = self._call(torch.mul if op_name(step) == "div" else torch.div, result, factor)
        return result

    def _where(self, step: fx.Node, branch: int, divisor: fx.Node) -> fx.Node:
        """Infinity where `step` takes the other branch: the term adds nothing and has no gradient, whatever it is."""
        dropped = self._call(torch.full, (), float("inf"), **_DOUBLE)
        kept = (divisor, dropped) if branch == 1 else (dropped, divisor)
        return self._call(torch.where, self._whole(step.args[0]), *kept)

    def one(self) -> fx.Node:
        return self._call(torch.ones, (), **_DOUBLE)

    def finish(self) -> None:
        if not self._sums:
            self._graph.erase_node(self._vector)
            return
        with self._graph.inserting_before(self._vector):
            self._vector.args = (self._call(torch.stack, self._sums),)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.call_function(target, args, kwargs)

    def _total(self, rows: Insert) -> fx.Node:
        """What `rows` makes of this rank's rows, 0-d, summed over dp."""
        with self._graph.inserting_before(self._vector):
            self._sums.append(self._call(torch.as_tensor, rows(self._graph), **_DOUBLE))
        return self._call(torch.select, self._vector, 0, len(self._sums) - 1)

    def _size(self, expression: Any) -> Any:
        """An expression in (batch, seq), at the size of the whole batch."""
        expression = sympy.sympify(expression)
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self._symbol(expression)
        target = _ARITHMETIC.get(expression.func)
        if target is None:
            raise UnsupportedModelError(f"the loss is divided by {expression}", where="loss", try_=_DIVISORS)
        parts = [self._size(part) for part in expression.args]
        return functools.reduce(lambda a, b: self._call(target, a, b), parts)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        for node, shape in self._inputs.items():
            if symbol in shape:
                size = functools.partial(_size_of, node, shape.index(symbol))
                return (
                    self._total(size)
                    if symbol == self._batch
                    else self._call(torch.as_tensor, size(self._graph), **_DOUBLE)
                )
        raise UnsupportedModelError(f"the loss averages over {symbol}, not an input size", where="loss", try_=_DIVISORS)

    def _whole(self, node: Any) -> Any:
        """`node`, a number that the inputs give, for the whole batch."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self._made:
            self._made[node] = self._new_whole(node)
        return self._made[node]

    def _reads_no_rows(self, node: fx.Node) -> bool:
        reads = ancestors([node])
        return not any(n in reads and any(holds(d, self._batch) for d in shape) for n, shape in self._inputs.items())

    def _new_whole(self, node: fx.Node) -> Any:
        name = op_name(node) if node.op == "call_function" else node.op
        shape = node.meta["shape"]
        if name == "sym_size":
            source, dim = node.args[:2]
            return self._size(source.meta["shape"][dim])  # type: ignore[union-attr]
        if name == "sym_numel":
            return self._size(numel(node.all_input_nodes[0]))
        if name in ("placeholder", "get_attr") and shape == ():
            return node
        if shape == () and not node.meta.get("grad") and self._reads_no_rows(node):
            return node  # of inputs that every part of a batch reads whole
        if name in ("sum", "mean", "count_nonzero", "any") and shape == () and isinstance(node.args[0], fx.Node):
            x = node.args[0]
            total = self._total(lambda graph: graph.call_function(_counting(name), (x,)))
            if name == "any":
                return self._call(torch.gt, total, 0)
            return total if name != "mean" else self._call(torch.div, total, self._size(numel(x)))
        numbers = all(n.meta["shape"] in ((), None) for n in node.all_input_nodes)
        if shape in ((), None) and node.op == "call_function" and node.all_input_nodes and numbers:
            return self._graph.node_copy(node, self._whole)
        raise UnsupportedModelError(
            f"the loss is divided or chosen by the result of {name}, which is not made of sums over the batch",
            where=str(node.meta.get("path") or "loss"),
            try_=_DIVISORS,
        )


_DIVISORS = "a divisor made of sums over the inputs and of their sizes, like mask.sum().clamp(min=1)"
_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}  # moved when localized
_ARITHMETIC = {sympy.Add: operator.add, sympy.Mul: operator.mul}


def _counting(name: str) -> Any:
    return aten.count_nonzero.default if name in ("count_nonzero", "any") else aten.sum.default


def _size_of(node: fx.Node, dim: int, graph: fx.Graph) -> fx.Node:
    return graph.call_function(aten.sym_size.int, (node, dim))


def _clean(graph_module: fx.GraphModule) -> fx.GraphModule:
    drop_dead_code(graph_module.graph)
    graph_module.recompile()
    return graph_module
