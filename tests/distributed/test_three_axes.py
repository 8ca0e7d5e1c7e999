"""Every family on eight ranks: tensor, pipeline and a third axis together, against one process."""

from __future__ import annotations

from functools import partial

import pytest

from autopar.cost_model.search import search
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.runtime.limits import model_precision
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.verify import verify_plans
from tests.distributed.test_families import FAMILIES, build, dtype_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WITH_CONTEXT = ("llama", "qwen2", "gemma3", "tiny_gpt")
"""Their third axis is cp; that of the others dp."""


def mixed_plan(third: str, traced: TracedModel) -> list[Plan]:
    """The search's layout over tp, in two stages, on two ranks of the third axis."""
    precision = model_precision(traced)
    train = TrainSpec(global_batch=8, seq_len=16, precision=precision)
    plan = search(traced, ClusterSpec.parse("local:2"), train, Pins(tp=2)).plan
    layers = [s.path for s in traced.layers]
    mixed = plan.replace(
        degrees=Degrees(tp=2, pp=2, **{third: 2}),
        micro_batch=2,
        schedule="1f1b",
        zero=0,
        prediction={},
        stages=(tuple(layers[: len(layers) // 2]), tuple(layers[len(layers) // 2 :])),
    )
    return [mixed]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_as_one_process_on_three_axes(family: str) -> None:
    planner = partial(mixed_plan, "cp" if family in WITH_CONTEXT else "dp")
    (result,) = verify_plans(partial(build, family), planner, ranks=8, dtype=dtype_of(family))
    assert result.passed, result.text()
