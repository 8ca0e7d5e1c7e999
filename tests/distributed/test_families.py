"""Model families, tiny, against one process: tensor (as the search lays it out), pipeline, context, data parallel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from autopar.cost_model.search import search
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.runtime.limits import model_precision
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.verify import verify_plans
from tests import models

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FAMILIES = {**models.BUILDERS, **models.MORE_HF_BUILDERS, **models.OTHER_HF_BUILDERS}
NAMES = ["gpt2", "mistral", "bert", "t5", "encoder", *models.MORE_HF_BUILDERS, *models.OTHER_HF_BUILDERS]


def build(family: str) -> tuple[nn.Module, dict[str, Any]]:
    return FAMILIES[family](), models.default_batch()


def dtype_of(family: str) -> str:
    """That it is compared in: a model whose kernels have no fp64 is built in fp32."""
    return str(next(FAMILIES[family]().parameters()).dtype).removeprefix("torch.")


def family_plans(traced: TracedModel) -> list[Plan]:
    """Two ranks on each axis."""
    precision = model_precision(traced)
    layers = [s.path for s in traced.layers]
    half = len(layers) // 2
    train = TrainSpec(global_batch=8, seq_len=16, precision=precision)
    cluster = ClusterSpec.parse("local:2")

    def plan(degrees: Degrees, *stages: list[str]) -> Plan:
        return Plan(
            degrees=degrees,
            global_batch=8,
            seq_len=16,
            micro_batch=2,
            stages=tuple(map(tuple, stages)),
            precision=precision,
        )

    return [
        *(search(traced, cluster, train, Pins(tp=2, sp=sp)).plan for sp in (False, True)),
        plan(Degrees(pp=2), layers[:half], layers[half:]),
        plan(Degrees(cp=2), layers),
        plan(Degrees(dp=2), layers),
    ]


@pytest.mark.parametrize("family", NAMES)
def test_family_trains_as_one_process_on_every_axis(family: str) -> None:
    results = verify_plans(partial(build, family), family_plans, ranks=2, dtype=dtype_of(family))
    failed = [r.text() for r in results if not r.passed]
    assert not failed, "\n\n".join(failed)
