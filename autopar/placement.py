"""Placement of a tensor over one mesh axis: of its value and of its gradient together.

An edge of the graph carries both, because a forward collective and its backward dual are one decision:

    text           value       gradient    meaning
    R              replicated  replicated  every rank holds the same tensor and the same, complete gradient
    R|P            replicated  partial     same value, each rank has a summand of the gradient
    S(d)           sharded     sharded     rank r holds slice r of dim d
    S(d,left=l)    sharded     sharded     dim d seen as (l, size/l): rank r holds slice r of the inner factor
    P              partial     replicated  the value is the sum over ranks, the gradient is complete on each

`left` > 1 is a strided shard. It is what a fused q|k|v projection needs: its output dim is (3, hidden), and rank r must
hold slice r of each third. On a tensor without gradient R and R|P are the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "CONVERSIONS",
    "LAST_RESORT",
    "PARTIAL",
    "REPLICATE",
    "REPLICATE_PARTIAL_GRAD",
    "Placement",
    "Shard",
    "parse_placement",
]


_KNOWN: dict[tuple[str, int, int], Placement] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """One of R, R|P, S(dim[,left]), P; see the module docstring. Equal ones are one object: the search compares and
    looks up millions of them."""

    kind: str
    dim: int = -1
    left: int = 1

    def __new__(cls, kind: str, dim: int = -1, left: int = 1) -> Placement:
        key = (kind, dim, left)
        return _KNOWN.get(key) or _KNOWN.setdefault(key, object.__new__(cls))

    def __reduce__(self) -> tuple[type[Placement], tuple[str, int, int]]:
        return (Placement, (self.kind, self.dim, self.left))  # one object in this process and in the next

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        """True if the value is a sum still to be taken over the axis."""
        return self.kind == "P"

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the whole value (whatever its gradient)."""
        return self.kind in ("R", "R|P")

    def __str__(self) -> str:
        if not self.is_shard:
            return self.kind
        return f"S({self.dim})" if self.left == 1 else f"S({self.dim},left={self.left})"


REPLICATE = Placement("R")
REPLICATE_PARTIAL_GRAD = Placement("R|P")
PARTIAL = Placement("P")


def Shard(dim: int, left: int = 1) -> Placement:
    """Sharded along `dim` (non-negative), inside the factor to the right of `left` when the dim is (left, inner)."""
    return Placement("S", dim, left)


_SHARD = re.compile(r"S\((\d+)(?:,\s*left=(\d+))?\)|shard\((\d+)\)")
_WORDS = {"R": REPLICATE, "replicate": REPLICATE, "R|P": REPLICATE_PARTIAL_GRAD, "P": PARTIAL}


def parse_placement(text: str) -> Placement:
    """Inverse of `str(placement)`; also takes `shard(1)` and `replicate`. Raises ValueError on anything else."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    found = _SHARD.fullmatch(text)
    if found is None:
        raise ValueError(f"not a placement: {text!r} (R, R|P, P, S(dim), S(dim,left=n))")
    dim, left, plain_dim = found.groups()
    if len(max(found.groups("0"), key=len)) > 9 or (left is not None and int(left) == 0):
        raise ValueError(f"no tensor has such a dim or so many parts: {text[:40]!r}")
    return Shard(int(plain_dim)) if plain_dim is not None else Shard(int(dim), int(left or 1))


# (from, to) -> (collective of the value, collective of the gradient). Bytes for a whole tensor of N over n ranks:
# all_gather, reduce_scatter N(n-1)/n; all_reduce twice that; all_to_all N(n-1)/n^2; slice and pad move nothing.
CONVERSIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("R", "R|P"): ("none", "all_reduce"),
    ("R", "S"): ("slice", "all_gather"),
    ("R", "P"): ("keep_first", "none"),
    ("R|P", "S"): ("slice", "pad"),
    ("S", "R"): ("all_gather", "slice"),
    ("S", "R|P"): ("all_gather", "reduce_scatter"),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("P", "R"): ("all_reduce", "none"),
    ("P", "R|P"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
}
"""What a change of placement costs. R -> P keeps the value on rank 0, zeros elsewhere: how a bias joins a partial sum
once, with its gradient complete on every rank. S -> P and R|P -> P are never needed and not offered."""

LAST_RESORT: dict[tuple[str, str], tuple[str, str]] = {("R|P", "R"): ("none", "keep_first")}
"""What is never worth it, so neither priced nor chosen where there is a choice: every rank has the whole gradient, and
one of them hands it on as its summand. Over cp a linear with a part cut out of a weight may leave no choice, beside
tokens that cannot be cut."""
