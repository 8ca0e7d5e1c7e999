"""Which dims the ranks of a mesh axis may cut: those they divide, and vocabularies.

A vocabulary that does not divide is filled up with zero rows to the next multiple. No token names these rows and the
loss leaves their logits out, so they never get a gradient; only ops that map zeros to finite numbers and reduce nothing
over that dim may see them (PADDABLE).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.dim_maps import Shard2
from autopar.ir import Dim, Shape

__all__ = ["PADDABLE", "Splits", "vocabularies"]

PADDABLE = frozenset(
    {"embedding", "cross_entropy_loss", "cross_entropy_sum", "linear", "to", "_to_copy", "mul", "add", "sub", "neg",
     "tanh", "contiguous", "clone", "slice", "t", "transpose", "reshape", "convert"}
)  # fmt: skip


@dataclass(frozen=True)
class Splits:
    """ranks: of the axis. sizes: values of symbolic dims; a dim with another symbol (the batch) is never cut."""

    ranks: int
    sizes: Mapping[sympy.Symbol, int]
    vocabularies: frozenset[int] = frozenset()

    def __call__(self, shape: Shape, shard: Shard2) -> bool:
        """True if the inner factor of the dim may be cut."""
        size: Dim = shape[shard[0]]
        if not isinstance(size, int):
            if size not in self.sizes:
                return False
            size = self.sizes[size]
        if size % shard[1] == 0 and (size // shard[1]) % self.ranks == 0:
            return True
        rows = -(-size // self.ranks)
        return shard[1] == 1 and size in self.vocabularies and (self.ranks - 1) * rows < size

    def pads(self, size: Dim) -> bool:
        """True if a cut of a dim of this size has a last shard that is filled up."""
        return isinstance(size, int) and size % self.ranks != 0 and size in self.vocabularies


def vocabularies(nodes: Iterable[fx.Node]) -> frozenset[int]:
    """Sizes of embedding tables and of the classes of cross entropies."""
    found = set()
    for node in nodes:
        if op_name(node) == "embedding" and node.op == "call_function":
            found.add(node.all_input_nodes[0].meta["shape"][0])
        elif op_name(node) in ("cross_entropy_loss", "cross_entropy_sum"):
            found.add(node.all_input_nodes[0].meta["shape"][-1])
    return frozenset(size for size in found if isinstance(size, int))
