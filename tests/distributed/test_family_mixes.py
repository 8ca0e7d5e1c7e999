"""Model families on three axes at once, eight ranks, against one process."""

from __future__ import annotations

from functools import partial

import pytest

from autopar.mesh import Degrees
from autopar.pins import Pins
from autopar.runtime.launch import run_ranks
from autopar.verify import _Comparison, _from_rank_zero
from autopar.verify.layout import FixedLayouts
from tests.distributed.test_families import build as family

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MIXES = {Degrees(dp=2, tp=2, pp=2): ["gpt2"], Degrees(cp=2, tp=2, pp=2): ["qwen3", "gemma3"]}


def _failures(degrees: Degrees, names: list[str]) -> list[str]:
    failed = []
    for name in names:
        comparison = _Comparison(partial(family, name), Pins(), "float64", 1)
        layouts = FixedLayouts(comparison.traced, 8, 16)
        plan = _from_rank_zero(partial(layouts.plan, degrees, Pins()))
        result = comparison.run(plan)
        if not result.passed:
            failed.append(f"{name}\n{result.text()}")
    return failed


@pytest.mark.parametrize("degrees", MIXES, ids=str)
def test_families_on_three_axes(degrees: Degrees) -> None:
    failed = run_ranks(8, _failures, degrees, MIXES[degrees], timeout_s=280)[0]
    assert not failed, "\n\n".join(failed)
