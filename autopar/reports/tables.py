"""Tables of the report: their look, and the one of memory, which is as wide as there are categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.reports.quantities import bytes_text, percent_text, range_text
from autopar.specs import ClusterSpec

__all__ = ["MEMORY_NAMES", "WIDE", "memory_table", "table_of"]

WIDE = 100
"""Columns from which on a table has all it can tell."""

MOST_ON_SIDE = 5
"""Stages that stand side by side in a narrow table."""

MEMORY_NAMES = {"parameters": "weights", "communication": "buffers"}


def table_of(*columns: str, numbers: int = 0, from_column: int = 1) -> Table:
    """A table whose columns from `from_column` are right-aligned, `numbers` of them."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        right = from_column <= index < from_column + numbers
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def memory_table(
    prediction: Mapping[str, Any], cluster: ClusterSpec | None, ranks: int, *, narrow: bool = False
) -> Table:
    """A row for each run of neighbouring stages with equal figures, a column for each category in use. Several stages
    on a rank share its figures: they stand once, under the first of them. `narrow` lays it on its side, if few stages
    differ."""
    stages: Sequence[Mapping[str, int]] = prediction["peak_memory_bytes"][:ranks]
    categories = [key for key in stages[0] if key == "total" or any(stage.get(key) for stage in stages)]
    headers = ["stage", *(MEMORY_NAMES.get(key, key) for key in categories)]
    if cluster is not None:
        headers.append("of a device" if cluster.groups else f"of {bytes_text(cluster.device.memory_bytes)}")
    limits = _limits(prediction, cluster)
    rows = [headers]
    for _, run in groupby(enumerate(stages), key=lambda item: (dict(item[1]), limits[item[0]])):
        members = list(run)
        (low, stage), (high, _) = members[0], members[-1]
        row = [range_text(low, high), *(bytes_text(stage.get(key, 0)) for key in categories)]
        if cluster is not None:
            row.append(percent_text(stage["total"] / limits[low]))
        rows.append(row)
    if narrow and len(rows) <= MOST_ON_SIDE + 1:
        rows = [list(column) for column in zip(*rows, strict=True)]
    table = table_of(*rows[0], numbers=len(rows[0]) - 1)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _limits(prediction: Mapping[str, Any], cluster: ClusterSpec | None) -> list[int]:
    """Memory of each stage's devices, 0 without a cluster."""
    count = len(prediction["peak_memory_bytes"])
    if cluster is None:
        return [0] * count
    of_group = {group.name: group.device.memory_bytes for group in cluster.groups}
    owner = prediction.get("stage_group") or [""] * count
    return [of_group.get(name, cluster.device.memory_bytes) for name in owner]
