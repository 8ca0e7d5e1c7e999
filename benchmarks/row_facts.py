"""What a row of published measurements states, checked and completed: fields that follow from others are worked out,
fields that may be missing get a default that is listed among the assumptions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from autopar.checks import shown
from autopar.errors import SpecError

__all__ = ["Row", "complete", "device_of", "network_of"]

Row = Mapping[str, Any]

_COUNTS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "n_gpus", "gpus_per_node", "tp", "cp", "pp",
           "dp", "ep", "vpp", "mbs", "gbs", "n_micro", "zero_shard_gpus")  # fmt: skip
_FIGURES = ("gpu_mem_gb", "step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
_TEXTS = ("precision", "framework", "recompute", "mem_kind", "tier", "model", "gpu", "net")
_FLAGS = ("sp", "gated_mlp", "oom")
_NEEDED = ("layers", "hidden", "heads", "seq", "gpu", "n_gpus", "dp", "mbs", "gbs")

_DEVICES = (  # the first whose pattern is found; memory in GiB told apart by the row
    (r"GB300", "gb300"), (r"GB200", "gb200"), (r"B300", "gb300"), (r"B200", "b200"), (r"(?<!G)H200", "h200"),
    (r"H100.*500W", "h100-500w"), (r"H[18]00(?!.*(PCIE|NVL\b))", "h100"), (r"A[18]00(?!.*PCIE)", "a100"),
    (r"V100", "v100-32g"),
)  # fmt: skip
_CUT_NVLINK = {"A800": 200e9, "H800": 200e9}
"""Export variants: the same chip with links of 400 GB/s in both directions together."""

_NO_SWITCH = "NVLink in node; 4 OmniPath links per 8-GPU node"


_MOST = 2**24
"""Of anything counted in a row: a slip of the pen, and products of such sizes leave 64 bits."""

_MOST_FIGURE = 1e9
"""Of anything measured, in the units of a row."""


def complete(row: Row, assumed: list[str]) -> dict[str, Any]:
    """The row with every field a price needs. Raises SpecError naming what is missing or no number."""
    where = str(row.get("id") or "a row")
    full = {**row, "id": where, "source_id": str(row.get("source_id") or "source not stated")}
    for name in (*_COUNTS, *_FIGURES):
        full[name] = _number(full.get(name), name in _COUNTS, f"{where}: {name}")
    _complete_optional(full, assumed)
    _complete_degrees(full)
    _complete_batch(full, where)
    missing = [name for name in _NEEDED if full.get(name) is None]
    if missing:
        raise SpecError(f"not stated: {', '.join(missing)}", where=where)
    _complete_shape(full, assumed)
    if full["step_time_s"] is None and full["tokens_per_s_per_gpu"]:
        full["step_time_s"] = full["gbs"] * full["seq"] / (full["tokens_per_s_per_gpu"] * full["n_gpus"])
    if not (full["step_time_s"] or full["peak_mem_gib"] or full["oom"]):
        raise SpecError("nothing measured: no step time, tokens/s, peak memory or oom", where=where)
    return full


def _complete_optional(full: dict[str, Any], assumed: list[str]) -> None:
    for name in ("overlap", "extra"):
        full[name] = full.get(name) or {}
        if not isinstance(full[name], Mapping):
            assumed.append(f"{name} {full[name]!r} is no object: left out")
            full[name] = {}
    stated = full.get("uncertain")
    full["uncertain"] = [str(doubt) for doubt in stated] if isinstance(stated, list) else []
    for name in _TEXTS:
        full.setdefault(name, None)
        if full[name] is not None and not isinstance(full[name], str):
            raise SpecError(f"must be a text, not {full[name]!r}", where=f"{full['id']}: {name}")
    for name in _FLAGS:
        if full.setdefault(name, None) not in (None, True, False):
            raise SpecError(f"must be true or false, not {full[name]!r}", where=f"{full['id']}: {name}")
    unstated = [name for name in ("tp", "pp", "cp", "vpp", "ep") if full[name] is None]
    full.update(dict.fromkeys(unstated, 1))
    assumed += [f"{', '.join(unstated)} not stated: 1"] if unstated else []
    assumed += ["sp not stated: false"] if full["sp"] is None and full["tp"] > 1 else []


def _number(value: Any, whole: bool, where: str) -> Any:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf or (whole and value != int(value)):
        raise SpecError(f"must be a positive {'integer' if whole else 'number'}, not {shown(value)}", where=where)
    if value > (_MOST if whole else _MOST_FIGURE):
        raise SpecError(f"{shown(value)} is more than any run has", where=where)
    return int(value) if whole else float(value)


def _complete_degrees(full: dict[str, Any]) -> None:
    model = full["tp"] * full["pp"] * full["cp"]
    if full["dp"] is None and full["n_gpus"] is not None and full["n_gpus"] % model == 0:
        full["dp"] = full["n_gpus"] // model
    if full["n_gpus"] is None and full["dp"] is not None:
        full["n_gpus"] = full["dp"] * model


def _complete_batch(full: dict[str, Any], where: str) -> None:
    """Global batch = dp x micro-batch x micro-batches; any two give the third, and all three must agree."""
    dp, mbs, gbs, count = (full[name] for name in ("dp", "mbs", "gbs", "n_micro"))
    if dp is None:
        return
    if gbs is None and mbs is not None and count is not None:
        full["gbs"] = dp * mbs * count
    if mbs is None and gbs is not None and count is not None and gbs % (dp * count) == 0:
        full["mbs"] = gbs // (dp * count)
    if None not in (mbs, gbs, count) and dp * mbs * count != gbs:
        raise SpecError(f"dp {dp} x mbs {mbs} x n_micro {count} is not gbs {gbs}", where=where)


def _complete_shape(full: dict[str, Any], assumed: list[str]) -> None:
    if full["hidden"] % full["heads"]:
        raise SpecError(f"hidden {full['hidden']} is no multiple of {full['heads']} heads", where=full["id"])
    full["kv_heads"] = full["kv_heads"] or full["heads"]
    if full["heads"] % full["kv_heads"]:
        raise SpecError(f"{full['heads']} heads cannot share {full['kv_heads']} key-value heads", where=full["id"])
    if full.get("gated_mlp") is None:
        full["gated_mlp"] = full["ffn"] is not None and full["ffn"] != 4 * full["hidden"]
        assumed.append(f"gated_mlp not stated: {full['gated_mlp']}")
    if full["ffn"] is None:
        full["ffn"] = -(-8 * full["hidden"] // 3 // 256) * 256 if full["gated_mlp"] else 4 * full["hidden"]
        assumed.append(f"ffn not stated: {full['ffn']}")
    if full["vocab"] is None:
        full["vocab"] = 51200
        assumed.append("vocabulary not stated: 51200")


def device_of(row: Row) -> str:
    """Name of the device's preset. Raises SpecError for one that is not known."""
    text = str(row["gpu"]).upper()
    for pattern, kind in _DEVICES:
        if re.search(pattern, text):
            if kind != "a100":
                return kind
            return "a100-40g" if "40G" in text or row.get("gpu_mem_gb") == 40 else "a100-80g"
    raise SpecError(
        f"unknown device {row['gpu']!r}: it needs peak flops by dtype, memory, memory bandwidth, bandwidth in the node "
        "and between nodes", where=str(row.get("id")),
    )  # fmt: skip


def network_of(row: Row, assumed: list[str]) -> tuple[float | None, float | None]:
    """(in-node, between nodes) bytes/s a device as the row states them; None: as in the device's usual node."""
    text = str(row.get("net") or "")
    inside = next((rate for name, rate in _CUT_NVLINK.items() if name in str(row["gpu"]).upper()), None)
    if text == _NO_SWITCH:  # no switch inside those nodes, few links a pair: three of them serve a ring of eight
        return 75e9, 6.25e9
    per_node = row.get("gpus_per_node") or 8
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*Gb/s([^,;]*)", text)
    if not found:
        if text and row["n_gpus"] > per_node:
            assumed.append(f"network {text!r} states no rate: as in the device's usual node")
        return inside, None
    bytes_per_s = float(found[1] or 1) * float(found[2]) * 1e9 / 8
    shared = found[1] is not None or ("per node" in found[3] and "per GPU" not in found[3])
    return inside, bytes_per_s / per_node if shared else bytes_per_s
