"""nm-01: rounding is told from faults, and faults are named by parameter. nm-02 and nm-04 are in
tests/runtime/test_precision.py."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autopar.mesh import Degrees
from autopar.runtime import collectives, reductions
from autopar.runtime.launch import run_ranks
from autopar.runtime.training_step import TrainingStep
from autopar.specs import Pins
from autopar.verify import VerifyResult, _Comparison
from tests import models, plans

pytestmark = pytest.mark.distributed


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


def _norm_sums_skipped() -> None:
    """Norms under sequence sharding see a part of the tokens: their gradients are partial over tp."""
    reductions._partial_sums = lambda state, world: []


def _bias_twice() -> None:
    """A bias beside a sum over tp counts on the first rank only; here it does on both."""
    collectives._COLLECTIVES["keep_first"] = collectives._none


def _loss_twice() -> None:
    scaled = TrainingStep._scaled_loss
    TrainingStep._scaled_loss = lambda self, x: 2 * scaled(self, x)  # type: ignore[method-assign]


def _checked(fault: Any) -> list[VerifyResult]:
    if fault is not None:
        fault()
    wanted = [plans.megatron("tiny_gpt", Degrees(tp=2))]
    dtypes = ["float64"] if fault is not None else ["float64", "float32", "bfloat16"]
    results = []
    for dtype in dtypes:
        precision = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}[dtype]
        comparison = _Comparison(tiny_gpt, Pins(), dtype, 1)
        results += [comparison.run(p.replace(precision=precision)) for p in wanted]
    return results


@pytest.mark.parametrize(
    ("fault", "named"), [(_norm_sums_skipped, "norm"), (_bias_twice, "bias"), (_loss_twice, "loss")]
)
def test_nm_01_a_fault_is_flagged_with_its_parameters(fault: Any, named: str) -> None:
    (result,) = run_ranks(2, _checked, fault, timeout_s=120)[0]
    assert not result.passed
    assert any(named in str(entry["name"]) for entry in result.worst), result.text()


def test_nm_01_rounding_passes_at_its_stated_tolerance() -> None:
    exact, single, half = run_ranks(2, _checked, None, timeout_s=120)[0]
    assert (exact.tolerance, single.tolerance, half.tolerance) == (1e-10, 2e-5, 0.5)
    for result in (exact, single, half):
        assert result.passed, result.text()
    assert half.grad_error > 1e-3, "bf16 rounds, so it cannot be the test of correctness"
    assert "float64 shows that it is right" in half.text()
