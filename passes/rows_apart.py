"""Check that rows of a batch do not meet before the loss: a batch may be cut only if no op mixes them.

A graph with batch statistics or an in-batch contrastive loss runs under any plan without an error and trains another
model. The sharding rules know which dim of an op goes where: wherever a dim that holds rows is reduced, cut, normalised
over, or meets itself in the result, rows have met. An op without a rule is tried out, on a whole batch and on its
halves (op_probe). Sizes count too: a micro-batch that divides by its own number of rows computes something else.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.sharding_rules import LOSSES, RULES, counts_ids, rule_of
from autopar.cost_model.strategy_table import tensor_arguments
from autopar.cost_model.structural_rules import structural_rule
from autopar.errors import UnsupportedModelError
from autopar.graph_walks import ancestors, holds, output_node, shapes_of
from autopar.ir import Dim, TracedModel
from autopar.passes.loss_terms import loss_node, loss_terms, refuse_terms_without_rows
from autopar.passes.op_probe import RowProbe

__all__ = ["check_rows_apart"]


def check_rows_apart(traced: TracedModel, *, outputs: bool = False) -> None:
    """Raise UnsupportedModelError if an op that the loss needs mixes rows; with `outputs`, one of any output."""
    graph = traced.graph_module.graph
    terms = loss_terms(graph, traced)
    needed = ancestors([below for term in terms for below in term.node.all_input_nodes])
    if outputs:
        loss = loss_node(graph, traced)
        needed |= ancestors([n for n in output_node(graph).all_input_nodes if n is not loss])
    check = _Rows(traced)
    for node in graph.nodes:
        if node.op == "call_function" and node in needed and check.mixes(node):
            _refuse(node)
    refuse_terms_without_rows(terms, traced.batch)
    for term in terms:
        logits = term.node.args[0]
        if op_name(term.node) in LOSSES and isinstance(logits, fx.Node) and check.holds_rows(logits.meta["shape"][-1]):
            _refuse(term.node)


def _refuse(node: fx.Node) -> None:
    does = "numbers" if op_name(node) in _NUMBERING else "mixes"
    raise UnsupportedModelError(
        f"{op_name(node)} {does} the rows of a batch, so the batch cannot be cut over replicas or micro-batches",
        where=node.meta["path"] or "forward",
        try_="pin dp=1 and cp=1 with the whole batch in one micro-batch, or move what compares rows out of the model",
    )


class _Rows:
    """Follows the dims that hold rows: those whose size has the batch as a factor."""

    def __init__(self, traced: TracedModel) -> None:
        self._batch = traced.batch
        self._probe = RowProbe(traced)
        nodes = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
        # Tokens are sorted by expert, multiplied and put back in a module of grouped products.
        self._experts = {n.meta["path"] for n in nodes if "grouped_mm" in op_name(n)}
        self._stacked = all(map(self._stacks, nodes))

    def holds_rows(self, size: Dim) -> bool:
        return holds(size, self._batch)

    def mixes(self, node: fx.Node) -> bool:
        name, shape = op_name(node), node.meta["shape"]
        if not isinstance(shape, tuple):
            return False
        if (name in RULES and self._counts_rows(node)) or counts_ids(node):
            return True
        if name in _NUMBERING:
            numbers = any(map(self.holds_rows, shape)) and node.meta["path"] not in self._experts
            return numbers and not self._picks_own_rows(node)
        tensors = tensor_arguments(node)
        carriers = [(i, d) for i, t in enumerate(tensors) for d, size in enumerate(_dims(t)) if self.holds_rows(size)]
        if not carriers:
            return False
        if any(sum(map(self.holds_rows, dims)) > 1 for dims in shapes_of(node)):
            return True
        if node.meta["path"] in self._experts and all(_dims(tensors[i])[d] != self._batch for i, d in carriers):
            return False
        if name in _BY_SIZE:
            return not _BY_SIZE[name](self, node)
        rule = rule_of(node, tensors) or structural_rule(node, tensors)
        if rule is None:
            found = self._probe.mixes(node)
            return self._says_so(node, tensors, carriers) if found is None else found
        kept = {(i, d) for x in rule.letters if x.output is not None for i, d in enumerate(x.inputs) if d is not None}
        return any(carrier not in kept for carrier in carriers)

    def _picks_own_rows(self, numbers: fx.Node) -> bool:
        """Whether numbers of rows do nothing but pick each row of a batch: `x[torch.arange(batch), last]`."""
        for user in numbers.users:
            name = op_name(user) if user.op == "call_function" else user.op
            if name in ("unsqueeze", "reshape", "expand", "to", "clone", "contiguous"):
                if not self._picks_own_rows(user):
                    return False
                continue
            picked, indices = (*user.args[:2], None, None)[:2]
            own = isinstance(indices, list | tuple) and bool(indices) and indices[0] is numbers
            if name != "index" or not own or _dims(picked)[0] != self._batch:  # type: ignore[arg-type]
                return False
        return numbers.meta["shape"].count(self._batch) == 1 and self._holds_whole_batch(numbers)

    def _holds_whole_batch(self, node: fx.Node) -> bool:
        return all(not self.holds_rows(size) or size == self._batch for size in node.meta["shape"])

    def _says_so(self, node: fx.Node, tensors: list[fx.Node], carriers: list[tuple[int, int]]) -> bool:
        """Of an op that cannot be tried out here: it is named to work along rows, or no result has any."""
        if not any(self.holds_rows(size) for shape in shapes_of(node) for size in shape):
            return True
        names = (
            [a.name for a in node.target._schema.arguments] if isinstance(node.target, torch._ops.OpOverload) else []
        )
        dim = node.kwargs.get("dim")
        if "dim" in names and names.index("dim") < len(node.args):
            dim = node.args[names.index("dim")]
        return isinstance(dim, int) and (0, dim % len(_dims(tensors[0]))) in carriers

    def _counts_rows(self, node: fx.Node) -> bool:
        """Whether a size with the batch in it is an operand of arithmetic."""
        return any(n.meta["shape"] is None and self._sized_by_rows(n) for n in node.all_input_nodes)

    def _sized_by_rows(self, node: fx.Node) -> bool:
        if op_name(node) == "sym_size":
            source, dim = node.args[:2]
            return self.holds_rows(source.meta["shape"][dim])  # type: ignore[union-attr]
        return any(self._sized_by_rows(n) for n in node.all_input_nodes if n.meta["shape"] is None)

    def _times_batch(self, size: Dim) -> bool:
        """Whether `size` is k whole batches (or holds none)."""
        return not self.holds_rows(size) or not self.holds_rows(sympy.cancel(size / self._batch))

    def _stacks(self, node: fx.Node) -> bool:
        """Whether a dim of several batches that `node` makes, if it does, holds one after the other."""
        before = {size for t in tensor_arguments(node) for size in _dims(t)}
        several = [s for shape in shapes_of(node) for s in shape if self._several(s) and s not in before]
        return not several or op_name(node) == "cat"

    def _several(self, size: Dim) -> bool:
        return self.holds_rows(size) and size != self._batch and sympy.cancel(size / self._batch).is_Integer

    def _reshape(self, node: fx.Node) -> bool:
        """Rows stay apart: as many batches as before, and what stands left of a dim that is the batch is the same."""
        source, target = _dims(node.all_input_nodes[0]), node.meta["shape"]
        if not all(map(self._times_batch, target)) or self._batch not in source or self._batch not in target:
            return all(map(self._times_batch, target))
        left = [sympy.Mul(*shape[: shape.index(self._batch)]) for shape in (source, target)]
        return bool(sympy.expand(left[0] - left[1]) == 0)

    def _split(self, node: fx.Node) -> bool:
        """Pieces of a dim of several batches are whole batches."""
        source, pieces = _dims(node.all_input_nodes[0]), shapes_of(node)
        changed = [d for d, size in enumerate(source) if any(piece[d] != size for piece in pieces)]
        return all(not self.holds_rows(source[d]) or self._whole([p[d] for p in pieces]) for d in changed)

    def _whole(self, sizes: list[Dim]) -> bool:
        """Whether dims of rows cut to `sizes` are cut between batches."""
        return self._stacked and all(self.holds_rows(s) and self._times_batch(s) for s in sizes)

    def _cat(self, node: fx.Node) -> bool:
        """Along a dim of rows, whole batches are put one after the other."""
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        assert isinstance(dim, int)
        sizes = [_dims(t)[dim] for t in tensor_arguments(node)]
        return not any(map(self.holds_rows, sizes)) or all(self.holds_rows(s) and self._times_batch(s) for s in sizes)

    def _slice(self, node: fx.Node) -> bool:
        """Of a dim of several batches, the first or the last ones are taken."""
        dim, start, end = (*node.args[1:4], None, None, None)[:3]
        assert isinstance(dim, int | None)
        before, after = _dims(node.all_input_nodes[0])[dim or 0], node.meta["shape"][dim or 0]
        at_an_end = start in (None, 0) or end is None or (isinstance(end, int) and end >= 2**31)
        return not self.holds_rows(before) or (at_an_end and self._whole([after]))


_NUMBERING = ("arange", "linspace", "eye", "tril_indices", "triu_indices")
"""Ops that make numbers from a size: of rows, their place in whatever part of the batch runs."""

_BY_SIZE = {
    "reshape": _Rows._reshape,
    "split": _Rows._split,
    "chunk": _Rows._split,
    "split_with_sizes": _Rows._split,
    "cat": _Rows._cat,
    "slice": _Rows._slice,
}


def _dims(node: fx.Node) -> tuple[Dim, ...]:
    return next(iter(shapes_of(node)), ())
