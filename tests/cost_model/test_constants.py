"""Constants: bounded, with unit and origin, few; nonsense is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost_model.constant_table import Constant, load_constants, with_constants
from autopar.errors import SpecError
from autopar.hardware import DEVICES, generation_of, preset


def constant(value: float = 0.5, **changes: object) -> Constant:
    fields: dict[str, object] = {
        "name": "x", "generation": "", "value": value, "unit": "ratio", "low": 0.1, "high": 0.9,
        "origin": "a data sheet",
    }  # fmt: skip
    return Constant(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, 0.95, 0.05])
def test_a_value_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(SpecError, match="constant x"):
        constant(value)


def test_a_constant_without_origin_or_prior_is_refused() -> None:
    with pytest.raises(SpecError, match="origin"):
        constant(origin="")
    with pytest.raises(SpecError, match="prior"):
        constant(fitted=True)


def test_fitted_constants_are_few_and_bounded() -> None:
    """At most a dozen a device generation, and a price moves no further than physics lets it."""
    table = load_constants()
    for generation in ("ampere", "hopper", "blackwell"):
        assert sum(c.fitted and c.generation == generation for c in table) <= 12
    assert sum(c.fitted for c in table) <= 45
    assert all(c.low < c.high for c in table if c.fitted)


def test_other_values_are_checked_and_unknown_names_refused() -> None:
    table = load_constants()
    assert table.with_values({"k_fill": 10.0}).of(DEVICES["h100"])["k_fill"] == 10.0
    with pytest.raises(SpecError, match="k_fill"):
        table.with_values({"k_fill": -1.0})
    with pytest.raises(SpecError, match="did you mean 'k_fill'"):
        table.with_values({"k_fil": 1.0})


def test_a_file_with_a_nan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "constants.toml"
    path.write_text('[k_fill]\nunit = "elements"\nvalue = nan\nlow = 0\nhigh = 1\norigin = "none"\n')
    with pytest.raises(SpecError, match="must be finite"):
        load_constants(path)


def test_generation_of_devices() -> None:
    assert {name: generation_of(d) for name, d in DEVICES.items()} == {
        "v100-32g": "volta", "a100-40g": "ampere", "a100-80g": "ampere", "h100": "hopper", "h200": "hopper",
        "h100-500w": "hopper", "b200": "blackwell", "gb200": "blackwell", "gb300": "blackwell", "cpu": "cpu",
    }  # fmt: skip
    unknown = replace(DEVICES["h100"], name="something new", flops={"bf16": 900e12})
    assert generation_of(unknown) == "hopper"


def test_presets_hold_the_values_of_the_file() -> None:
    cluster = preset("dgx-h100", 2)
    assert with_constants(cluster, load_constants()) == cluster
