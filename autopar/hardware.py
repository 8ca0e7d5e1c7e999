"""Presets of devices and of the nodes they come in, as data. Every number has its unit and origin beside it.

Peaks are dense figures (no structured sparsity). "fp32" is what torch computes by default, without TF32. Efficiencies,
power derates and link efficiencies are read from the cost model's constants file, where unit, bounds and origin stand
beside each.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.checks import shown
from autopar.errors import SpecError, nearest
from autopar.specs import MOST_DEVICES, ClusterSpec, DeviceSpec, LinkSpec

__all__ = ["DEVICES", "NODES", "NodePreset", "generation_of", "preset"]

MIB = 1 << 20
CUDA_RESERVED_BYTES = 4 << 30
"""CUDA context (0.5 GiB), NCCL channels (about 1 GiB with several groups), allocator fragmentation: rule of thumb."""


CONSTANTS_FILE = Path(__file__).parent / "cost_model" / "constants" / "fitted.toml"


def _read_constants() -> Mapping[str, Any]:
    return MappingProxyType(tomllib.loads(CONSTANTS_FILE.read_text(encoding="utf-8")))


_CONSTANTS = _read_constants()


def _constant(name: str, key: str) -> float:
    """Value of a constant for a device or generation."""
    entry = _CONSTANTS[name]
    return float(entry["value"] if "value" in entry else entry["values"][key])


DEVICES: Mapping[str, DeviceSpec] = {
    "v100-32g": DeviceSpec(
        name="V100-SXM2-32GB",
        memory_bytes=32510 * MIB,  # nvidia-smi total
        # Tesla V100 data sheet; no bf16 units: torch falls back to fp32 arithmetic
        flops={"fp64": 7.8e12, "fp32": 15.7e12, "bf16": 15.7e12, "fp16": 125e12},
        memory_bandwidth=900e9,  # data sheet, bytes/s
        matmul_efficiency=_constant("matmul_16bit", "volta"),
        attention_efficiency=_constant("attention_16bit", "volta"),
        memory_efficiency=0.85,
        launch_s=6e-6,
        reserved_bytes=2 << 30,
    ),
    "a100-40g": DeviceSpec(
        name="A100-SXM4-40GB",
        memory_bytes=40536 * MIB,  # nvidia-smi total
        flops={"fp64": 19.5e12, "fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},  # A100 data sheet
        memory_bandwidth=1.555e12,  # data sheet
        matmul_efficiency=_constant("matmul_16bit", "ampere"),
        attention_efficiency=_constant("attention_16bit", "ampere"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
    ),
    "a100-80g": DeviceSpec(
        name="A100-SXM4-80GB",
        memory_bytes=81920 * MIB,  # nvidia-smi total
        flops={"fp64": 19.5e12, "fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        memory_bandwidth=2.039e12,  # data sheet
        matmul_efficiency=_constant("matmul_16bit", "ampere"),
        attention_efficiency=_constant("attention_16bit", "ampere"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
    ),
    "h100": DeviceSpec(
        name="H100-SXM5-80GB",
        memory_bytes=81559 * MIB,  # nvidia-smi total
        # H100 data sheet, dense
        flops={"fp64": 66.9e12, "fp32": 66.9e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
        memory_bandwidth=3.35e12,
        matmul_efficiency=_constant("matmul_16bit", "hopper"),
        attention_efficiency=_constant("attention_16bit", "hopper"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
    ),
    "h200": DeviceSpec(
        name="H200-SXM5-141GB",
        memory_bytes=143771 * MIB,  # nvidia-smi total
        flops={"fp64": 66.9e12, "fp32": 66.9e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
        memory_bandwidth=4.8e12,  # data sheet
        matmul_efficiency=_constant("matmul_16bit", "hopper"),
        attention_efficiency=_constant("attention_16bit", "hopper"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
    ),
    "b200": DeviceSpec(
        name="B200-SXM-180GB",
        memory_bytes=183359 * MIB,  # nvidia-smi total
        # DGX B200 data sheet divided by 8, dense
        flops={"fp64": 37e12, "fp32": 75e12, "bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12},
        memory_bandwidth=8.0e12,
        matmul_efficiency=_constant("matmul_16bit", "blackwell"),
        attention_efficiency=_constant("attention_16bit", "blackwell"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
        power_derate=_constant("power_derate", "b200"),
    ),
    "gb200": DeviceSpec(
        name="GB200-186GB",
        memory_bytes=189471 * MIB,  # nvidia-smi total
        # GB200 NVL72 data sheet divided by 72, dense
        flops={"fp64": 40e12, "fp32": 80e12, "bf16": 2500e12, "fp16": 2500e12, "fp8": 5000e12},
        memory_bandwidth=8.0e12,
        matmul_efficiency=_constant("matmul_16bit", "blackwell"),
        attention_efficiency=_constant("attention_16bit", "blackwell"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
        power_derate=_constant("power_derate", "gb200"),
    ),
    "gb300": DeviceSpec(
        name="GB300-288GB",
        memory_bytes=288 * 1000**3,
        # GB300 NVL72 data sheet divided by 72, dense; the fp64 units were given up
        flops={"fp64": 1.3e12, "fp32": 80e12, "bf16": 2500e12, "fp16": 2500e12, "fp8": 5000e12},
        memory_bandwidth=8.0e12,
        matmul_efficiency=_constant("matmul_16bit", "blackwell"),
        attention_efficiency=_constant("attention_16bit", "blackwell"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
    ),
    "h100-500w": DeviceSpec(
        name="H100-96GB-HBM2e-500W",
        memory_bytes=97871 * MIB,  # nvidia-smi total
        flops={"fp64": 66.9e12, "fp32": 66.9e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
        memory_bandwidth=2.4e12,  # HBM2e, stated by its users
        matmul_efficiency=_constant("matmul_16bit", "hopper"),
        attention_efficiency=_constant("attention_16bit", "hopper"),
        memory_efficiency=0.85,
        reserved_bytes=CUDA_RESERVED_BYTES,
        power_derate=_constant("power_derate", "h100-500w"),
    ),
    "cpu": DeviceSpec(
        name="local process",
        kind="cpu",
        memory_bytes=4 << 30,  # what one small test process may take; a declaration, not a measurement
        # one server core (AVX-512), torch matmul of 512 x 512 on one thread: 115 fp32, 79 fp64 Gflop/s measured;
        # half of it, since several processes usually share the cores. bf16 and fp16 without AMX run no faster.
        flops={"fp64": 40e9, "fp32": 60e9, "bf16": 60e9, "fp16": 30e9},
        memory_bandwidth=7e9,  # measured: torch.add out of cache, one thread
        matmul_efficiency=0.8,
        attention_efficiency=0.4,
        memory_efficiency=0.9,
        launch_s=2e-6,  # measured: torch op dispatch of a 10-element add is 1.1 us, twice that under autograd
        reserved_bytes=256 << 20,  # an interpreter with torch loaded
    ),
}


_GENERATIONS = {"V100": "volta", "A100": "ampere", "H100": "hopper", "H200": "hopper", "B200": "blackwell",
                "GB200": "blackwell", "GB300": "blackwell"}  # fmt: skip


def generation_of(device: DeviceSpec) -> str:
    """Device generation, whose constants of the cost model hold. A GPU of unknown name counts to the generation whose
    16-bit peak is nearest."""
    if device.kind == "cpu":
        return "cpu"
    model = device.name.partition("-")[0]
    if model in _GENERATIONS:
        return _GENERATIONS[model]
    peak = max(device.flops.get(dtype, 0.0) for dtype in ("bf16", "fp16", "fp32"))
    peaks = {"volta": 125e12, "ampere": 312e12, "hopper": 989e12, "blackwell": 2250e12}
    return min(peaks, key=lambda name: abs(math.log(peaks[name] / peak)))


@dataclass(frozen=True, kw_only=True)
class NodePreset:
    """A node: `device` names an entry of DEVICES; `links` inside the node; `network` between nodes."""

    device: str
    devices_per_node: int
    links: tuple[LinkSpec, ...]
    network: LinkSpec


def _nvlink(span: int, bandwidth: float, generation: str, *, sharp: bool = False) -> LinkSpec:
    # latency: one NCCL hop inside a node, low-latency protocol, about 2 us (NCCL tuning tables)
    return LinkSpec(
        name="nvlink",
        span=span,
        bandwidth=bandwidth,
        latency=2e-6,
        efficiency=_constant("nvlink_efficiency", generation),
        in_network_reduction=sharp,
    )


def _infiniband(bandwidth: float) -> LinkSpec:
    # span 0 is replaced by the whole cluster; latency of one hop with GPUDirect, about 5 us
    efficiency = _constant("network_efficiency", "")
    return LinkSpec(name="infiniband", span=0, bandwidth=bandwidth, latency=5e-6, efficiency=efficiency)


NODES: Mapping[str, NodePreset] = {
    # DGX-1: hybrid cube mesh of 6 NVLink2 x 25 GB/s; rings use all; 4 x EDR 100 Gb/s for 8 GPUs
    "dgx-v100": NodePreset(
        device="v100-32g", devices_per_node=8, links=(_nvlink(8, 150e9, "volta"),), network=_infiniband(6.25e9)
    ),
    # DGX A100: NVSwitch, 12 NVLink3 x 25 GB/s; 8 x HDR 200 Gb/s
    "dgx-a100-40g": NodePreset(
        device="a100-40g", devices_per_node=8, links=(_nvlink(8, 300e9, "ampere"),), network=_infiniband(25e9)
    ),
    "dgx-a100-80g": NodePreset(
        device="a100-80g", devices_per_node=8, links=(_nvlink(8, 300e9, "ampere"),), network=_infiniband(25e9)
    ),
    # DGX H100/H200: NVSwitch, 18 NVLink4 x 25 GB/s; 8 x NDR 400 Gb/s. NVLink SHARP exists but is not counted on
    "dgx-h100": NodePreset(
        device="h100", devices_per_node=8, links=(_nvlink(8, 450e9, "hopper"),), network=_infiniband(50e9)
    ),
    "dgx-h200": NodePreset(
        device="h200", devices_per_node=8, links=(_nvlink(8, 450e9, "hopper"),), network=_infiniband(50e9)
    ),
    # DGX B200: NVSwitch, 18 NVLink5 x 50 GB/s; 8 x NDR 400 Gb/s
    "dgx-b200": NodePreset(
        device="b200", devices_per_node=8, links=(_nvlink(8, 900e9, "blackwell"),), network=_infiniband(50e9)
    ),
    # processes on this machine over gloo (TCP on loopback): about 1 GB/s and 100 us a message, rule of thumb
    "local": NodePreset(
        device="cpu",
        devices_per_node=1,
        links=(),
        network=LinkSpec(name="loopback", span=0, bandwidth=1e9, latency=100e-6, efficiency=0.9),
    ),
}


def preset(name: str, nodes: int = 1) -> ClusterSpec:
    """`nodes` nodes of a named kind: `preset("dgx-h100", 32)` is 256 devices, `preset("local", 4)` is 4 processes.

    Raises SpecError for an unknown name or a node count that is not a positive integer.
    """
    if name not in NODES:
        raise SpecError(f"unknown cluster preset {name!r}", where="cluster", try_=nearest(name, list(NODES)))
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise SpecError(f"node count must be a positive integer, not {shown(nodes)}", where=f"cluster {name}")
    node = NODES[name]
    most = MOST_DEVICES // node.devices_per_node
    if nodes > most:
        raise SpecError(f"node count must be at most {most}, not {shown(nodes)}", where=f"cluster {name}")
    num_devices = node.devices_per_node * nodes
    links = node.links
    if nodes > 1 or not links:
        network = node.network
        links = (
            *links,
            LinkSpec(
                name=network.name,
                span=num_devices,
                bandwidth=network.bandwidth,
                latency=network.latency,
                efficiency=network.efficiency,
            ),
        )
    return ClusterSpec(name=f"{name}:{nodes}", device=DEVICES[node.device], num_devices=num_devices, links=links)
