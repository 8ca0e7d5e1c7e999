"""Constants of the cost model, read from constants/*.toml: each with unit, value, bounds and origin.

A constant has one value for all devices or one per device generation. Physical bounds stand beside each; a value that
is NaN, negative or outside of them is refused, whoever wrote it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.errors import SpecError, nearest
from autopar.hardware import DEVICES, generation_of
from autopar.specs import ClusterSpec, DeviceSpec

__all__ = ["Constant", "Constants", "GenerationConstants", "load_constants", "with_constants"]

FOLDER = Path(__file__).parent / "constants"

_HIDDEN = ("tp_hidden", "tp_linear_hidden", "pp_hidden", "cp_hidden")
"""Fractions of communication that hide behind compute."""


@dataclass(frozen=True)
class Constant:
    """`generation` "" holds for every device. `fitted`: the fit may move it within [low, high], from `prior`,
    which is what is known without the rows of the fit."""

    name: str
    generation: str
    value: float
    unit: str
    low: float
    high: float
    origin: str
    fitted: bool = False
    prior: float = math.nan

    def __post_init__(self) -> None:
        where = f"constant {self.key}"
        if not (isinstance(self.value, (int, float)) and math.isfinite(self.value)) or self.value < 0:
            raise SpecError(f"must be finite and not negative, not {self.value!r}", where=where)
        if not self.low <= self.value <= self.high:
            raise SpecError(f"{self.value} is outside of [{self.low}, {self.high}] {self.unit}", where=where)
        if self.fitted and not self.low <= self.prior <= self.high:
            raise SpecError(f"needs a prior in [{self.low}, {self.high}], not {self.prior}", where=where)
        if not self.unit or not self.origin:
            raise SpecError("every constant states its unit and its origin", where=where)

    @property
    def key(self) -> str:
        return f"{self.generation}.{self.name}" if self.generation else self.name


@dataclass(frozen=True)
class GenerationConstants:
    """The constants that hold for one device: its generation's, and those of all."""

    generation: str
    values: Mapping[str, float]

    @property
    def hides(self) -> bool:
        """False where communication takes the cores that compute: a CPU moves bytes itself."""
        return self.generation != "cpu"

    def __getitem__(self, name: str) -> float:
        if name not in self.values:
            raise SpecError(
                f"no value of {name} for devices of generation {self.generation!r}", where="cost model constants",
                try_=nearest(name, list(self.values)),
            )  # fmt: skip
        return self.values[name]

    def get(self, name: str, default: float) -> float:
        return self.values.get(name, default)

    def peak(self, device: DeviceSpec, dtype: str) -> float:
        """Peak of `dtype`; a four-bit peak is a multiple of the fp8 one, as DeviceSpec knows no such dtype. Raises
        SpecError if the device has none."""
        known, factor = ("fp8", self["fp4_over_fp8"]) if dtype == "nvfp4" else (dtype, 1.0)
        if known not in device.flops:
            raise SpecError(
                f"{device.name} has no peak rate in {known}", where="device.flops",
                try_=f"{known}_flops, or one of {', '.join(sorted(device.flops))}",
            )  # fmt: skip
        return device.flops[known] * factor


@dataclass(frozen=True)
class Constants:
    """All constants, by key."""

    table: Mapping[str, Constant]
    _views: dict[str, GenerationConstants] = field(default_factory=dict, repr=False, compare=False)

    def __iter__(self) -> Iterator[Constant]:
        return iter(self.table.values())

    def of(self, device: DeviceSpec) -> GenerationConstants:
        return self.generation(generation_of(device))

    def generation(self, generation: str) -> GenerationConstants:
        """An unknown generation has the values that hold for all, and those of the nearest measured one."""
        if generation not in self._views:
            shared = {c.name: c.value for c in self if not c.generation}
            own = {c.name: c.value for c in self if c.generation == generation}
            found = GenerationConstants(generation, MappingProxyType(shared | own))
            if not found.hides:
                found = replace(found, values=MappingProxyType(shared | own | dict.fromkeys(_HIDDEN, 0.0)))
            self._views[generation] = found
        return self._views[generation]

    def behind(self, device: DeviceSpec) -> list[Constant]:
        """Those that prices of a device are made of: the device's own, its generation's, those of all."""
        kinds = {kind for kind, known in DEVICES.items() if known.name == device.name}
        shared = [c for c in self if not c.generation]
        return [c for c in self if c.generation in kinds | {generation_of(device)}] + shared

    def priors(self) -> Constants:
        """Every fitted constant at its prior."""
        return self.with_values({c.key: c.prior for c in self if c.fitted})

    def with_values(self, values: Mapping[str, float]) -> Constants:
        """A copy with other values, each checked against its bounds. Raises SpecError for an unknown key."""
        for key in values:
            if key not in self.table:
                raise SpecError(f"unknown constant {key!r}", where="constants", try_=nearest(key, list(self.table)))
        return Constants({k: replace(c, value=values[k]) if k in values else c for k, c in self.table.items()})


@lru_cache(maxsize=1)
def load_constants(path: Path = FOLDER / "fitted.toml") -> Constants:
    """Raises SpecError for a file that is not TOML, a constant without unit or origin, or a value out of bounds."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecError(f"not TOML: {error}", where=str(path)) from error
    constants = [c for name, entry in document.items() for c in _entries(name, entry)]
    return Constants(MappingProxyType({c.key: c for c in constants}))


def with_constants(cluster: ClusterSpec, constants: Constants) -> ClusterSpec:
    """The cluster with its efficiencies and power derate taken from `constants`, as the presets take them."""
    device, table = cluster.device, constants.of(cluster.device)
    kind = next((k for k, known in DEVICES.items() if known.name == device.name), "")
    derate = constants.table.get(f"{kind}.power_derate")
    device = replace(
        device, matmul_efficiency=table["matmul_16bit"], attention_efficiency=table["attention_16bit"],
        power_derate=derate.value if derate else device.power_derate,
    )  # fmt: skip
    links = tuple(
        replace(link, efficiency=table["nvlink_efficiency" if link.name == "nvlink" else "network_efficiency"])
        for link in cluster.links
    )
    return replace(cluster, device=device, links=links)


def _entries(name: str, entry: Mapping[str, Any]) -> list[Constant]:
    """A `value` for all devices, or a table `values` by generation."""
    missing = [key for key in ("unit", "low", "high", "origin") if key not in entry]
    if missing:
        raise SpecError(f"missing {', '.join(missing)}", where=f"constant {name}")
    values = entry.get("values", {"": entry.get("value", math.nan)})
    priors = entry.get("priors", {"": entry.get("prior", math.nan)})
    return [
        Constant(name, generation, value, entry["unit"], entry["low"], entry["high"], entry["origin"],
                 bool(entry.get("fitted", False)) and generation not in entry.get("fixed", ()),
                 priors.get(generation, math.nan))
        for generation, value in values.items()
    ]  # fmt: skip
