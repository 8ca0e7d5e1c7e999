"""What a block executes on one rank: its kernels as arrays of sizes, without any rate.

Sizes and rates are kept apart so that one layout, worked out once, is priced on many machines (and by the fit of the
constants) by a few array operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ATTENTION", "MATMUL", "MEMORY", "PRODUCT", "Kernel", "Kernels"]

MATMUL, PRODUCT, ATTENTION, MEMORY = range(4)
"""Kinds: a weight matrix (fp8 where the recipe says so), a product of two activations, an attention core, the rest."""

Array = npt.NDArray[np.float64]


class Kernel(NamedTuple):
    """One kernel at local sizes.

    m, n, k, batch  matmul: `batch` products [m,k] x [k,n]; attention: queries, keys, head_dim, batch x heads
    moved_bytes     read and written, in units of the activation dtype's bytes as the graph states them
    backward        0 forward, 1 gradient of an input, 2 gradient of a weight (attention: 1 is its whole backward)
    share           fraction of the [m, n] matrix a causal kernel works on (1 for all else)
    fused_bytes     of a memory-bound op: what it moves where the stack fuses chains; 0 if another op of its chain
                    carries it, negative if not known (then moved_bytes)
    launches        kernels that it really is where nothing is fused
    """

    kind: int
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    batch: float = 1.0
    moved_bytes: float = 0.0
    backward: int = 0
    share: float = 1.0
    fused_bytes: float = -1.0
    launches: float = 1.0

    @property
    def flops(self) -> float:
        """Executed flops; the backward of a fused attention does five matmuls where its forward does two."""
        if self.kind == MEMORY:
            return 0.0
        whole = 2.0 * self.m * self.n * self.k * self.batch * self.share
        if self.kind == ATTENTION:
            return whole * (5.0 if self.backward else 2.0)
        return whole


class Kernels:
    """Columns of `Kernel`, one row a kernel."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self.rows = tuple(kernels)
        table = np.array(self.rows, dtype=float).reshape(-1, len(Kernel._fields)).T
        self.kind: Array
        (
            self.kind,
            self.m,
            self.n,
            self.k,
            self.batch,
            self.moved_bytes,
            self.backward,
            self.share,
            fused,
            self.launches,
        ) = table
        self.fused_bytes = np.where(fused < 0, self.moved_bytes, fused)
        self.is_matmul, self.is_product = self.kind == MATMUL, self.kind == PRODUCT
        self.is_attention, self.is_memory = self.kind == ATTENTION, self.kind == MEMORY

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, chosen: npt.NDArray[np.bool_]) -> Kernels:
        return Kernels(row for row, keep in zip(self.rows, chosen, strict=True) if keep)

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)
