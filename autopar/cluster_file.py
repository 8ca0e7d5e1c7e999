"""Reads a cluster file (TOML) into a ClusterSpec. docs/cluster_file.md describes the format.

One table per section says which key fills which field and how its text is read; a key outside the table is an error
that names the nearest one. Checks of the values themselves live in the specs, so that a spec built in Python meets the
same ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from autopar import units
from autopar.checks import shown
from autopar.errors import SpecError, nearest
from autopar.hardware import DEVICES
from autopar.specs import ClusterSpec, DeviceSpec, LinkSpec, StackSpec

__all__ = ["load_cluster"]

Reader = Callable[[Any, str], Any]


def _as_is(value: Any, where: str) -> Any:
    return value


DEVICE_KEYS: Mapping[str, tuple[str, Reader]] = {
    "name": ("name", _as_is),
    "memory": ("memory_bytes", units.memory_bytes),
    "memory_bandwidth": ("memory_bandwidth", units.bandwidth_bytes_per_s),
    "reserved": ("reserved_bytes", units.memory_bytes),
    "launch": ("launch_s", units.time_s),
    "matmul_efficiency": ("matmul_efficiency", _as_is),
    "attention_efficiency": ("attention_efficiency", _as_is),
    "memory_efficiency": ("memory_efficiency", _as_is),
    "power_derate": ("power_derate", _as_is),
}
FLOPS_KEYS = {f"{dtype}_flops": dtype for dtype in ("fp64", "fp32", "bf16", "fp16", "fp8")}
LINK_KEYS: Mapping[str, tuple[str, Reader]] = {
    "name": ("name", _as_is),
    "span": ("span", _as_is),
    "bandwidth": ("bandwidth", units.bandwidth_bytes_per_s),
    "latency": ("latency", units.time_s),
    "efficiency": ("efficiency", _as_is),
    "shared_by": ("shared_by", _as_is),
    "in_network_reduction": ("in_network_reduction", _as_is),
}


def load_cluster(path: str | Path) -> ClusterSpec:
    """Raises SpecError: unreadable, not TOML, unknown or missing key, a value that does not parse or contradicts."""
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise SpecError(f"cannot read the cluster file: {error.strerror}", where=where) from error
    except ValueError as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError; a number of thousands of digits
        raise SpecError(f"not TOML: {error}", where=where) from error
    except RecursionError as error:
        raise SpecError("not a cluster file: nested too deeply", where=where) from error
    try:
        return _cluster(document, Path(path).stem)
    except SpecError as error:
        raise SpecError(error.what, where=f"{where}: {error.where}", try_=error.try_) from error


def _cluster(document: Mapping[str, Any], stem: str) -> ClusterSpec:
    if "group" in document:
        raise SpecError(
            "unequal nodes are not built yet", where="[[group]]", try_="one file for the largest set of equal nodes"
        )
    _known(document, ["name", "num_devices", "device", "link", "stack"], "top level")
    links = document.get("link", [])
    if not isinstance(links, list) or not all(isinstance(link, Mapping) for link in links):
        raise SpecError("must be a list of tables, each written [[link]]", where="link")
    read = tuple(_link(link, f"link {index + 1}") for index, link in enumerate(links))
    num_devices = document.get("num_devices", read[-1].span if read else None)
    if num_devices is None:
        raise SpecError("neither num_devices nor a [[link]] says how many devices there are", where="top level")
    return ClusterSpec(
        name=document.get("name", stem),
        device=_device(_table(document, "device")),
        num_devices=num_devices,
        links=read,
        stack=_stack(_table(document, "stack") if "stack" in document else {}),
    )


def _device(table: Mapping[str, Any]) -> DeviceSpec:
    """A preset named by `kind`, each of its figures replaced by the ones given; without `kind`, all from the file."""
    _known(table, ["kind", *DEVICE_KEYS, *FLOPS_KEYS], "device")
    values = _read(table, DEVICE_KEYS, "device")
    flops = {FLOPS_KEYS[key]: units.flops_per_s(table[key], f"device.{key}") for key in table if key in FLOPS_KEYS}
    kind = table.get("kind")
    if kind is not None:
        if not isinstance(kind, str) or kind not in DEVICES:
            raise SpecError(f"unknown kind {shown(kind)}", where="device", try_=nearest(str(kind), list(DEVICES)))
        known = DEVICES[kind]
        return replace(known, **values, flops={**known.flops, **flops})
    missing = [key for key in ("memory", "memory_bandwidth") if key not in table]
    if not flops:
        missing.append("bf16_flops")
    if missing:
        raise SpecError(f"missing {', '.join(missing)}", where="device", try_=f"or kind, {nearest('?', list(DEVICES))}")
    return DeviceSpec(**{"name": "device", **values}, flops=flops)


def _link(table: Mapping[str, Any], where: str) -> LinkSpec:
    _known(table, list(LINK_KEYS), where)
    missing = [key for key in ("span", "bandwidth", "latency") if key not in table]
    if missing:
        raise SpecError(f"missing {', '.join(missing)}", where=where)
    return LinkSpec(**{"name": where, **_read(table, LINK_KEYS, where)})


def _stack(table: Mapping[str, Any]) -> StackSpec:
    known = [field.name for field in fields(StackSpec)]
    _known(table, known, "stack")
    values = dict(table)
    overlap = values.get("overlap", [])
    if not isinstance(overlap, list):
        raise SpecError(f"must be a list of names, not {shown(overlap)}", where="stack.overlap")
    if "overlap" in values:
        values["overlap"] = tuple(overlap)
    return StackSpec(**values)


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = document.get(key)
    if not isinstance(table, Mapping):
        raise SpecError(f"missing: a table [{key}]" if table is None else f"must be a table [{key}]", where=key)
    return table


def _known(table: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise SpecError(f"unknown key {key!r}", where=where, try_=nearest(key, known))


def _read(table: Mapping[str, Any], keys: Mapping[str, tuple[str, Reader]], where: str) -> dict[str, Any]:
    return {field: read(table[key], f"{where}.{key}") for key, (field, read) in keys.items() if key in table}
