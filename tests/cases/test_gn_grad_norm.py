"""gn-01, gn-03, gn-04, gn-05: the gradient norm is that of the one model, whatever holds its parts."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.build import build
from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.grad_norm import GradientNorm
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed

NORMS = (2.0, 1.0, math.inf, 3.0)


def _clip(model: Any, batch: Any, degrees: Degrees, max_norm: float, norms: Any = NORMS, **changes: Any) -> None:
    traced = prepare(trace(model, batch))
    name = "gpt2" if degrees.pp > 1 else "qwen3"
    pm = build(copy.deepcopy(model), traced, plans.megatron(name, degrees, micro_batch=2).replace(**changes))
    for norm_type in norms:
        reference = copy.deepcopy(model)
        reference(**batch).loss.backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()], norm_type)
        limit = min(max_norm, expected.item() / 2)  # always clipped, whatever the norm
        torch.nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type)
        pm.zero_grad()
        pm.step(batch)
        norm = pm.clip_grad_norm_(limit, norm_type)
        torch.testing.assert_close(norm, expected.double(), rtol=1e-6, atol=0)
        for parameter, gradient in pm.full_gradients().items():
            own = dict(reference.named_parameters())[parameter].grad
            assert (gradient - own).abs().max() <= 1e-5 * own.abs().max(), parameter  # the models cast to fp32 inside
        everyone = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, norm)
        assert all(torch.equal(norm, other) for other in everyone)
    for as_users_do in (pm.parameters, lambda: [p for p in pm.parameters() if p.grad is not None]):
        if pm._state.is_part:
            with pytest.raises(AutoparError, match="pm.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(as_users_do(), 1.0)
    assert len(list(pm.parameters())) == len(dict(pm.named_parameters()))


def _gn_01_and_04() -> None:
    for degrees in (Degrees(tp=4), Degrees(tp=2, dp=2), Degrees(cp=2, tp=2)):
        _clip(models.qwen3_tiny(), models.default_batch(), degrees, 0.1)
    # Neighbours: two copies of two shards, and shards beside what tp replicates.
    _clip(models.qwen3_tiny(), models.default_batch(), Degrees(dp=4), 0.1, (2.0,), zero=3, zero_group=2)
    _clip(models.qwen3_tiny(), models.default_batch(), Degrees(dp=2, tp=2), 0.1, (2.0,), zero=2)


def test_gn_01_gn_04_replicated_parameters_count_once_and_torchs_own_clip_is_refused() -> None:
    run_ranks(4, _gn_01_and_04, timeout_s=200)


def _gn_03() -> None:
    _clip(models.gpt2_tiny(), models.default_batch(), Degrees(pp=2), 0.05)  # its embedding is tied across the stages


def test_gn_03_stages_clip_by_one_norm_of_every_type() -> None:
    run_ranks(2, _gn_03, timeout_s=120)


def _norm_of(gradients: dict[str, Tensor], counted: set[str], alone: bool = False) -> GradientNorm:
    state = SimpleNamespace(
        parameters={name: SimpleNamespace(grad=g) for name, g in gradients.items()}, counts_here=counted.__contains__
    )
    return GradientNorm(state, SimpleNamespace(alone=alone, device=torch.device("cpu")))  # type: ignore[arg-type]


def _half_precision() -> float:
    return _norm_of({"w": torch.full((500,), 300.0, dtype=torch.float16)}, {"w"}).total().item()


def test_gn_05_half_precision_gradients_do_not_overflow() -> None:
    for norm in run_ranks(2, _half_precision, timeout_s=60):
        assert norm == pytest.approx(9486.83, abs=0.01)


def test_gn_01_unit_example_and_faults_are_named() -> None:
    sharded, replicated = torch.full((4,), 2.0), torch.full((9,), 1.0)
    assert _norm_of({"s": sharded, "r": replicated}, {"s", "r"}, alone=True).total().item() == 5.0
    assert _norm_of({"s": sharded, "r": replicated}, {"s"}, alone=True).total().item() == 4.0
    for norm_type, expected in ((2.0, 5.0), (1.0, 17.0), (math.inf, 2.0)):
        whole = _norm_of({"s": sharded, "r": replicated, "none of it": torch.empty(0)}, {"s", "r", "none of it"}, True)
        assert whole.total(norm_type).item() == pytest.approx(expected)
        assert _norm_of({"none of it": torch.empty(0)}, {"none of it"}, True).total(norm_type).item() == 0.0
    broken = _norm_of({"s": sharded, "r": torch.tensor([math.nan, 1.0])}, {"s", "r"}, alone=True)
    assert not math.isfinite(broken.total(math.inf).item())
    with pytest.raises(AutoparError, match=r"nan: gradients that are not finite: r \(rank 0\)"):
        broken.clip(1.0, error_if_nonfinite=True)
