"""The constants behind a cluster's predictions: value, unit, and where each comes from."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.cost_model.constant_table import load_constants
from autopar.reports.tables import table_of
from autopar.reports.text import section, to_text
from autopar.specs import ClusterSpec, DeviceSpec

__all__ = ["constants_text"]


def constants_text(cluster: ClusterSpec, width: int) -> str:
    """A table for each kind of device, at most `width` columns wide: its own, those of its generation, those of all."""
    parts: list[RenderableType] = []
    for device in dict.fromkeys((cluster.device, *(group.device for group in cluster.groups))):
        parts += [section(f"Constants behind the prices of {device.name}, beside its own figures"), _table(device)]
    return to_text(Group(*parts), width)


def _table(device: DeviceSpec) -> Table:
    table = table_of("constant", "value", "unit", "origin", numbers=1)
    for constant in load_constants().behind(device):
        table.add_row(constant.name, f"{constant.value:.4g}", constant.unit, constant.origin)
    return table
