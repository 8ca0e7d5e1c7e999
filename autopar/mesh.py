"""Rank arithmetic of the device mesh, without a process group.

Ranks are numbered row-major over `AXES`, outermost first, so that the innermost axis (tp) sits on neighbouring devices,
where links are fastest, and the outermost (pp), which talks least, spans nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AXES", "Degrees", "divisors"]

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Size of every mesh axis. Raises ValueError unless all are positive integers."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis} must be a positive integer, not {size!r}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis. Raises ValueError if the rank is outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return position

    def rank(self, **position: int) -> int:
        """Inverse of `coordinates`; axes not named are at 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + position.get(axis, 0)
        return rank

    def group(self, axis: str, rank: int) -> list[int]:
        """The ranks that share every coordinate of `rank` but the one on `axis`."""
        here = self.coordinates(rank)
        return [self.rank(**{**here, axis: i}) for i in range(getattr(self, axis))]

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on `axis`: the product of the axes inside it."""
        return math.prod(getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :])


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, in order, in steps of its square root."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]
