"""Clusters of unequal groups: the equal cluster that every layout runs on, and the view that a stage has of its group.

Ranks are numbered group after group. Pipeline stages are runs of neighbouring ranks, so where every group is a whole
number of stages, each stage has one kind of device and only sends cross from group to group. Any other layout runs at
the pace of the slowest: equal devices with the least of every figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import SpecError
from autopar.specs import ClusterSpec, CollectiveSpec, DeviceSpec, GroupSpec, LinkSpec, StackSpec

__all__ = ["MOST_GROUPS", "as_slowest", "group_view", "mixed_cluster", "rank_ranges", "reordered"]

MOST_GROUPS = 4
"""Every order of the groups along the pipeline is searched."""


def mixed_cluster(name: str, groups: tuple[GroupSpec, ...], between: LinkSpec, stack: StackSpec) -> ClusterSpec:
    """Raises SpecError for a single group, for more than MOST_GROUPS, or devices without a common dtype."""
    if not 2 <= len(groups) <= MOST_GROUPS:
        raise SpecError(
            f"{len(groups)} groups", where="group", try_=f"2 to {MOST_GROUPS}; without [[group]] all are equal"
        )
    total = sum(group.num_devices for group in groups)
    return ClusterSpec(
        name=name, device=_slowest_device(groups), num_devices=total, links=_slowest_links(groups, between, total),
        stack=stack, groups=groups,
    )  # fmt: skip


def as_slowest(cluster: ClusterSpec) -> ClusterSpec:
    """The equal cluster that stands for all groups."""
    return replace(cluster, groups=())


def reordered(cluster: ClusterSpec, order: tuple[int, ...]) -> ClusterSpec:
    """The groups in another order of ranks."""
    return replace(cluster, groups=tuple(cluster.groups[i] for i in order))


def group_view(cluster: ClusterSpec, group: GroupSpec) -> ClusterSpec:
    """What a stage inside `group` is priced on: its devices and links, and beyond them the link between groups."""
    between, times = cluster.links[-1], math.ceil(cluster.num_devices / group.num_devices)
    links = (*group.links, replace(between, span=times * group.num_devices))
    return ClusterSpec(
        name=f"{group.name} of {cluster.name}", device=group.device, num_devices=times * group.num_devices, links=links,
        stack=cluster.stack,
    )  # fmt: skip


def rank_ranges(cluster: ClusterSpec) -> dict[str, str]:
    """ "0-15" -> the name of the group these ranks are."""
    ranges, first = {}, 0
    for group in cluster.groups:
        last = first + group.num_devices - 1
        ranges[f"{first}-{last}" if last > first else str(first)] = group.name
        first = last + 1
    return ranges


def _slowest_device(groups: tuple[GroupSpec, ...]) -> DeviceSpec:
    devices = [group.device for group in groups]
    shared = [dtype for dtype in devices[0].flops if all(dtype in device.flops for device in devices)]
    if not shared:
        raise SpecError("the groups' devices have no dtype in common", where="group")
    slowest, tightest = min(devices, key=_matmul_rate), min(devices, key=lambda d: d.memory_bytes - d.reserved_bytes)
    prices = [group.device.price_per_hour for group in groups]
    total = sum(group.num_devices for group in groups)
    mean = None
    if None not in prices:
        mean = sum((p or 0.0) * g.num_devices for p, g in zip(prices, groups, strict=True)) / total
    return replace(
        slowest,
        memory_bytes=tightest.memory_bytes,
        reserved_bytes=tightest.reserved_bytes,
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        launch_s=max(device.launch_s for device in devices),
        flops={dtype: min(device.flops[dtype] for device in devices) for dtype in shared},
        price_per_hour=mean,
    )


def _matmul_rate(device: DeviceSpec) -> float:
    """In the dtype they train in."""
    peak = max(device.flops.get(dtype, 0.0) for dtype in ("bf16", "fp16", "fp32"))
    return peak * device.power_derate * device.matmul_efficiency


def _slowest_links(groups: tuple[GroupSpec, ...], between: LinkSpec, total: int) -> tuple[LinkSpec, ...]:
    """Units of neighbours that every group is made of, on the slowest innermost link; all others on the slowest of the
    rest."""
    outer = [link for group in groups for link in group.links[1:]] + [between]
    last = _slowest(outer, name=between.name, span=total)
    span = math.gcd(*(group.links[0].span if group.links else 1 for group in groups))
    if span == 1 or span == total:
        return (last,)
    innermost = [group.links[0] for group in groups]
    return (_slowest(innermost, name=min(innermost, key=_bytes_per_s).name, span=span), last)


def _slowest(links: Sequence[LinkSpec], *, name: str, span: int) -> LinkSpec:
    """The slowest of the links, for each collective that one of them has figures of too."""
    kinds = {own.kind for link in links for own in link.collectives}
    rates = {kind: [link.rate(kind) for link in links] for kind in sorted(kinds)}
    own = tuple(
        CollectiveSpec(kind=kind, bandwidth=min(b for b, _ in found), latency=max(s for _, s in found))
        for kind, found in rates.items()
    )
    slowest, latency = min(links, key=_bytes_per_s), max(link.latency for link in links)
    return replace(slowest, name=name, span=span, latency=latency, collectives=own)


def _bytes_per_s(link: LinkSpec) -> float:
    return link.bandwidth * link.efficiency
