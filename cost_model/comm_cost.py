"""Seconds a collective takes: alpha-beta per level of the network, groups placed where the mesh puts them.

Bytes are always those of the whole, unsharded tensor (N). Per rank a ring moves 2 N (n-1)/n for an all-reduce,
N (n-1)/n for all-gather and reduce-scatter, N (n-1)/n^2 for an all-to-all, and pays one latency per step. A group that
spans several units of a level (nodes) has k members in each, so k network cards: its flow over that level is divided by
k, and the slowest level it crosses sets the pace (as NCCL's parallel rings do). `bandwidth` of a link is per device
with all devices talking, which is the case for every axis of an SPMD mesh, so `shared_by` needs no further division.
Where a link has measured figures of a collective, those take the place of its own; a send and a rank's part of an
all-to-all pass through that rank's card alone, and figures of them are taken so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from autopar.mesh import Degrees
from autopar.specs import ClusterSpec, LinkSpec

__all__ = ["LOCAL_KINDS", "GroupCost", "cards_used", "group_cost"]

LOCAL_KINDS = frozenset({"none", "slice", "pad", "keep_first"})
"""Parts of a conversion that move nothing."""

_ONE_CARD = frozenset({"all_to_all", "send"})
"""Kinds that no ring divides among the cards of a node. Under a link's own figures, which the constants were fitted
with, they are divided all the same: a preset is too fast for a ring of cp with several members in a node."""


@dataclass(frozen=True)
class GroupCost:
    """Communication cost of one group of `size` ranks; all methods take whole-tensor bytes and return seconds.

    own    (kind, bytes/s, seconds a message) of collectives that have figures of their own
    """

    size: int
    bytes_per_s: float
    latency_s: float
    reduces_in_network: bool = False
    own: tuple[tuple[str, float, float], ...] = ()

    def seconds(self, kind: str, whole_bytes: float) -> float:
        """`kind` is a collective of `autopar.placement.CONVERSIONS`, or "send" (whole_bytes over one hop)."""
        if self.size == 1 or kind in LOCAL_KINDS:
            return 0.0
        n, (bytes_per_s, latency_s) = self.size, self._rate(kind)
        if kind == "all_reduce":
            return self._all_reduce(whole_bytes, bytes_per_s, latency_s)
        if kind in ("all_gather", "reduce_scatter"):
            return whole_bytes * (n - 1) / n / bytes_per_s + (n - 1) * latency_s
        if kind == "all_to_all":
            return whole_bytes * (n - 1) / n**2 / bytes_per_s + (n - 1) * latency_s
        if kind == "send":
            return whole_bytes / bytes_per_s + latency_s
        raise ValueError(f"unknown collective {kind!r}")

    def in_messages(self, kind: str, whole_bytes: float, messages: int) -> float:
        """Seconds of `whole_bytes` in so many equal collectives, one after the other."""
        return messages * self.seconds(kind, whole_bytes / messages) if messages else 0.0

    def _rate(self, kind: str) -> tuple[float, float]:
        for name, bytes_per_s, latency_s in self.own:
            if name == kind:
                return bytes_per_s, latency_s
        return self.bytes_per_s, self.latency_s

    def scales_from(self, fewer: GroupCost) -> bool:
        """True if every collective takes at least fewer.size / self.size of what it takes over the smaller group."""
        if fewer.size == 1:
            return False
        share = fewer.size / self.size
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        sizes = (0.0, 1e3, 1e6, 1e9, 1e12)  # affine in between (an all-reduce: a minimum of affine)
        return all(self.seconds(k, n) >= share * fewer.seconds(k, n) for k in kinds for n in sizes)

    def _all_reduce(self, whole_bytes: float, bytes_per_s: float, latency_s: float) -> float:
        """The cheaper of a ring and a double tree, as NCCL chooses; in-network reduction moves every byte once."""
        n = self.size
        if self.reduces_in_network:
            return whole_bytes / bytes_per_s + 2 * latency_s
        ring = 2 * whole_bytes * (n - 1) / n / bytes_per_s + 2 * (n - 1) * latency_s
        tree = 2 * whole_bytes / bytes_per_s + 2 * math.ceil(math.log2(n)) * latency_s
        return min(ring, tree)


def group_cost(cluster: ClusterSpec, degrees: Degrees, axis: str) -> GroupCost:
    """Cost of the groups of one mesh axis, ranks numbered as `autopar.mesh` does. The slowest group counts."""
    return _group_cost(cluster.links, getattr(degrees, axis), degrees.stride(axis))


@lru_cache(maxsize=65536)
def _group_cost(links: tuple[LinkSpec, ...], size: int, stride: int) -> GroupCost:
    if size == 1:
        return GroupCost(1, math.inf, 0.0)
    crossed, reduces = _crossed(links, size * stride, stride), True
    for link, _ in crossed:
        reduces = reduces and link.in_network_reduction
    kinds = {own.kind for link, _ in crossed for own in link.collectives}
    own = tuple((kind, *_slowest(crossed, kind)) for kind in sorted(kinds))
    return GroupCost(size, *_slowest(crossed, ""), reduces, own)


def _crossed(links: tuple[LinkSpec, ...], extent: int, stride: int) -> list[tuple[LinkSpec, int]]:
    """Levels that the groups use, each with the members a group has in one unit of the level below."""
    found, inner_span = [], 1
    for link in links:
        if _fits(extent, inner_span):
            break  # every group lies inside one unit of the level below
        if stride < link.span or link is links[-1]:  # else members are further apart than this level reaches
            found.append((link, max(1, math.gcd(inner_span, extent) // stride)))
        inner_span = link.span
    return found


def _slowest(crossed: list[tuple[LinkSpec, int]], kind: str) -> tuple[float, float]:
    """(bytes/s, seconds a message) of a collective; "" for the links' own figures."""
    slowest, latency_s = math.inf, 0.0
    for link, members_per_unit in crossed:
        bandwidth, latency = link.rate(kind)
        measured = any(own.kind == kind for own in link.collectives)
        cards = cards_used(kind, members_per_unit) if measured else members_per_unit
        slowest, latency_s = min(slowest, bandwidth * cards), max(latency_s, latency)
    return slowest, latency_s


def cards_used(kind: str, members_per_unit: int) -> int:
    """Links of a level that a measured collective's flow is divided among, if its group has so many members a unit."""
    return 1 if kind in _ONE_CARD else members_per_unit


def _fits(extent: int, span: int) -> bool:
    """True if aligned runs of `extent` devices never cross a border between units of `span` devices."""
    return extent <= span and span % extent == 0
