"""What the user states: the cluster, the training run and pins on the plan.

Units: bytes, seconds, flops per second; bandwidths are bytes per second per device and direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ClusterSpec", "DeviceSpec", "LinkSpec", "Pins", "StackSpec", "TrainSpec"]


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


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """One level of the network. A group whose ranks all lie within `span` consecutive devices uses this level.

    bandwidth            bytes/s per device and direction when all devices of the level talk
    latency              seconds per message (alpha)
    efficiency           fraction of `bandwidth` large messages reach
    shared_by            devices that share one such link (1: a link each)
    """

    name: str
    span: int
    bandwidth: float
    latency: float
    efficiency: float = 0.9
    shared_by: int = 1
    in_network_reduction: bool = False


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """Declared properties of the software stack that prices depend on."""

    attention: str = "flash"
    elementwise: str = "eager"
    gradient_dtype: str = "same"
    overlap: tuple[str, ...] = ("dp_reduce",)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """`num_devices` equal devices joined by `links`, innermost level first; the last level spans all of them."""

    name: str
    device: DeviceSpec
    num_devices: int
    links: tuple[LinkSpec, ...]
    stack: StackSpec = StackSpec()


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The training run. `global_batch` and `seq_len` in sequences per step and tokens per sequence; None lets
    `autopar.plan` choose and report them. `precision` None means the device's default: "fp32" on cpu, else "bf16-mixed".
    """

    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    optimizer: str = "adamw"


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Constraints with names: what the user fixes. None is free. `sp` is sequence sharding over tp.

    `modules` maps a module path pattern to a placement ("shard(1)", "replicate", "S(0)").
    """

    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    zero: int | None = None
    checkpoint: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
