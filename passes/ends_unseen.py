"""Find what would see tokens added at the end of a sequence.

Sequences that do not divide over cp, or over tp under sequence sharding, are run longer than they are: with tokens
that have no target. That is right where nothing that a token goes through knows of the tokens after it or how many
there are, as in causal attention. A norm over the sequence, a convolution to both sides, a position counted from the
end or a scale by the length run without an error and train another model.

So for every tensor is kept how many of its last elements along the sequence are other ones when the sequence is longer:
a causal convolution pads its input and has some at its end, which the slice after it drops.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.sharding_rules import RULES, rule_of
from autopar.cost_model.strategy_table import tensor_arguments
from autopar.cost_model.structural_rules import structural_rule
from autopar.graph_walks import ATTENTION, ancestors, holds, outputs_of, shapes_of
from autopar.ir import Shape, TracedModel
from autopar.passes.loss_terms import Term
from autopar.passes.op_probe import EndProbe

__all__ = ["seen_ends"]


def seen_ends(graph: fx.Graph, traced: TracedModel, terms: Iterable[Term]) -> tuple[str, str]:
    """Ops that make the loss, and any other output, depend on tokens that are added; "" if none does.

    `graph` is that of `traced` or a copy, with `terms` of its loss. Targets are left out: added tokens have those that
    count nothing.
    """
    summed, ends = {term.node for term in terms}, _Ends(traced)
    loss = [n for term in summed for n in term.all_input_nodes if n.meta["grad"]]
    outputs = [n for n in outputs_of(graph) if isinstance(n, fx.Node) and not summed & ancestors([n])]
    return _named(ends.first_seen(graph, loss)), _named(ends.first_seen(graph, outputs))


def _named(node: fx.Node | None) -> str:
    return "" if node is None else f"{op_name(node)} in {node.meta['path'] or 'forward'}"


class _Ends:
    """Walks a graph; `unlike[node]` elements at the end are other ones in a longer sequence, since `cause[node]`."""

    def __init__(self, traced: TracedModel) -> None:
        self._seq: sympy.Symbol = traced.seq
        self._probe = EndProbe(traced)
        self._unlike: dict[fx.Node, int] = {}
        self._cause: dict[fx.Node, fx.Node] = {}

    def first_seen(self, graph: fx.Graph, results: list[fx.Node]) -> fx.Node | None:
        """An op that makes `results` depend on the end; None if none does."""
        needed = ancestors(results)
        ops: list[fx.Node] = [n for n in graph.nodes if n.op == "call_function" and n in needed]
        for node in ops:
            if isinstance(node.meta["shape"], tuple):
                count = self._last_unlike(node)
                if count is None:
                    return node
                if count:
                    self._unlike[node] = count
                    before = (self._cause[n] for n in node.all_input_nodes if n in self._unlike)
                    self._cause[node] = next(before, node)
                    if not self._long(node):
                        return self._cause[node]
        return next((self._cause[n] for n in results if n in self._unlike), None)

    def _last_unlike(self, node: fx.Node) -> int | None:
        """None where it is not known, or where there is no telling which: the length is an operand."""
        name, tensors = op_name(node), tensor_arguments(node)
        sizes = [n for n in node.all_input_nodes if n.meta["shape"] is None and self._counts_tokens(n)]
        if sizes and name in RULES:
            return None
        carriers = [(i, d) for i, t in enumerate(tensors) for s in shapes_of(t) for d in self._along(s)]
        if not carriers and not sizes:
            return 0
        before = [self._unlike.get(t, 0) for t in tensors]
        if name == ATTENTION:
            causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
            return max(before) if causal else None
        rule = rule_of(node, tensors) or structural_rule(node, tensors)
        if rule is not None:
            letters = [letter.inputs for letter in rule.letters if letter.output is not None]
            kept = {(i, d) for inputs in letters for i, d in enumerate(inputs)}
            if all(carrier in kept for carrier in carriers):
                return max(before)
        return self._probe.unlike(node, self._unlike)

    def _long(self, node: fx.Node) -> bool:
        return any(map(self._along, shapes_of(node)))

    def _along(self, shape: Shape) -> list[int]:
        return [d for d, size in enumerate(shape) if holds(size, self._seq)]

    def _counts_tokens(self, size: fx.Node) -> bool:
        if op_name(size) == "sym_size":
            source, dim = size.args[:2]
            return holds(source.meta["shape"][dim], self._seq)  # type: ignore[union-attr]
        return any(self._counts_tokens(n) for n in size.all_input_nodes if n.meta["shape"] is None)
