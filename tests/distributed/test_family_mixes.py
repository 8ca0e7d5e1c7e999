"""Model families on three axes at once, eight ranks, against one process; and built on the meta device, cut by tp."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from autopar.api import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from autopar.verify import _Comparison, _from_rank_zero
from autopar.verify.layout import FixedLayouts
from tests import models
from tests.distributed.test_families import FAMILIES
from tests.distributed.test_families import build as family

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PIPELINED, CUT = Degrees(dp=2, tp=2, pp=2), Degrees(cp=2, tp=2, pp=2)
MIXES = {
    PIPELINED: ["gpt2", "bert", "t5", "encoder", "opt", "mixtral", "qwen2"],
    CUT: ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi", "neox"],
}


def _failures(degrees: Degrees, names: list[str]) -> list[str]:
    failed = []
    for name in names:
        dtype = "float32" if name == "mixtral" else "float64"
        comparison = _Comparison(partial(family, name), Pins(), dtype, 1)
        layouts = FixedLayouts(comparison.traced, 8, 16)
        plan = _from_rank_zero(partial(layouts.plan, degrees, Pins()))
        result = comparison.run(plan)
        if not result.passed:
            failed.append(f"{name}\n{result.text()}")
    return failed


@pytest.mark.parametrize("degrees", MIXES, ids=str)
def test_every_family_on_three_axes(degrees: Degrees) -> None:
    names = MIXES[degrees]
    failed = [
        text for half in (names[:4], names[4:]) for text in run_ranks(8, _failures, degrees, half, timeout_s=300)[0]
    ]
    assert not failed, "\n\n".join(failed)


def _meta_built(name: str, degrees: Degrees) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = FAMILIES[name]()
    traced = prepare(trace(model, models.default_batch()))
    layers = tuple(s.path for s in traced.layers)
    plan = Plan(degrees=degrees, global_batch=8, seq_len=16, micro_batch=4, stages=(layers,),
                precision="fp32" if name == "mixtral" else "fp64")  # fmt: skip
    if degrees.tp > 1:
        plan = _from_rank_zero(partial(FixedLayouts(traced, 8, 16).plan, degrees, Pins()))
    return build(model, traced, plan, seed=7).state_dict()


META = ["gpt2", "qwen3", "gemma3", "t5", "mistral", "phi", "neox", "opt", "mixtral", "encoder"]


def _meta_families() -> dict[str, dict[str, Tensor]]:
    return {name: _meta_built(name, Degrees(tp=2)) for name in META}


def test_weights_of_meta_built_models_do_not_depend_on_the_layout() -> None:
    (first, _) = run_ranks(2, _meta_families, timeout_s=300)
    for name, state in first.items():
        reference = _meta_built(name, Degrees())
        assert state.keys() == reference.keys()
        assert all(torch.equal(state[key], value) for key, value in reference.items()), name
        assert all(bool(value.isfinite().all()) for value in state.values()), name
