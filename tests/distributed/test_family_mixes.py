"""Model families on three axes at once in the layouts of `verify --all`, eight ranks, against one process."""

from __future__ import annotations

from functools import partial

import pytest

from autopar.mesh import Degrees
from autopar.pins import Pins
from autopar.runtime.launch import run_ranks
from autopar.verify import VerifyResult, _Comparison, _from_rank_zero
from autopar.verify.layout import FixedLayouts
from tests.distributed.test_families import build as family

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MIXES = {
    "gpt2": Degrees(dp=2, tp=2, pp=2),
    "qwen3": Degrees(cp=2, tp=2, pp=2),
    "gemma3": Degrees(cp=2, tp=2, pp=2),
}


def _result(comparison: _Comparison, degrees: Degrees) -> VerifyResult:
    layouts = FixedLayouts(comparison.traced, 8, 16)
    return comparison.run(_from_rank_zero(partial(layouts.plan, degrees, Pins())))


@pytest.mark.parametrize("name", MIXES)
def test_families_on_three_axes(name: str) -> None:
    once = partial(_Comparison, partial(family, name), Pins(), "float64", 1)
    result = run_ranks(8, _result, MIXES[name], once=once, timeout_s=280)[0]
    assert result.passed, result.text()
