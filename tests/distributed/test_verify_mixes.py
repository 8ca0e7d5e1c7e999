"""verify builds every pinned mix, whether or not the search would choose it, and the whole matrix in one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import Pins
from autopar.trace import trace
from autopar.verify import VerifyResult, verify_all
from autopar.verify.layout import pinned_plan
from autopar.verify.matrix import Case, MatrixResult, every_case
from tests import models, plans


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


@pytest.fixture(scope="module")
def traced() -> Any:
    return prepare(trace(*tiny_gpt()))


def _pinned(traced: Any, ranks: int, *texts: str) -> Plan:
    return pinned_plan(traced, ranks, Pins.parse(texts), 8, 16)


def test_every_pin_is_in_the_plan(traced: Any) -> None:
    plan = _pinned(traced, 8, "zero=3", "dp=2", "pp=2", "tp=2", "checkpoint=full", "schedule=interleaved", "sp=true")
    assert plan.degrees == Degrees(dp=2, pp=2, tp=2)
    assert (plan.zero, plan.schedule, plan.virtual_stages, plan.sequence_sharding) == (3, "interleaved", 2, True)
    assert len(plan.stages) == 4
    assert plan.micro_batches >= 4
    assert all(plan.checkpoint_mode(f"blocks.{i}") == "full" for i in range(4))
    assert "blocks.*.attention.qkv.weight" in plan.parameters


def test_free_degrees_are_chosen_so_that_pins_have_an_effect(traced: Any) -> None:
    assert _pinned(traced, 4, "schedule=zero-bubble").degrees.pp == 4
    assert _pinned(traced, 4, "zero=2").degrees.dp == 4
    assert _pinned(traced, 4, "virtual_stages=2").degrees == Degrees(dp=2, pp=2), "four layers make four stages"
    assert _pinned(traced, 4, "zero=1", "schedule=interleaved").degrees == Degrees(dp=2, pp=2)
    assert _pinned(traced, 2, "cp=2").degrees == Degrees(cp=2)


def test_pins_that_cannot_be_are_refused(traced: Any) -> None:
    with pytest.raises(AutoparError, match="zero 1 shards over dp x cp, and the pins leave one such rank on 2 devices"):
        _pinned(traced, 2, "zero=1", "tp=2")
    with pytest.raises(AutoparError, match="4 layers do not make 6 stages"):
        _pinned(traced, 2, "virtual_stages=3", "pp=2")
    with pytest.raises(AutoparError, match="16 tokens cannot be cut into 3"):
        _pinned(traced, 3, "cp=3")


def test_the_matrix_holds_each_mix_once_and_none_without_effect() -> None:
    cases = list(every_case(4, Pins(), 8, 16))
    assert len({(degrees, pins) for degrees, pins in cases}) == len(cases)
    assert {degrees for degrees, _ in cases} >= {Degrees(dp=4), Degrees(cp=2, tp=2), Degrees(pp=2, tp=2), Degrees(pp=4)}
    for degrees, pins in cases:
        assert (pins.schedule is not None) == (degrees.pp > 1)
        assert not (pins.zero and degrees.dp * degrees.cp == 1)
        assert not (pins.sp and degrees.tp == 1)
    only = list(every_case(4, Pins(zero=3, pp=2), 8, 16))
    assert {degrees for degrees, _ in only} == {Degrees(dp=2, pp=2), Degrees(cp=2, pp=2)}
    assert {pins.zero for _, pins in only} == {3}


def test_one_failure_fails_the_matrix() -> None:
    plan = plans.megatron("tiny_gpt", Degrees(dp=2))
    good = VerifyResult(0.0, 1e-15, 1e-15, (), plan, 1e-10, 1)
    bad = replace(good, grad_error=0.5, worst=({"error": 0.5, "what": "gradient", "name": "norm.weight"},))
    refused = Case(Degrees(pp=2), Pins(schedule="gpipe", checkpoint="none"), "not today")
    passed, failed = Case(plan.degrees, Pins(), good), Case(plan.degrees, Pins(), bad)
    assert MatrixResult((passed, refused), 1).passed
    assert "refused: not today" in MatrixResult((passed, refused), 1).text()
    assert not MatrixResult((refused,), 1).passed, "nothing ran"
    result = MatrixResult((passed, failed), 1)
    assert not result.passed
    assert "5.00e-01  gradient  norm.weight" in result.text()
    assert result.text().endswith("1 passed, 1 FAILED, 0 refused")


@pytest.mark.distributed
def test_the_matrix_of_two_ranks() -> None:
    result = verify_all(tiny_gpt, 2, Pins(checkpoint="full"), timeout_s=200)
    assert result.passed, result.text()
    verdicts = [case.verdict for case in result.cases]
    assert verdicts.count("passed") == len(verdicts) == 14, result.text()
    assert len(result.to_data()["cases"]) == 14
