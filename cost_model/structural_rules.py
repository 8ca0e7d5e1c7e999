"""Rules of ops that move or combine dims, read off their arguments: transpose, slice, cat, expand, sum, ...

All but softmax and its kin are linear, so a partial sum passes. A dim that the op cuts, selects from or joins cannot be
split.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.sharding_rules import Letter, Rule
from autopar.placement import PARTIAL, REPLICATE, parse_placement

__all__ = ["structural_rule"]


def structural_rule(node: fx.Node, tensors: list[fx.Node]) -> Rule | None:
    """Rule of a dim-moving op; None if `node` is none. `tensors` are its tensor arguments."""
    build = _STRUCTURAL.get(op_name(node))
    if build is None or not tensors:
        return None
    letters = build(node, tensors)
    if letters is None:
        return None
    # Indices carry no gradient and no part of a sum.
    linear = tuple(PARTIAL if _is_number(t.meta["dtype"]) else REPLICATE for t in tensors)
    return Rule(tuple(letters), () if op_name(node) in _OVER_A_DIM else (linear,))


def _is_number(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _rank(node: fx.Node) -> int:
    return len(node.meta["shape"])


def _argument(node: fx.Node, index: int, name: str, default: object) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _dim(value: object, rank: int) -> int:
    assert isinstance(value, int)
    return value % rank if rank else 0


def _moves(pairs: list[tuple[int, int]], arguments: int = 1) -> list[Letter]:
    """Letters for dims that go from `pairs[i][0]` of every argument to `pairs[i][1]` of the result."""
    return [Letter(str(source), (source,) * arguments, target) for source, target in pairs]


def _transpose(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    rank = _rank(node)
    if op_name(node) == "t":
        a, b = 0, rank - 1
    else:
        a, b = _dim(node.args[1], rank), _dim(node.args[2], rank)
    swap = {a: b, b: a}
    return _moves([(d, swap.get(d, d)) for d in range(rank)])


def _permute(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    order = node.args[1]
    assert isinstance(order, list | tuple)
    return _moves([(_dim(source, _rank(node)), target) for target, source in enumerate(order)])


def _unsqueeze(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    new = _dim(node.args[1], _rank(node))
    return _moves([(d - (d > new), d) for d in range(_rank(node)) if d != new])


def _squeeze(node: fx.Node, tensors: list[fx.Node]) -> list[Letter] | None:
    gone = _argument(node, 1, "dim", None)
    if not isinstance(gone, int):
        return None
    rank = _rank(tensors[0])
    gone = _dim(gone, rank)
    if tensors[0].meta["shape"][gone] != 1:
        return _moves([(d, d) for d in range(rank)])
    return _moves([(d, d - (d > gone)) for d in range(rank) if d != gone])


def _select(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    rank = _rank(tensors[0])
    gone = _dim(node.args[1], rank)
    return _moves([(d, d - (d > gone)) for d in range(rank) if d != gone])


def _keep_all_but(position: int, name: str, default: int) -> Callable[[fx.Node, list[fx.Node]], list[Letter]]:
    """Every dim stays, the one named by an argument cannot be split."""

    def build(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
        cut = _dim(_argument(node, position, name, default), _rank(node))
        return _moves([(d, d) for d in range(_rank(node)) if d != cut], len(tensors))

    return build


def _complex(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    """Pairs of reals in the last dim, to or from complex numbers."""
    return _moves([(d, d) for d in range(min(_rank(node), _rank(tensors[0])))])


def _expand(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    shift = _rank(node) - _rank(tensors[0])
    letters = []
    for d, size in enumerate(node.meta["shape"]):
        source = d - shift
        widened = source < 0 or (tensors[0].meta["shape"][source] == 1 and size != 1)
        letters.append(Letter(str(d), (None if widened else source,), d))
    return letters


def _convert(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    """A conversion over another axis: every dim but those it moves."""
    moved = {p.dim for p in (parse_placement(str(text)) for text in node.args[1:3]) if p.is_shard}
    return _moves([(d, d) for d in range(_rank(node)) if d not in moved])


def _index(node: fx.Node, tensors: list[fx.Node]) -> list[Letter] | None:
    """Entries picked by one index tensor, whose dims take the place of the first: all dims but that one stay."""
    indices = node.args[1]
    if (
        not isinstance(indices, list | tuple)
        or len(indices) != 1
        or len(tensors) != 2
        or node.args[0] is not tensors[0]
    ):
        return None
    picked = len(tensors[1].meta["shape"])
    kept = [Letter(str(d), (d, None), d - 1 + picked) for d in range(1, len(tensors[0].meta["shape"]))]
    if tensors[1].meta["dtype"] == torch.bool:
        return kept
    return [*(Letter(f"i{d}", (None, d), d) for d in range(picked)), *kept]


def _getitem(node: fx.Node, tensors: list[fx.Node]) -> list[Letter]:
    return _moves([(d, d) for d in range(_rank(node))])


def _sum(node: fx.Node, tensors: list[fx.Node]) -> list[Letter] | None:
    """Kept dims stay; a summed dim leaves a partial sum. A mean over a shard is not a summand of the whole mean."""
    rank = _rank(tensors[0])
    dims = _argument(node, 1, "dim", None)
    if not isinstance(dims, list | tuple | int):
        reduced = set(range(rank))
    else:
        reduced = {_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}
    keepdim = bool(_argument(node, 2, "keepdim", False))
    kept = [d for d in range(rank) if d not in reduced]
    letters = [Letter(str(d), (d,), d if keepdim else kept.index(d)) for d in kept]
    if op_name(node) == "sum":
        letters += [Letter(str(d), (d,), None) for d in sorted(reduced)]
    return letters


# Along one dim, and not linear.
_OVER_A_DIM = ("softmax", "_softmax", "log_softmax", "_log_softmax")

_STRUCTURAL: dict[str, Callable[[fx.Node, list[fx.Node]], list[Letter] | None]] = {
    "transpose": _transpose,
    "t": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "slice": _keep_all_but(1, "dim", 0),
    "narrow": _keep_all_but(1, "dim", 0),
    "cat": _keep_all_but(1, "dim", 0),
    "cumsum": _keep_all_but(1, "dim", 0),
    **dict.fromkeys(_OVER_A_DIM, _keep_all_but(1, "dim", -1)),
    "view_as_complex": _complex,
    "view_as_real": _complex,
    "expand": _expand,
    "convert": _convert,
    "index": _index,
    "sum": _sum,
    "mean": _sum,
    operator.getitem.__name__: _getitem,
}
