"""Mixed precision: what is kept in fp32, what loss scaling does, and that ranks agree."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.collectives import convert
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

_DTYPES = {"bf16-mixed": torch.bfloat16, "fp16": torch.float16}


def _plan(degrees: Degrees, precision: str, zero: int = 0) -> Plan:
    return plans.megatron("tiny_gpt", degrees, micro_batch=2, precision=precision).replace(zero=zero)


def _model() -> nn.Module:
    return models.tiny_gpt(torch.float32)


def _mixed(plan: Plan, **options: Any) -> ParallelModule:
    model = _model()
    traced = prepare(trace(model, models.default_batch(), parameter_dtype=_DTYPES[plan.precision]))
    return build(model, traced, plan, **options)


def _expected_gradients(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Micro-batches of two rows through a 16-bit copy of the model; gradients added up in fp32."""
    total: dict[str, Tensor] = {}
    tokens = batch["labels"][:, 1:].numel()
    for part in range(0, 8, 2):
        narrow = _model().to(dtype)
        logits = narrow(batch["input_ids"][part : part + 2])
        labels = batch["labels"][part : part + 2, 1:].flatten()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum") / tokens
        loss.backward()
        for name, p in narrow.named_parameters():
            assert p.grad is not None
            total[name] = total.get(name, torch.zeros(p.shape)) + p.grad.float()
    return total


def test_masters_and_gradients_are_fp32_and_micro_batches_add_up_in_fp32() -> None:
    batch = models.default_batch()
    pm = _mixed(_plan(Degrees(), "bf16-mixed"))
    pm.step(batch)
    expected = _expected_gradients(batch, torch.bfloat16)
    for name, p in pm.named_parameters():
        assert p.dtype == torch.float32
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        error = (p.grad - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 0.02, f"{name} {error}"  # the rounding of single bf16 operations, not of their sum
    before = pm.state_dict()["norm.weight"].clone()
    optimizer = pm.optimizer(torch.optim.SGD, lr=1e-5)
    first = pm.step(batch)
    optimizer.step()
    after = pm.state_dict()["norm.weight"]
    assert not torch.equal(before, after), "a step far below bf16 resolution is not lost in the master"
    assert (before - after).abs().max() < 1e-4
    pm.optimizer(torch.optim.SGD, lr=1.0).step()
    assert pm.step(batch) < first, "the copies follow their masters"


def _alike() -> None:
    """Every layout of two ranks trains as one process does in the same precision."""
    batch = models.default_batch()
    losses = {}
    for precision in ("bf16-mixed", "fp16"):
        expected = _expected_gradients(batch, _DTYPES[precision])
        for degrees, zero in ((Degrees(dp=2), 0), (Degrees(dp=2), 3), (Degrees(tp=2), 0), (Degrees(pp=2), 0)):
            pm = _mixed(_plan(degrees, precision, zero))
            losses[precision, degrees, zero] = pm.step(batch).item()
            for name, gradient in pm.full_gradients().items():
                assert gradient is not None
                assert gradient.dtype == torch.float32
                error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
                assert error < 0.05, f"{precision} {degrees} {zero} {name} {error}"
    assert max(losses.values()) - min(losses.values()) < 0.02


class _WritesData(torch.optim.SGD):
    """As older optimizers do: autograd sees no change of the parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16"])
def test_copies_follow_whatever_writes_the_masters(precision: str) -> None:
    batch, losses = models.default_batch(), []
    for optimizer in (torch.optim.SGD, partial(torch.optim.SGD, fused=True), _WritesData):
        pm = _mixed(_plan(Degrees(), precision))
        step = pm.optimizer(optimizer, lr=0.5)
        losses.append([])
        for _ in range(3):
            losses[-1].append(pm.step(batch).item())
            step.step()
            step.zero_grad()
    assert losses[0][2] < losses[0][0] - 0.01
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16"])
def test_what_is_frozen_while_training_stays_as_it_is(precision: str) -> None:
    pm = _mixed(_plan(Degrees(), precision))
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.5)
    name, frozen = next((n, p) for n, p in pm.named_parameters() if n.endswith("mlp.0.weight"))
    for trains in (False, True):
        frozen.requires_grad_(trains)
        before = {n: p.detach().clone() for n, p in pm.named_parameters()}
        optimizer.zero_grad()
        pm.step(models.default_batch())
        optimizer.step()
        still = {n for n, p in pm.named_parameters() if torch.equal(p, before[n])}
        assert still == (set() if trains else {name})


@pytest.mark.distributed
def test_every_axis_in_mixed_precision() -> None:
    run_ranks(2, _alike, timeout_s=200)


def _run(pm: ParallelModule, called: bool) -> None:
    """A step, or the user's own backward through the model as a function."""
    if called:
        pm(**models.default_batch()).backward()
        pm.forward(**models.default_batch())  # takes over what there is to tell
    else:
        pm.step(models.default_batch())


def _overflow(degrees: Degrees, at: int, called: bool = False) -> dict[str, Any]:
    pm = _mixed(_plan(degrees, "fp16"))
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    before = {name: p.detach().clone() for name, p in pm.named_parameters()}
    scale = pm._judge.scale
    hook = None
    if dist.get_rank() == at:
        last = list(pm._state.copies.of.values())[-1]
        hook = last.register_hook(lambda g: g * float("inf"))
    _run(pm, called)
    optimizer.step()
    assert all(torch.equal(before[name], p) for name, p in pm.named_parameters())
    assert scale is not None
    assert pm._judge.scale == scale / 2
    if hook is not None:
        hook.remove()
    _run(pm, called)
    optimizer.step()
    assert any(not torch.equal(before[name], p) for name, p in pm.named_parameters())
    return {"notices": pm.notices, "scale": float(pm._judge.scale)}


def _overflows() -> list[dict[str, Any]]:
    return [_overflow(Degrees(tp=2), 1), _overflow(Degrees(pp=2), 0), _overflow(Degrees(tp=2), 1, called=True)]


@pytest.mark.distributed
def test_nm_04_all_ranks_skip_together() -> None:
    results = run_ranks(2, _overflows, timeout_s=120)
    assert results[0] == results[1]
    for case, rank in zip(results[0], (1, 0, 1), strict=True):
        assert "step 1: gradients that are not finite" in case["notices"][-1]
        assert f"(rank {rank}" in case["notices"][-1] or f", {rank})" in case["notices"][-1]
        assert case["notices"][-1].endswith("skipped")


def test_not_finite_gradients_stop_the_run_by_name() -> None:
    model = models.tiny_gpt()
    traced = prepare(trace(model, models.default_batch()))
    pm = build(copy.deepcopy(model), traced, _plan(Degrees(), "fp64"), non_finite="stop")
    pm.step(models.default_batch())
    earlier = {name: g.clone() for name, g in pm.full_gradients().items() if g is not None}
    dict(pm.named_parameters())["norm.bias"].register_hook(lambda g: g * float("nan"))
    with pytest.raises(AutoparError, match=r"step 2: gradients that are not finite: norm.bias \(rank 0\)"):
        pm.step(models.default_batch())
    kept = pm.full_gradients()
    assert all(torch.equal(gradient, kept[name]) for name, gradient in earlier.items())


def test_a_users_own_backward_is_judged_as_a_step_is() -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    traced = prepare(trace(model, batch))
    for non_finite in ("skip", "stop"):
        pm = build(copy.deepcopy(model), traced, _plan(Degrees(), "fp64"), non_finite=non_finite)
        pm(**batch).backward()
        earlier = {name: g.clone() for name, g in pm.full_gradients().items() if g is not None}
        dict(pm.named_parameters())["norm.bias"].register_hook(lambda g: g * float("nan"))
        if non_finite == "stop":
            with pytest.raises(AutoparError, match=r"step 2: gradients that are not finite: norm.bias \(rank 0\)"):
                pm(**batch).backward()
        else:
            pm(**batch).backward()
        kept = pm.full_gradients()
        assert all(torch.equal(gradient, kept[name]) for name, gradient in earlier.items())


def test_fp16_scales_what_a_users_own_loss_sends_back() -> None:
    """Gradients of 1e-9 are nothing in fp16, and are kept under the factor of the loss."""
    batch = models.default_batch()
    pm = _mixed(_plan(Degrees(), "fp16"))
    expected = _expected_gradients(batch, torch.float16)
    (pm(**batch) * 1e-5).backward()
    for name, gradient in pm.full_gradients().items():
        assert gradient is not None
        error = (gradient * 1e5 - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 0.05, f"{name} {error}"


def test_in_fp16_an_overflow_stops_a_run_only_when_no_factor_helps() -> None:
    pm = _mixed(_plan(Degrees(), "fp16"), non_finite="stop")
    pm._state.copies.of["norm.bias"].register_hook(lambda g: g * float("inf"))
    for step in range(1, 17):  # from 2**16 down to 1
        pm.step(models.default_batch())
        assert pm.notices[-1] == f"step {step}: gradients that are not finite: norm.bias (rank 0); skipped"
    with pytest.raises(AutoparError, match=r"step 17: gradients that are not finite: norm.bias \(rank 0\)"):
        pm.step(models.default_batch())


def _under_autocast() -> None:
    """The cast of a weight that autocast keeps for later micro-batches outlives the weight, which ZeRO gives up."""
    batch, reference = models.default_batch(), _model()
    traced = prepare(trace(_model(), batch))
    with torch.autocast("cpu", torch.bfloat16):
        loss = reference(**batch)
    loss.backward()
    for degrees, zero in ((Degrees(dp=2), 0), (Degrees(dp=2), 1), (Degrees(dp=2), 3), (Degrees(tp=2), 0)):
        plan = _plan(degrees, "fp32", zero).replace(checkpoint={"blocks.*": "full"})
        pm = build(_model(), traced, plan)
        with torch.autocast("cpu", torch.bfloat16):
            pm.step(batch)
            assert torch.is_autocast_cache_enabled()
        for name, p in reference.named_parameters():
            gradient = pm.full_gradients()[name]
            assert p.grad is not None
            assert gradient is not None
            error = (gradient - p.grad).abs().max() / p.grad.abs().max()
            assert error < 0.05 or name.endswith("qkv.bias"), f"{degrees} {zero} {name} {error}"


@pytest.mark.distributed
def test_autocast_around_a_step_is_that_of_one_process() -> None:
    run_ranks(2, _under_autocast, timeout_s=150)


def _nm_02() -> tuple[list[float], list[float]]:
    """256 + 0.5 + 0.5 + 0.5 in bf16, forward as a partial sum and backward as the gradient of a copied tensor."""
    mine = torch.tensor([[256.0, 0.5, 0.5, 0.5][dist.get_rank()]], dtype=torch.bfloat16)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    forward, backward = [], []
    for wide in (True, False):
        forward.append(convert(mine, "P", "R", group=group, wide=wide).item())
        x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        convert(x, "R", "R|P", group=group, wide=wide).backward(mine)
        assert x.grad is not None
        backward.append(x.grad.item())
    return forward, backward


@pytest.mark.distributed
def test_nm_02_sums_of_bf16_can_be_taken_in_fp32() -> None:
    for forward, backward in run_ranks(4, _nm_02, timeout_s=60):
        assert forward[0] == backward[0] == 258.0  # 257.5 rounded to bf16
        assert forward[1] == backward[1]
        assert forward[1] in (256.0, 257.0, 258.0)  # whatever order the backend adds in
