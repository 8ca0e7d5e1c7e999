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
from autopar.links import COLLECTIVES, CollectiveSpec
from autopar.mixed_cluster import mixed_cluster
from autopar.specs import ClusterSpec, DeviceSpec, GroupSpec, LinkSpec, StackSpec

__all__ = ["load_cluster"]

_EXAMPLE = "a cluster file as docs/cluster_file.md shows it"

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
    "price": ("price_per_hour", _as_is),
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
        raise SpecError(
            f"cannot read the cluster file: {error.strerror}", where=where, try_="the path of a TOML file, or a preset"
        ) from error
    except ValueError as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError; a number of thousands of digits
        raise SpecError(f"not TOML: {error}", where=where, try_=_EXAMPLE) from error
    except RecursionError as error:
        raise SpecError("not a cluster file: nested too deeply", where=where, try_=_EXAMPLE) from error
    try:
        return _cluster(document, Path(path).stem)
    except SpecError as error:
        raise SpecError(error.what, where=f"{where}: {error.where}", try_=error.try_) from error


def _cluster(document: Mapping[str, Any], stem: str) -> ClusterSpec:
    if "group" in document:
        return _mixed(document, stem)
    _known(document, ["name", "num_devices", "device", "link", "stack"], "top level")
    read = tuple(_link(link, f"link {index + 1}") for index, link in enumerate(_tables(document, "link")))
    num_devices = document.get("num_devices", read[-1].span if read else None)
    if num_devices is None:
        raise SpecError(
            "neither num_devices nor a [[link]] says how many devices there are",
            where="top level",
            try_="num_devices = 8, or span = 8 in the outermost [[link]]",
        )
    return ClusterSpec(
        name=document.get("name", stem),
        device=_device(_table(document, "device")),
        num_devices=num_devices,
        links=read,
        stack=_stack(_table(document, "stack") if "stack" in document else {}),
    )


def _mixed(document: Mapping[str, Any], stem: str) -> ClusterSpec:
    """Groups of equal devices, and the one link between them; its span is all devices and need not be said."""
    _known(document, ["name", "group", "link", "stack"], "top level")
    groups = tuple(_group(table, f"group {index + 1}") for index, table in enumerate(_tables(document, "group")))
    between = _tables(document, "link")
    if len(between) != 1:
        raise SpecError(f"one [[link]] joins the groups, there are {len(between)}", where="link",
                        try_="links inside a group as [[group.link]]")  # fmt: skip
    total = sum(group.num_devices for group in groups)
    link = _link({"span": total, "name": "inter-group network", **between[0]}, "link")
    if link.span != total:
        raise SpecError(f"the link between groups spans {link.span} devices, the groups have {total}",
                        where="link.span", try_=f"span = {total}, or leave it out")  # fmt: skip
    stack = _stack(_table(document, "stack") if "stack" in document else {})
    return mixed_cluster(document.get("name", stem), groups, link, stack)


def _group(table: Mapping[str, Any], where: str) -> GroupSpec:
    """A preset, or a device with its links."""
    _known(table, ["name", "cluster", "devices", "device", "link"], where)
    name = table.get("name", where)
    if "cluster" in table:
        text = table["cluster"]
        if not isinstance(text, str) or len(table) > 1 + ("name" in table):
            raise SpecError("a group is a preset, or a device with links", where=where, try_='cluster = "dgx-h100:2"')
        whole = ClusterSpec.parse(text)
        return GroupSpec(name=name, device=whole.device, num_devices=whole.num_devices, links=whole.links)
    links = tuple(_link(link, f"{where}: link {i + 1}") for i, link in enumerate(_tables(table, "link")))
    count = table.get("devices", links[-1].span if links else 1)
    if "device" not in table:
        raise SpecError("neither a preset nor a device", where=where, try_='cluster = "dgx-h100:2", or [group.device]')
    return GroupSpec(name=name, device=_device(_table(table, "device")), num_devices=count, links=links)


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
    _known(table, [*LINK_KEYS, *COLLECTIVES], where)
    _require(table, {"span": "8", "bandwidth": '"450 GB/s"', "latency": '"3 us"'}, where)
    own = tuple(_collective(_table(table, kind), kind, f"{where}.{kind}") for kind in COLLECTIVES if kind in table)
    return LinkSpec(**{"name": where, **_read(table, LINK_KEYS, where)}, collectives=own)


def _collective(table: Mapping[str, Any], kind: str, where: str) -> CollectiveSpec:
    keys = {key: LINK_KEYS[key] for key in ("bandwidth", "latency")}
    _known(table, list(keys), where)
    _require(table, {"bandwidth": '"450 GB/s"', "latency": '"3 us"'}, where)
    return CollectiveSpec(kind=kind, **_read(table, keys, where))


def _stack(table: Mapping[str, Any]) -> StackSpec:
    known = [field.name for field in fields(StackSpec)]
    _known(table, known, "stack")
    values = dict(table)
    overlap = values.get("overlap", [])
    if not isinstance(overlap, list):
        raise SpecError(
            f"must be a list of names, not {shown(overlap)}", where="stack.overlap", try_='overlap = ["dp_reduce"]'
        )
    if "overlap" in values:
        values["overlap"] = tuple(overlap)
    return StackSpec(**values)


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = document.get(key)
    if not isinstance(table, Mapping):
        what = f"missing: a table [{key}]" if table is None else f"must be a table [{key}], not {shown(table)}"
        raise SpecError(what, where=key, try_=f"a line [{key}], its keys in the lines below")
    return table


def _tables(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    tables = document.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise SpecError(
            f"must be a list of tables, not {shown(tables)}", where=key, try_=f"[[{key}]] above the keys of each"
        )
    return tables


def _require(table: Mapping[str, Any], examples: Mapping[str, str], where: str) -> None:
    """Raise SpecError unless all these keys are there; `examples` of their values."""
    missing = [key for key in examples if key not in table]
    if missing:
        shows = ", ".join(f"{key} = {examples[key]}" for key in missing)
        raise SpecError(f"missing {', '.join(missing)}", where=where, try_=f"for example {shows}")


def _known(table: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise SpecError(f"unknown key {key!r}", where=where, try_=nearest(key, known))


def _read(table: Mapping[str, Any], keys: Mapping[str, tuple[str, Reader]], where: str) -> dict[str, Any]:
    return {field: read(table[key], f"{where}.{key}") for key, (field, read) in keys.items() if key in table}
