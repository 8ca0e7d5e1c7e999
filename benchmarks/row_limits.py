"""What a measurement can be at all. Figures outside are slips (milliseconds for seconds, megabytes for gibibytes) that
would outweigh all others in a mean, so their rows are not priced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reference_models import BlockShape

from autopar.errors import SpecError
from autopar.specs import DeviceSpec

__all__ = ["check_device_memory", "check_measurements"]

LEAST_OF_PEAK = 1e-3
"""Of the devices' peak rate, that a run worth publishing reaches. Those at hand reach 3 to 70 %."""

MEMORY_VARIANTS = 2.5
"""Memory of a chip's variants against the preset, either way: 16 and 32 GB, 40 and 80 GB."""


def check_device_memory(row: Mapping[str, Any], device: DeviceSpec) -> None:
    """Raises SpecError if the stated memory cannot be that of the named device."""
    stated = row.get("gpu_mem_gb")
    if stated and not 1 / MEMORY_VARIANTS <= stated * 2**30 / device.memory_bytes <= MEMORY_VARIANTS:
        preset = f"{device.memory_bytes / 2**30:.0f} GiB"
        raise SpecError(f"{stated:g} is not the memory of {row['gpu']} ({preset})", where=f"{row['id']}: gpu_mem_gb")


def check_measurements(row: Mapping[str, Any], shape: BlockShape, device: DeviceSpec) -> None:
    """Raises SpecError for a step faster than the devices' peak rate or far slower than any run, and for a peak of
    memory above the device's or below the parameters' shares."""
    parameters = row["layers"] * shape.layer_parameters
    seconds, peak_gib = row["step_time_s"], row["peak_mem_gib"]
    if seconds is not None:
        matrices = parameters + shape.vocab * shape.hidden
        rate = 6 * matrices * row["gbs"] * row["seq"] / (seconds * row["n_gpus"])
        share = rate / max(device.flops.values())
        if not LEAST_OF_PEAK <= share <= 1:
            said = f"{seconds:.3g} s a step is {share:.2g} of the devices' peak rate"
            raise SpecError(f"{said}, outside {LEAST_OF_PEAK:g} to 1", where=f"{row['id']}: step_time_s")
    if peak_gib is not None:
        least, most = 2 * parameters / row["n_gpus"] / 2**30, device.memory_bytes / 2**30
        if not least <= peak_gib <= most:
            said = f"{peak_gib:.3g} GiB is outside {least:.3g} (16-bit shares of the parameters) to {most:.0f}"
            raise SpecError(f"{said} (the device)", where=f"{row['id']}: peak_mem_gib")
