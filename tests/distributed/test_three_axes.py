"""Every family on eight ranks: tensor, pipeline and a third axis together, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autopar.cost_model.search import search
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.distributed.test_families import FAMILIES, build

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WITH_CONTEXT = ("llama", "qwen2", "gemma3", "tiny_gpt")
"""Their third axis is cp; that of the others dp."""


def mixed_plan(family: str) -> Plan:
    """The search's layout over tp, in two stages, on two context or data ranks."""
    model, batch = build(family)
    precision = "fp64" if next(model.parameters()).dtype == torch.float64 else "fp32"
    traced = prepare(trace(model, batch))
    train = TrainSpec(global_batch=8, seq_len=16, precision=precision)
    plan = search(traced, ClusterSpec.parse("local:2"), train, Pins(tp=2)).plan
    layers = [s.path for s in traced.layers]
    third = {"cp": 2} if family in WITH_CONTEXT else {"dp": 2}
    return plan.replace(
        degrees=Degrees(tp=2, pp=2, **third),
        micro_batch=2,
        schedule="1f1b",
        zero=0,
        prediction={},
        stages=(tuple(layers[: len(layers) // 2]), tuple(layers[len(layers) // 2 :])),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_as_one_process_on_three_axes(family: str) -> None:
    plan = mixed_plan(family)
    dtype = "float64" if plan.precision == "fp64" else "float32"
    (result,) = verify_plans(partial(build, family), [plan], dtype=dtype)
    assert result.passed, result.text()
