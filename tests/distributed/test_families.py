"""Model families, tiny, against one process: tensor (as the search lays it out), pipeline, context, data parallel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_model.search import search
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FAMILIES = {**models.BUILDERS, **models.MORE_HF_BUILDERS, **models.OTHER_HF_BUILDERS}
NAMES = ["gpt2", "mistral", "bert", "t5", "encoder", *models.MORE_HF_BUILDERS, *models.OTHER_HF_BUILDERS]


def build(family: str) -> tuple[nn.Module, dict[str, Any]]:
    return FAMILIES[family](), models.default_batch()


def family_plans(family: str) -> list[Plan]:
    """Two ranks on each axis."""
    model, batch = build(family)
    precision = "fp64" if next(model.parameters()).dtype == torch.float64 else "fp32"
    traced = prepare(trace(model, batch))
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
    wanted = family_plans(family)
    dtype = "float64" if wanted[0].precision == "fp64" else "float32"
    results = verify_plans(partial(build, family), wanted, dtype=dtype)
    failed = [r.text() for r in results if not r.passed]
    assert not failed, "\n\n".join(failed)
