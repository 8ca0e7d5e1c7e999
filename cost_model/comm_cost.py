"""Seconds a collective takes: alpha-beta per level of the network, groups placed where the mesh puts them.

Bytes are always those of the whole, unsharded tensor (N). Per rank a ring moves 2 N (n-1)/n for an all-reduce,
N (n-1)/n for all-gather and reduce-scatter, N (n-1)/n^2 for an all-to-all, and pays one latency per step. The slowest
level a group crosses sets the pace. A group that spans several units of a level (nodes) has k members in each, so k
network cards, which share the flow of a ring (NCCL's parallel rings). A rank's part of an all-to-all passes through its
own card, but only what goes to the n - k ranks of other units; a send through one card, whole. A stage of a pipeline
has two neighbours, and where a node holds several stages only one of them is behind that card. `bandwidth` of a link is
per device with all devices talking, which is the case for every axis of an SPMD mesh, so `shared_by` needs no further
division. Where a link has measured figures of a collective, those take the place of its own.
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

_NO_RINGS = frozenset({"all_to_all", "send"})
"""Kinds that do not flow through all cards of a node alike."""

_Rate = tuple[float, float]
"""bytes/s, seconds a message."""


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SIZES = (0.0, 1e3, 1e6, 1e9, 1e12)
"""Bytes at which two groups are compared: collectives are affine in between (an all-reduce: a minimum of affine)."""


@dataclass(frozen=True)
class GroupCost:
    """Communication cost of one group of `size` ranks; all methods take whole-tensor bytes and return seconds.

    own        (kind, bytes/s, seconds a message) of collectives whose figures are not those of a ring
    near_send  bytes/s and seconds of a send to the nearer of a rank's two neighbours; None: as far as the other
    """

    size: int
    bytes_per_s: float
    latency_s: float
    reduces_in_network: bool = False
    own: tuple[tuple[str, float, float], ...] = ()
    near_send: _Rate | None = None

    def seconds(self, kind: str, whole_bytes: float) -> float:
        """`kind` is a collective of `autopar.placement.CONVERSIONS`, or "send" (whole_bytes over the longest hop)."""
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

    def between_neighbours(self, nbytes: float) -> float:
        """Seconds of a message of so many bytes from each of a rank's two neighbours, one after the other."""
        if self.near_send is None:
            return 2 * self.seconds("send", nbytes)
        bytes_per_s, latency_s = self.near_send
        return self.seconds("send", nbytes) + nbytes / bytes_per_s + latency_s

    def comes_back(self, passes: float, memory_bytes_per_s: float) -> float:
        """Part of the time of collectives that hide behind compute by which they slow it down, if each byte that a rank
        moves goes so often through its memory: a slow network leaves most of a memory's bandwidth to the rest."""
        return min(1.0, passes * self.bytes_per_s / memory_bytes_per_s) if self.size > 1 else 0.0

    def in_messages(self, kind: str, whole_bytes: float, messages: int) -> float:
        """Seconds of `whole_bytes` in so many equal collectives, one after the other."""
        return messages * self.seconds(kind, whole_bytes / messages) if messages else 0.0

    def _rate(self, kind: str) -> _Rate:
        for name, bytes_per_s, latency_s in self.own:
            if name == kind:
                return bytes_per_s, latency_s
        return self.bytes_per_s, self.latency_s

    def scales_from(self, fewer: GroupCost) -> bool:
        """True if every collective takes at least fewer.size / self.size of what it takes over the smaller group."""
        return _scales(self, fewer)

    def least_pace(self, slower: GroupCost) -> float:
        """Every collective takes at least this part of its seconds over `slower`, a group of as many."""
        pairs = [(self.seconds(k, n), slower.seconds(k, n)) for k in _KINDS for n in _SIZES]
        return min((own / other for own, other in pairs if other > 0), default=1.0)

    def _all_reduce(self, whole_bytes: float, bytes_per_s: float, latency_s: float) -> float:
        """The cheaper of a ring and a double tree, as NCCL chooses; in-network reduction moves every byte once."""
        n = self.size
        if self.reduces_in_network:
            return whole_bytes / bytes_per_s + 2 * latency_s
        ring = 2 * whole_bytes * (n - 1) / n / bytes_per_s + 2 * (n - 1) * latency_s
        tree = 2 * whole_bytes / bytes_per_s + 2 * math.ceil(math.log2(n)) * latency_s
        return min(ring, tree)


@lru_cache(maxsize=4096)
def _scales(group: GroupCost, fewer: GroupCost) -> bool:
    if fewer.size == 1:
        return False
    share = fewer.size / group.size
    return all(group.seconds(k, n) >= share * fewer.seconds(k, n) for k in _KINDS for n in _SIZES)


def group_cost(cluster: ClusterSpec, degrees: Degrees, axis: str) -> GroupCost:
    """Cost of the groups of one mesh axis, ranks numbered as `autopar.mesh` does. The slowest group counts."""
    return _group_cost(cluster.links, getattr(degrees, axis), degrees.stride(axis))


@lru_cache(maxsize=65536)
def _group_cost(links: tuple[LinkSpec, ...], size: int, stride: int) -> GroupCost:
    if size == 1:
        return GroupCost(1, math.inf, 0.0)
    crossed = _crossed(links, size * stride, stride)
    reduces = all(link.in_network_reduction for link, _ in crossed)
    kinds = {own.kind for link, _ in crossed for own in link.collectives}
    if any(members > 1 for _, members in crossed):
        kinds |= _NO_RINGS
    own = tuple((kind, *_slowest(crossed, kind, size)) for kind in sorted(kinds))
    near = _slowest(crossed[:-1], "send", size) if crossed[-1][1] > 1 and len(crossed) > 1 else None
    return GroupCost(size, *_slowest(crossed, "", size), reduces, own, near)


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


def _slowest(crossed: list[tuple[LinkSpec, int]], kind: str, size: int) -> _Rate:
    """Of one kind of collective over levels, each with members of the group in a unit below it; "" for a ring's."""
    slowest, latency_s = math.inf, 0.0
    for link, members in crossed:
        bandwidth, latency = link.rate(kind)
        slowest, latency_s = min(slowest, bandwidth * cards_used(kind, size, members)), max(latency_s, latency)
    return slowest, latency_s


def cards_used(kind: str, size: int, members: int) -> float:
    """Over how many links of a level a rank's flow of a collective spreads, of a group of `size` that has so many
    members in each unit below the level. An all-to-all: how many times less than all of it crosses the level."""
    if kind == "send":
        return 1.0
    return (size - 1) / (size - members) if kind == "all_to_all" else members


def _fits(extent: int, span: int) -> bool:
    """True if aligned runs of `extent` devices never cross a border between units of `span` devices."""
    return extent <= span and span % extent == 0
