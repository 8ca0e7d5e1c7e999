"""What the user states: the cluster and the training run; pins on the plan are in autopar.pins.

Units: bytes, seconds, flops per second; bandwidths are bytes per second per device and direction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.checks import (
    finite_non_negative,
    finite_positive,
    require_count,
    require_fraction,
    require_one_of,
    require_text,
    shown,
)
from autopar.errors import SpecError
from autopar.links import CollectiveSpec, LinkSpec, check_spans
from autopar.pins import Pins
from autopar.plan_checks import OVERLAPS

__all__ = ["ClusterSpec", "CollectiveSpec", "DeviceSpec", "GroupSpec", "LinkSpec", "Pins", "StackSpec", "TrainSpec"]

DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16-mixed")
OPTIMIZERS = ("adamw", "adam", "sgd")
ATTENTION = ("flash", "cudnn", "sdpa", "triton", "unfused")
ELEMENTWISE = ("te", "compiled", "jit", "eager")
GRADIENT_DTYPES = ("same", "fp32")
MOST_DEVICES = 2**20


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or, for kind "cpu", one local process).

    flops                 peak dense flop/s by dtype name: "fp64", "fp32", "bf16", "fp16", "fp8"
    matmul_efficiency     fraction of peak a large matmul reaches
    attention_efficiency  fraction of peak the fused attention kernel reaches
    memory_efficiency     fraction of memory_bandwidth a streaming kernel reaches
    launch_s              fixed cost of one kernel
    reserved_bytes        memory no tensor can use: context, collective buffers, fragmentation
    power_derate          sustained clock over the clock of the peak figures
    price_per_hour        money for one device and hour, None if it does not matter

    Raises SpecError if a figure is not positive and finite, a fraction above 1, or more is reserved than there is.
    """

    name: str
    kind: str = "cuda"
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    matmul_efficiency: float = 0.75
    attention_efficiency: float = 0.4
    memory_efficiency: float = 0.85
    launch_s: float = 5e-6
    reserved_bytes: int = 0
    power_derate: float = 1.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        require_text(self.name, "device.name")
        require_one_of(self.kind, ("cuda", "cpu"), "device.kind")
        for name in ("memory_bytes", "memory_bandwidth"):
            finite_positive(getattr(self, name), f"device.{name}")
        finite_non_negative(self.launch_s, "device.launch_s")
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "power_derate"):
            require_fraction(getattr(self, name), f"device.{name}")
        if self.price_per_hour is not None:
            finite_positive(self.price_per_hour, "device.price_per_hour")
        if not self.flops:
            raise SpecError("must name at least one peak rate", where="device.flops")
        for dtype, rate in self.flops.items():
            require_one_of(dtype, DTYPES, "device.flops")
            finite_positive(rate, f"device.flops[{dtype}]")
        if finite_non_negative(self.reserved_bytes, "device.reserved_bytes") >= self.memory_bytes:
            raise SpecError(
                f"no memory is left: a device has {self.memory_bytes} bytes, and {self.reserved_bytes} are reserved",
                where="device.reserved_bytes", try_="less in reserved, or devices with more memory",
            )  # fmt: skip
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    # A read-only view neither pickles nor hashes: both go through the plain values.
    def __reduce__(self) -> tuple[Any, ...]:
        return (_device_from, (_plain(self),))

    def __hash__(self) -> int:
        return hash(json.dumps(_plain(self), sort_keys=True))


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """Declared properties of the software stack that prices depend on.

    attention       the kernel: one of ATTENTION; torch's own ("sdpa") is what autopar's runtime calls
    elementwise     who fuses elementwise chains: one of ELEMENTWISE
    gradient_dtype  "same" as the parameters', or "fp32"
    overlap         what the runtime hides behind compute, of OVERLAPS
    """

    attention: str = "sdpa"
    elementwise: str = "eager"
    gradient_dtype: str = "same"
    overlap: tuple[str, ...] = ("dp_reduce",)

    def __post_init__(self) -> None:
        require_one_of(self.attention, ATTENTION, "stack.attention")
        require_one_of(self.elementwise, ELEMENTWISE, "stack.elementwise")
        require_one_of(self.gradient_dtype, GRADIENT_DTYPES, "stack.gradient_dtype")
        for name in self.overlap:
            require_one_of(name, OVERLAPS, "stack.overlap")


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Equal devices within a cluster of unequal ones; `links` join them, innermost level first."""

    name: str
    device: DeviceSpec
    num_devices: int
    links: tuple[LinkSpec, ...]

    def __post_init__(self) -> None:
        require_text(self.name, "group.name")
        require_count(self.num_devices, f"group {self.name!r}: devices", largest=MOST_DEVICES)
        object.__setattr__(self, "links", tuple(self.links))
        check_spans(self.links, self.num_devices)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """`num_devices` equal devices joined by `links`, innermost level first; the last level spans all of them.

    `groups`, if there are any, are what the cluster is made of, in the order of ranks; `device` and `links` then are
    the slowest of each, on which every layout runs (`autopar.mixed_cluster`).

    Raises SpecError unless the spans grow, each divides the next, and the last is `num_devices`; groups have distinct
    names and add up.
    """

    name: str
    device: DeviceSpec
    num_devices: int
    links: tuple[LinkSpec, ...]
    stack: StackSpec = StackSpec()
    groups: tuple[GroupSpec, ...] = ()

    def __post_init__(self) -> None:
        require_text(self.name, "name")
        require_count(self.num_devices, "num_devices", largest=MOST_DEVICES)
        object.__setattr__(self, "links", tuple(self.links))
        object.__setattr__(self, "groups", tuple(self.groups))
        check_spans(self.links, self.num_devices)
        _check_groups(self.groups, self.num_devices)

    @staticmethod
    def load(path: str | Path) -> ClusterSpec:
        """Read a cluster file (docs/cluster_file.md). Raises SpecError naming file, key and the nearest known key."""
        from autopar.cluster_file import load_cluster

        return load_cluster(path)

    @staticmethod
    def preset(name: str, nodes: int = 1) -> ClusterSpec:
        """`nodes` nodes of a known kind, `preset("dgx-h100", nodes=32)`; for "local", a node is one process here."""
        from autopar.hardware import preset

        return preset(name, nodes)

    @staticmethod
    def parse(text: str) -> ClusterSpec:
        """A cluster as the command line names it: `dgx-h100:32`, `local:4`, or the path of a cluster file."""
        if text.endswith(".toml") or "/" in text:
            return ClusterSpec.load(text)
        name, colon, nodes = text.partition(":")
        if colon and (not nodes.isdecimal() or len(nodes) > 20):
            raise SpecError(f"not a number of nodes: {shown(nodes)}", where=f"cluster {shown(text)}", try_=f"{name}:4")
        return ClusterSpec.preset(name, int(nodes) if colon else 1)

    def resized(self, num_devices: int) -> ClusterSpec:
        """So many of the same devices: fewer are neighbours, more are joined by the outermost link.

        Raises SpecError if nothing joins them, or a level would be left partly filled.
        """
        if num_devices == self.num_devices:
            return self
        if self.groups:
            raise SpecError(
                "unequal groups cannot be resized", where=f"cluster {self.name}", try_="a cluster file of one kind"
            )
        inner = tuple(link for link in self.links[:-1] if link.span < num_devices)
        outer = next((link for link in self.links if link.span >= num_devices), self.links[-1] if self.links else None)
        links = (*inner, replace(outer, span=num_devices)) if outer is not None and num_devices > 1 else ()
        return replace(self, name=f"{num_devices} devices of {self.name}", num_devices=num_devices, links=links)

    @property
    def fingerprint(self) -> str:
        """Hash of everything but the name and the price."""
        values = {k: v for k, v in _plain(self).items() if k != "name"}
        if not self.groups:
            del values["groups"]
        for part in (values, *values.get("groups", [])):
            part["device"] = {k: v for k, v in part["device"].items() if k != "price_per_hour"}
        return _fingerprint(values)


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The training run. `global_batch` and `seq_len` in sequences per step and tokens per sequence; None lets
    `autopar.plan` choose and report them. `precision` None means the device's default: "fp32" on cpu, else
    "bf16-mixed".
    """

    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len"):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), f"train.{name}")
        if self.precision is not None:
            require_one_of(self.precision, PRECISIONS, "train.precision")
        require_one_of(self.optimizer, OPTIMIZERS, "train.optimizer")

    @property
    def fingerprint(self) -> str:
        return _fingerprint(_plain(self))


def _check_groups(groups: tuple[GroupSpec, ...], num_devices: int) -> None:
    if not groups:
        return
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise SpecError(
            f"two groups have one name: {', '.join(names)}", where="group", try_="a name of its own for each"
        )
    total = sum(group.num_devices for group in groups)
    if total != num_devices:
        raise SpecError(f"the groups have {total} devices, the cluster {num_devices}", where="group")


def _plain(spec: Any) -> dict[str, Any]:
    """`dataclasses.asdict`, which cannot copy a read-only mapping."""
    if isinstance(spec, ClusterSpec):
        links = [_plain_link(link) for link in spec.links]
        groups = [
            {**vars(g), "device": _plain(g.device), "links": [_plain_link(link) for link in g.links]}
            for g in spec.groups
        ]
        named = {"device": _plain(spec.device), "links": links, "stack": asdict(spec.stack)}
        return {**vars(spec), **named, "groups": groups}
    if isinstance(spec, DeviceSpec):
        return {**vars(spec), "flops": dict(spec.flops)}
    return dict(vars(spec))


def _plain_link(link: LinkSpec) -> dict[str, Any]:
    """Without what is not given: a fingerprint tells only of figures that are there."""
    values = asdict(link)
    if not link.collectives:
        del values["collectives"]
    return values


def _device_from(values: dict[str, Any]) -> DeviceSpec:
    return DeviceSpec(**values)


def _fingerprint(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
