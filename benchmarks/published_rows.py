"""Published measurements as inputs of the cost model: a row's model shape, cluster, layout and declared stack.

A row is one JSON object with the columns described in docs/cost_model.md. What it does not state is assumed here, in
one place, and listed in `assumed`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from reference_models import BlockShape
from row_facts import Row, complete, device_of, network_of
from row_limits import check_device_memory, check_measurements

import autopar.cost_model
from autopar.cost_model.run_price import RunLayout, StackTraits, stage_layers
from autopar.errors import SpecError
from autopar.hardware import DEVICES, generation_of
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.specs import ClusterSpec, LinkSpec, StackSpec

__all__ = ["Run", "as_run", "read_rows"]

NVLINK_BYTES_PER_S = {"volta": 150e9, "ampere": 300e9, "hopper": 450e9, "blackwell": 900e9}
NVLINK_DOMAIN = {"gb200": 72, "gb300": 72}
NIC_BYTES_PER_S = {"a100-80g": 25e9, "a100-40g": 25e9, "h100": 50e9, "h200": 50e9, "h100-500w": 50e9, "b200": 50e9,
                   "gb200": 50e9, "gb300": 100e9, "v100-32g": 3.125e9}  # fmt: skip

_FP8 = {"mxfp8": "mxfp8", "fp8-mx": "mxfp8", "nvfp4": "nvfp4", "fp8 rowwise": "fp8_rowwise", "fp8-cs": "fp8",
        "fp8 linears": "fp8", "fp8 tensorwise": "fp8", "fp8": None}  # fmt: skip
"""What a stated precision starts with -> the recipe; None: the one the stack means by it."""

_RECOMPUTE = (("none", "none"), ("full", "full"), (r"selective( \(?(attention|core).*)?$", "selective"), ("op-", "op"))
"""What a stated recomputation starts with -> the mode. "Selective" by layers, as some say, is none of them."""


@dataclass(frozen=True)
class Run:
    """A row, ready to be priced."""

    row: Row
    shape: BlockShape
    cluster: ClusterSpec
    layout: RunLayout
    traits: StackTraits
    plan: Plan
    assumed: tuple[str, ...]

    @property
    def id(self) -> str:
        return str(self.row["id"])

    @property
    def source(self) -> str:
        return str(self.row["source_id"])

    @property
    def device_kind(self) -> str:
        return device_of(self.row)

    @property
    def device_bytes(self) -> int:
        return self.cluster.device.memory_bytes

    @property
    def mem_kind(self) -> str:
        """allocated, reserved or device (what nvidia-smi shows)."""
        text = str(self.row.get("mem_kind") or "")
        return "device" if "nvidia-smi" in text else "reserved" if "reserved" in text else "allocated"

    @property
    def peak_bytes(self) -> float:
        return float(self.row["peak_mem_gib"]) * 2**30

    @property
    def step_s(self) -> float | None:
        return self.row["step_time_s"]


def read_rows(path: Path) -> list[Row]:
    """Raises SpecError with file and line for what is no JSON object, and for a file without text or rows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error
    lines = enumerate(text.split("\n"), 1)  # splitlines would also cut at separators that a string may hold
    rows = [_object(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not rows:
        raise SpecError("holds no rows", where=str(path))
    return rows


def _object(line: str, where: str) -> Row:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not JSON: {error}", where=where) from error
    if not isinstance(found, dict):
        raise SpecError("not a JSON object", where=where)
    return found


def as_run(row: Row) -> Run:
    """Raises SpecError with the reason if the row lacks something a price needs."""
    assumed: list[str] = []
    row = complete(row, assumed)
    device_of(row)
    if (row.get("ep") or 1) > 1:
        raise SpecError("expert parallelism is not modelled", where=row["id"])
    recipe, traits = _low_precision(row, assumed), _traits(row, assumed)
    shape, cluster = _shape(row, assumed), _cluster(row, traits, assumed)
    layout = _layout(row, traits, (_FP8[recipe] or traits.fp8) if recipe else None, assumed)
    check_measurements(row, shape, cluster.device)
    if row["peak_mem_gib"] and not any(
        name in str(row["mem_kind"]) for name in ("nvidia-smi", "reserved", "allocated")
    ):
        assumed.append(f"mem_kind {row['mem_kind']!r} is unknown: allocated")
    return Run(row, shape, cluster, layout, traits, _plan(row, shape, layout), tuple(assumed))


def _low_precision(row: Row, assumed: list[str]) -> str | None:
    """The key of _FP8 that the stated precision starts with; None: 16 bits."""
    stated = row["precision"]
    if stated is None:
        assumed.append("precision not stated: 16 bits")
        return None
    text = stated.lower()
    low = next((known for known in _FP8 if text.startswith(known)), None)
    if text.startswith(("fp32", "tf32", "fp64")):
        raise SpecError(f"training in {stated} is not modelled", where=row["id"])
    if low is None and ("16" not in text or "fp8" in text or "fp4" in text):
        raise SpecError(f"{stated!r} is not known: bf16, fp16, {', '.join(_FP8)}", where=f"{row['id']}: precision")
    return low


@cache
def _stacks() -> dict[str, Any]:
    path = Path(autopar.cost_model.__file__).parent / "constants" / "stacks.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _traits(row: Row, assumed: list[str]) -> StackTraits:
    stacks = _stacks()
    name = str(row.get("framework") or "")
    found = max((k for k in stacks if name.lower().startswith(k.lower())), key=len, default="default")
    if found == "default":
        assumed.append(f"stack {name!r} is unknown: default properties")
    values = {**stacks["default"], **stacks[found]}
    values["overlap"] = _overlap(row, tuple(values["overlap"]))
    if (row.get("overlap") or {}).get("mp_mode") == "DEFAULT":
        values["reduce_bytes"] = 4
    if "fp32 grad accum" in str(row.get("precision")):
        values |= {"gradient_bytes": 4, "reduce_bytes": 4, "spare_gradient_bytes": 2}
    if (row.get("extra") or {}).get("compile") is False:
        values |= {"elementwise": "eager", "fused_kernels": False}
    return StackTraits(**values)


def _overlap(row: Row, declared: tuple[str, ...]) -> tuple[str, ...]:
    """The row's own statement replaces the stack's."""
    stated = row.get("overlap") or {}
    on = set(declared)
    for name in ("dp", "tp", "pp"):
        if name in stated:
            on = on | {name} if stated[name] else on - {name}
    if "async_tp" in stated:
        on = on | {"tp"} if stated["async_tp"] else on - {"tp"}
    return tuple(sorted(on))


def _shape(row: Row, assumed: list[str]) -> BlockShape:
    tp, vocab = row["tp"], row["vocab"]
    for name in ("heads", "ffn"):
        if row[name] % tp:
            raise SpecError(f"{row[name]} {name} over tp {tp} is not whole", where=row["id"])
    if vocab % 8 or vocab % tp:  # Megatron pads to 128 x tp; one padding for all, so that layouts stay comparable
        vocab = -(-vocab // 1024) * 1024
        assumed.append(f"vocabulary padded to {vocab}")
    shape = BlockShape(row["hidden"], row["heads"], row["kv_heads"], row["ffn"], bool(row["gated_mlp"]), vocab)
    own, stated = (row["layers"] * shape.layer_parameters + vocab * shape.hidden) / 1e9, row.get("params_b")
    if isinstance(stated, (int, float)) and not 0.5 < own / max(stated, 1e-9) < 2:  # layers left out, or experts
        assumed.append(f"params_b {stated:g} is not the {own:.3g} of the shape: priced as the shape, without experts")
    return shape


def _cluster(row: Row, traits: StackTraits, assumed: list[str]) -> ClusterSpec:
    kind = device_of(row)
    device = DEVICES[kind]
    check_device_memory(row, device)
    if row.get("gpu_mem_gb"):
        device = replace(device, memory_bytes=int(row["gpu_mem_gb"] * 2**30), reserved_bytes=0)
    stack = StackSpec(attention=traits.attention, elementwise=traits.elementwise,
                      gradient_dtype="fp32" if traits.gradient_bytes == 4 else "same")  # fmt: skip
    inside, outside = network_of(row, assumed)
    devices = row["n_gpus"]
    span = NVLINK_DOMAIN.get(kind, row["gpus_per_node"] or 8)
    span = span if devices % span == 0 else min(devices, _fitting(devices, span))
    links = []
    if span > 1:
        links.append(LinkSpec(name="nvlink", span=span, bandwidth=inside or NVLINK_BYTES_PER_S[generation_of(device)],
                              latency=2e-6, efficiency=0.8))  # fmt: skip
    if devices > span:
        links.append(LinkSpec(name="network", span=devices, bandwidth=outside or NIC_BYTES_PER_S[kind], latency=5e-6,
                              efficiency=0.9))  # fmt: skip
    return ClusterSpec(name=str(row["id"]), device=device, num_devices=devices, links=tuple(links), stack=stack)


def _fitting(devices: int, span: int) -> int:
    return max(d for d in range(1, span + 1) if devices % d == 0)


def _layout(row: Row, traits: StackTraits, fp8: str | None, assumed: list[str]) -> RunLayout:
    cp, dp = row["cp"], row["dp"]
    degrees = Degrees(dp=dp, cp=cp, tp=row["tp"], pp=row["pp"])
    if degrees.world_size != row["n_gpus"]:
        raise SpecError(f"degrees multiply to {degrees.world_size}, not {row['n_gpus']}", where=str(row["id"]))
    if row["gbs"] % (dp * row["mbs"]):
        raise SpecError("the global batch is no multiple of dp x micro-batch", where=str(row["id"]))
    if row["pp"] * row["vpp"] > row["layers"] + 2:  # embedding and head may count as a layer each
        raise SpecError(f"{row['pp'] * row['vpp']} stages for {row['layers']} layers", where=str(row["id"]))
    if row["seq"] % cp or dp * cp % (row["zero_shard_gpus"] or 1):
        raise SpecError("cp does not divide the sequence, or the shard group dp x cp", where=str(row["id"]))
    zero = _zero(row, assumed)
    return RunLayout(
        degrees=degrees, layers=row["layers"], seq_len=row["seq"], micro_batch=row["mbs"],
        micro_batches=row["gbs"] // (dp * row["mbs"]), virtual_stages=row["vpp"], zero=zero,
        zero_shard=row["zero_shard_gpus"] or dp * cp, recompute=_recompute(row, traits, assumed),
        sequence_sharding=bool(row.get("sp")) and row["tp"] > 1,
        cp_exchange="all_to_all" if any("a2a" in u for u in row.get("uncertain") or ()) else "ring",
        fp8=fp8,
    )  # fmt: skip


def _recompute(row: Row, traits: StackTraits, assumed: list[str]) -> str:
    stated = row.get("recompute")
    found = next((mode for known, mode in _RECOMPUTE if re.match(known, str(stated).lower())), None)
    if stated is not None and found is not None:
        return found
    assumed.append(f"recompute {'not stated' if stated is None else f'{stated!r} is unknown'}: {traits.recompute}")
    return traits.recompute


def _zero(row: Row, assumed: list[str]) -> int:
    stated = row.get("zero")
    if stated is None:
        found = 2 if any("ZeRO-2" in u for u in row.get("uncertain") or ()) else 0
        assumed.append(f"ZeRO not stated: {found}")
        return found
    if stated not in (0, 1, 2, 3):
        raise SpecError(f"ZeRO level {stated!r} is not one of 0, 1, 2, 3", where=str(row["id"]))
    return int(stated)


def _plan(row: Row, shape: BlockShape, layout: RunLayout) -> Plan:
    """The row's layout as a plan: Megatron's columns and rows, even stages."""
    placements: dict[str, str] = {}
    if layout.degrees.tp > 1:
        columns = ["mlp.up_proj"] + ["mlp.gate_proj"] * shape.gated_mlp
        columns += [] if shape.fused_qkv else ["attn.q_proj", "attn.k_proj", "attn.v_proj"]
        placements = {f"layers.*.{name}.weight": "S(0)" for name in columns}
        if not shape.gated_mlp:
            placements |= {f"layers.*.{name}.bias": "S(0)" for name in columns}
        if shape.fused_qkv:
            placements |= {f"layers.*.attn.qkv_proj.{name}": "S(0,left=3)" for name in ("weight", "bias")}
        placements |= {"layers.*.attn.o_proj.weight": "S(1)", "layers.*.mlp.down_proj.weight": "S(1)"}
        placements |= {"embed.weight": "S(0)"} | ({"lm_head.weight": "S(0)"} if shape.gated_mlp else {})
    mode = {"none": None, "full": "full"}.get(layout.recompute, "selective")
    checkpoint = {"layers.*": mode} if mode else {}
    stages, first = [], 0
    counts = stage_layers(layout.layers, layout.degrees.pp, layout.virtual_stages)
    for count in counts:
        stages.append((f"layers.{first}-{first + count - 1}",))
        first += count
    return Plan(
        degrees=layout.degrees, global_batch=row["gbs"], seq_len=layout.seq_len, micro_batch=layout.micro_batch,
        stages=tuple(stages), schedule="1f1b", sequence_sharding=layout.sequence_sharding, parameters=placements,
        checkpoint=checkpoint,
        zero=layout.zero, precision="bf16-mixed",
    )  # fmt: skip
