"""Steps that an error ends, evaluation in inference mode, and optimizers that step inside of a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import AutoparError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


def _plan(degrees: Degrees, **changes: Any) -> Plan:
    return plans.megatron("tiny_gpt", degrees, micro_batch=2).replace(**changes)


class _BoomError(Exception):
    pass


class _Fuse:
    """Raises at the second run of a module while it is armed: one micro-batch has left its gradients by then."""

    def __init__(self, module: nn.Module) -> None:
        self.left = 0
        module.register_forward_pre_hook(self._run)

    def _run(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise _BoomError("boom")


def _same_gradients(pm: ParallelModule, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=0, atol=1e-12, msg=name)


def _gradients_are_those_of_before(model: nn.Module, traced: TracedModel) -> None:
    for plan in (_plan(Degrees(dp=2)), _plan(Degrees(tp=2)), _plan(Degrees(cp=2))):
        pm, reference = build(copy.deepcopy(model), traced, plan), copy.deepcopy(model)
        fuse = _Fuse(pm._graphs[0])
        for seed, breaks in ((1, False), (2, True), (3, False)):
            fuse.left = 2 if breaks else 0
            if breaks:
                with pytest.raises(_BoomError):
                    pm.step(models.default_batch(seed=seed))
                _same_gradients(pm, reference)
            else:
                pm.step(models.default_batch(seed=seed))
                reference(**models.default_batch(seed=seed)).backward()
        _same_gradients(pm, reference)


def _what_is_under_way_ends_the_run(model: nn.Module, traced: TracedModel) -> None:
    for zero in (1, 3):
        pm = build(copy.deepcopy(model), traced, _plan(Degrees(dp=2), zero=zero))
        _Fuse(pm._graphs[0]).left = 2
        with pytest.raises(_BoomError):
            pm.step(models.default_batch())
        with pytest.raises(
            AutoparError, match=r"an earlier step was broken off \(_BoomError: boom\).*parallelize again"
        ):
            pm.step(models.default_batch())


def _a_users_own_backward(model: nn.Module, traced: TracedModel) -> None:
    pm, reference = build(copy.deepcopy(model), traced, _plan(Degrees(dp=2))), copy.deepcopy(model)
    batch = models.default_batch()

    def boom(_: Tensor) -> None:
        raise _BoomError

    handle = next(iter(pm.parameters())).register_hook(boom)
    with pytest.raises(_BoomError):
        pm(**batch).backward()
    handle.remove()
    pm.zero_grad()
    pm(**batch).backward()
    reference(**batch).backward()
    _same_gradients(pm, reference)


def _inference(model: nn.Module, traced: TracedModel) -> None:
    batch = models.default_batch()
    for plan in (*(_plan(Degrees(dp=2), zero=zero) for zero in (0, 1, 3)), _plan(Degrees(pp=2))):
        pm, reference = build(copy.deepcopy(model), traced, plan), copy.deepcopy(model)
        with torch.inference_mode():
            before = pm.step(batch)
            if plan.degrees.pp == 1:
                torch.testing.assert_close(pm(**batch), before)
        torch.testing.assert_close(pm.step(batch), before, rtol=0, atol=1e-12)
        reference(**batch).backward()
        _same_gradients(pm, reference)


def _steps_inside(model: nn.Module, traced: TracedModel) -> None:
    """An optimizer in backward, as single-process recipes save memory, has one rank's part of a gradient."""
    for plan in (_plan(Degrees(dp=2)), _plan(Degrees(tp=2))):
        pm = build(copy.deepcopy(model), traced, plan)
        last = dict(pm.named_parameters())["norm.weight"]
        seen: list[Tensor] = []
        watching = last.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        pm.step(models.default_batch())
        assert seen
        watching.remove()
        for takes in (False, True):
            optimizer = torch.optim.SGD([last], lr=0.1)

            def inside(p: Tensor, takes: bool = takes, own: torch.optim.Optimizer = optimizer) -> None:
                if not takes:
                    own.step()
                p.grad = None

            handle = last.register_post_accumulate_grad_hook(inside)
            if takes and plan.degrees.tp > 1:
                handle.remove()
                continue
            with pytest.raises(AutoparError, match="parameters were changed, or their gradients taken away"):
                pm.step(models.default_batch())
            handle.remove()


def _all() -> None:
    model = models.tiny_gpt()
    traced = prepare(trace(model, models.default_batch()))
    _gradients_are_those_of_before(model, traced)
    _what_is_under_way_ends_the_run(model, traced)
    _a_users_own_backward(model, traced)
    _inference(model, traced)
    _steps_inside(model, traced)


def test_a_broken_step_leaves_gradients_as_they_were_or_is_the_last() -> None:
    run_ranks(2, _all, timeout_s=150)
