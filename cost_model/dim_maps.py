"""Where a shard of one dim goes through reshape and split.

A shard is (dim, left): dim is seen as (left, inner) and inner is cut over the ranks. Row-major, everything to the left
of the cut factor has size P = product(dims before) * left. A reshape keeps the cut where the result has a dim whose own
left part gives the same P: [b, s, 3 h d] S(2,left=3) is [b, s, 3, h, d] S(3). Sizes may be symbolic; P is compared
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.blocks import op_name
from autopar.ir import Dim

__all__ = ["Shard2", "is_mapped", "map_backward", "map_forward"]

Shard2 = tuple[int, int]
"""(dim, left)"""


def is_mapped(node: fx.Node) -> bool:
    """True for ops whose shards move by `map_forward` and `map_backward`."""
    return op_name(node) in ("reshape", "unflatten", "split", "chunk", "split_with_sizes")


def map_forward(node: fx.Node, source: tuple[Dim, ...], shard: Shard2) -> Shard2 | None:
    """The shard of the result when the argument (of shape `source`) is sharded so; None if it cannot stay sharded."""
    if op_name(node) in ("reshape", "unflatten"):
        return _through_reshape(source, node.meta["shape"], shard)
    dim, parts = _split(node, source)
    if shard[0] != dim:
        return shard
    return (dim, shard[1] // parts) if parts and shard[1] % parts == 0 else None


def map_backward(node: fx.Node, source: tuple[Dim, ...], shard: Shard2) -> Shard2 | None:
    """The shard of the argument that gives this shard of the result."""
    if op_name(node) in ("reshape", "unflatten"):
        return _through_reshape(node.meta["shape"], source, shard)
    dim, parts = _split(node, source)
    if shard[0] != dim:
        return shard
    return (dim, shard[1] * parts) if parts else None


def _split(node: fx.Node, source: tuple[Dim, ...]) -> tuple[int, int]:
    """(dim that is cut, number of equal parts; 0 if they are unequal)."""
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    dim %= len(source)
    pieces = [shape[dim] for shape in node.meta["shape"]]
    return dim, len(pieces) if len(set(pieces)) == 1 else 0


def _through_reshape(source: Sequence[Dim], target: Sequence[Dim], shard: Shard2) -> Shard2 | None:
    before = _product([*source[: shard[0]], shard[1]])
    for dim, size in enumerate(target):
        quotient = _divide(before, _product(target[:dim]))
        if quotient is None:
            continue  # the dims before hold less than P, or the cut falls inside one of them
        if isinstance(size, int) and size % quotient == 0 and size // quotient > 1:
            return dim, quotient
        if not isinstance(size, int) and quotient == 1:
            return dim, 1
    return None


_Monomial = tuple[int, tuple[str, ...]]


def _product(sizes: Sequence[Dim]) -> _Monomial:
    """A product of sizes as (number, sorted symbolic factors); sums such as seq + 1 count as one factor."""
    number, factors = 1, []
    for size in sizes:
        if isinstance(size, int):
            number *= size
            continue
        coefficient, rest = size.as_coeff_Mul()
        number *= int(coefficient)
        for base, exponent in rest.as_powers_dict().items():
            factors += [str(base)] * int(exponent)
    return number, tuple(sorted(factors))


def _divide(a: _Monomial, b: _Monomial) -> int | None:
    """a / b if that is a whole number without symbols, else None."""
    return a[0] // b[0] if a[1] == b[1] and a[0] % b[0] == 0 else None
