"""Field cases rng-04 and bf-01: a model built on the meta device gets the same weights and buffers under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans


def _state(plan: Plan) -> tuple[dict[str, Tensor], float]:
    """Gathered weights, and the loss they give."""
    with torch.device("meta"):
        model = models.llama_tiny()
    batch = models.default_batch()
    pm = build(model, prepare(trace(model, batch)), plan, seed=7)
    loss = pm.step(batch).item()
    return pm.state_dict(), loss


@pytest.mark.distributed
def test_rng_04_every_plan_starts_from_the_same_weights() -> None:
    reference, loss = _state(plans.megatron("llama", Degrees(), micro_batch=2))
    first, second = (reference[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 2))
    assert not torch.equal(first, second)
    for degrees in (Degrees(tp=2), Degrees(pp=2), Degrees(dp=2)):
        for state, found in run_ranks(2, _state, plans.megatron("llama", degrees, micro_batch=2)):
            assert state.keys() == reference.keys()
            assert all(torch.equal(state[name], reference[name]) for name in reference)
            assert abs(found - loss) < 1e-6


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_bf_01_buffers_are_those_of_a_normal_construction(family: str) -> None:
    normal = models.BUILDERS[family]()
    with torch.device("meta"):
        model = models.BUILDERS[family]()
    batch = models.default_batch()
    layers = tuple(s.path for s in trace(model, batch).layers)
    plan = Plan(degrees=Degrees(), global_batch=8, seq_len=16, micro_batch=8, stages=(layers,), precision="fp64")
    pm: Any = build(model, prepare(trace(model, batch)), plan)
    pm.load_state_dict(normal.state_dict())
    assert torch.equal(pm(**batch).logits, normal(**batch).logits)
