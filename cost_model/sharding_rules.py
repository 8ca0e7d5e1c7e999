"""How an op may be split over one mesh axis: one line of factor notation for each op.

A rule names the dims of every tensor argument and of the result by letters, einsum-like. Splitting a letter l then
fixes the placement of everything (values and gradients together, see autopar.placement):

    a tensor that has l            S(dim of l)
    an argument that lacks l       R|P   (each rank sees a part of the work, so only a part of the gradient)
    a result that lacks l          P     (each rank holds a summand)

Beside the letters every op can run replicated (all R, or all R|P), and a linear op passes a partial sum through (P ->
P).

Notation, one string an op: `"..k,nk,n>..n"`. `..` stands for any number of leading dims, aligned from the right as in
broadcasting; a dim of size 1 that is broadcast lacks its letter. Lower-case letters may be split, upper-case ones may
not. Arguments are the op's tensor arguments in order, optional ones last. Each ` | ` adds placements of the arguments
under which the op is linear, so that a partial sum passes; it holds for that number of tensor arguments: `mul` has `P`
for a tensor by a number and `P R|P` for a tensor by a tensor, `add` has `P P` but nothing for adding a number.

Ops whose dims depend on other arguments (transpose, slice, cat, sum, ..) are in `structural_rules.py`; reshape and
split, which map a shard of one dim to a shard inside another, in `dim_maps.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from autopar.blocks import op_name
from autopar.ir import Dim
from autopar.placement import Placement, parse_placement

__all__ = ["RULES", "Letter", "Rule", "counts_ids", "parse_rule", "rule_of"]

# Ops on values alone, dim by dim. Partial sums pass only where the op is linear in that argument.
_UNARY = "..>.."
_LINEAR_UNARY = "..>.. | P"
_BINARY = "..,..>.."

RULES: dict[str, str] = {
    # matrices
    "linear": "..k,nk,n>..n | P R|P | P R|P P",
    "matmul": "..mk,..kn>..mn | P R|P | R|P P",
    "bmm": "bmk,bkn>bmn | P R|P | R|P P",
    "addmm": "n,mk,kn>mn | P P R|P",
    "mm": "mk,kn>mn | P R|P | R|P P",
    # experts: tokens sorted by expert, one matrix an expert, and where each expert's tokens end
    **dict.fromkeys(["transformers.grouped_mm_fallback", "_grouped_mm"], "Tk,Ekn,E>Tn | P R|P R | R|P P R"),
    "embedding": "vh,..>..h",
    # attention: batch and heads; the sequence belongs to context parallelism
    "scaled_dot_product_attention": "bhQD,bhKD,bhKE,bhQK>bhQE",
    # norms, over the last dim
    "layer_norm": "..H,H,H>..H",
    "rms_norm": "..H,H>..H",
    # loss: the vocabulary is split by a kernel that communicates inside; see LOSSES
    "cross_entropy_loss": "..v,..>",
    "cross_entropy_sum": "..v,..>",
    "context_attention": "bhSD,bhSD,bhSE>bhSE",
    # elementwise, linear
    "to": _LINEAR_UNARY,
    "_to_copy": _LINEAR_UNARY,
    "neg": _LINEAR_UNARY,
    "clone": _LINEAR_UNARY,
    "contiguous": _LINEAR_UNARY,
    "dropout": _UNARY,
    "detach": _UNARY,
    "add": "..,..>.. | P P",
    "sub": "..,..>.. | P P",
    "mul": "..,..>.. | P | P R|P | R|P P",
    "div": "..,..>.. | P | P R|P",
    "masked_fill": _BINARY,
    "where": "..,..,..>.. | R P P",
    # elementwise, not linear
    **dict.fromkeys(
        ["pow", "rsqrt", "sqrt", "tanh", "sigmoid", "silu", "gelu", "relu", "exp", "log", "cos", "sin", "abs", "square",
         "reciprocal", "softplus", "erf", "logical_not", "bitwise_not", "clamp", "leaky_relu", "elu", "hardswish"],
        _UNARY,
    ),
    **dict.fromkeys(
        ["maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "logical_and", "logical_or",
         "bitwise_and", "bitwise_or", "remainder", "fmod"],
        _BINARY,
    ),
}  # fmt: skip

LOSSES = ("cross_entropy_loss", "cross_entropy_sum")
"""Splitting the vocabulary letter of these gives a complete, replicated loss: the rewritten kernel sums inside. Tokens
of a sum may be split too; a mean over some of them is no summand of the mean."""


@dataclass(frozen=True)
class Letter:
    """One factor: its dim in each tensor argument (None: lacks it) and in the result."""

    name: str
    inputs: tuple[int | None, ...]
    output: int | None


@dataclass(frozen=True)
class Rule:
    """Factors that may be split, and the placements of the arguments under which a partial sum passes."""

    letters: tuple[Letter, ...]
    partial: tuple[tuple[Placement, ...], ...] = ()


def rule_of(node: fx.Node, tensors: list[fx.Node]) -> Rule | None:
    """The rule of an op with a line in RULES, read for these shapes; None for other ops."""
    text = RULES.get(op_name(node))
    if text is None:
        return None
    shapes = [t.meta["shape"] for t in tensors]
    if op_name(node) == "layer_norm" and len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None  # over several dims: the line is about the last one
    if counts_ids(node):
        return None
    if op_name(node) == "scaled_dot_product_attention" and len(shapes) == 4 and len(shapes[3]) < 4:
        text = text.replace("bhQK", "bhQK"[-len(shapes[3]) :])  # a mask is broadcast from the right
    return parse_rule(text, tuple(shapes), node.meta["shape"])


def counts_ids(node: fx.Node) -> bool:
    """Whether an embedding divides the gradient of a row by how often its id comes up (scale_grad_by_freq): of a part
    of the ids that would be another number."""
    return op_name(node) == "embedding" and len(node.args) > 3 and bool(node.args[3])


@lru_cache(maxsize=1 << 12)
def parse_rule(text: str, shapes: tuple[tuple[Dim, ...], ...], out_shape: tuple[Dim, ...]) -> Rule | None:
    """Read a line of RULES for actual shapes. None if the shapes do not have the ranks the line states."""
    head, *partial_texts = text.split(" | ")
    arguments, result = head.split(">")
    specs = arguments.split(",")
    if len(shapes) > len(specs):
        return None
    leading = max(
        len(shape) - _tail(spec)
        for spec, shape in zip([*specs[: len(shapes)], result], [*shapes, out_shape], strict=True)
    )
    names = [_dim_names(spec, len(shape), leading) for spec, shape in zip(specs, shapes, strict=False)]
    out_names = _dim_names(result, len(out_shape), leading)
    if out_names is None or any(n is None for n in names):
        return None
    named = [n for n in names if n is not None]
    sizes = _letter_sizes([*named, out_names], [*shapes, out_shape])
    letters = tuple(
        Letter(
            letter,
            tuple(_dim_of(letter, n, shape, sizes) for n, shape in zip(named, shapes, strict=True)),
            _dim_of(letter, out_names, out_shape, sizes),
        )
        for letter in sizes
        if not letter.isupper() and sizes[letter] != 1
    )
    partial = [tuple(parse_placement(p) for p in t.split()) for t in partial_texts]
    return Rule(letters, tuple(p for p in partial if len(p) == len(shapes)))


def _tail(spec: str) -> int:
    """Number of named dims; a spec without `..` says nothing about leading ones."""
    return len(spec[2:]) if spec.startswith("..") else 10**6


def _dim_names(spec: str, rank: int, leading: int) -> list[str] | None:
    """Letter of each dim; the dims of `..` are called 0, 1, .. aligned from the right over all tensors."""
    if not spec.startswith(".."):
        return list(spec) if len(spec) == rank else None
    tail = spec[2:]
    own = rank - len(tail)
    return None if own < 0 else [str(leading - own + i) for i in range(own)] + list(tail)


def _letter_sizes(names: list[list[str]], shapes: list[tuple[Dim, ...]]) -> dict[str, Dim]:
    """Size of each letter: that of the first tensor where it is not a broadcast 1."""
    sizes: dict[str, Dim] = {}
    for tensor_names, shape in zip(names, shapes, strict=True):
        for letter, size in zip(tensor_names, shape, strict=True):
            if sizes.get(letter, 1) == 1:
                sizes[letter] = size
    return sizes


def _dim_of(letter: str, names: list[str], shape: tuple[Dim, ...], sizes: dict[str, Dim]) -> int | None:
    if letter not in names:
        return None
    dim = names.index(letter)  # a broadcast dim lacks the letter; grouped key/value heads have it at another size
    return None if shape[dim] == 1 and sizes[letter] != 1 else dim
