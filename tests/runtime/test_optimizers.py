"""Any optimizer that a plan can run trains as in one process; what it cannot run is refused before the first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.build import build
from autopar.errors import SpecError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.runtime.optimizer_probe import reads_across
from autopar.runtime.sharding import local_part
from autopar.trace import trace
from tests import models, plans


class Signum(torch.optim.Optimizer):
    """A user's own: steps by the sign of a running mean."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(group["momentum"]).add_(p.grad)
                    p.add_(mean.sign(), alpha=-group["lr"])


class Lars(Signum):
    """Steps by the norm of the whole tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / (1e-9 + p.grad.norm())))


class ByGroup(Lars):
    """By the norm of the whole tensor in groups that say so, element by element in the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = self.param_groups
        for group in every:
            self.param_groups = [group]
            (Lars if group.get("by_norm") else Signum).step(self)
        self.param_groups = every


def nesterov(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "nesterov factory": (nesterov, {"lr": 0.05}),
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3, "foreach": True, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-3}),
    "signum": (Signum, {"lr": 1e-4}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "lars": (Lars, {"lr": 1e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-6}),
    "sgd fused": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True}),
}
WHOLE = ("adafactor", "lars")
PLAIN = ("rprop", "sgd fused")
GROUPS = {"*.bias": {"weight_decay": 0.0, "lr": 1e-4}}


def _scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def _reference(name: str, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    cls, options = OPTIMIZERS[name]
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    biases = [p for n, p in named.items() if n.endswith(".bias")]
    others = [p for n, p in named.items() if not n.endswith(".bias")]
    group = {k: v for k, v in GROUPS["*.bias"].items() if k != "weight_decay" or "adamw" in name or "factory" in name}
    optimizer = cls([{"params": biases, **group}, {"params": others}], **options)
    schedule = _scheduled(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        schedule.step()
    return {n: p.detach() for n, p in named.items()}


def _train(ranks_degrees: list[tuple[Degrees, int]]) -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    traced = prepare(trace(model, batch))
    references = {name: _reference(name, model, batch) for name in OPTIMIZERS}
    for degrees, zero in ranks_degrees:
        plan = plans.megatron("tiny_gpt", degrees, micro_batch=2).replace(zero=zero)
        pm = build(copy.deepcopy(model), traced, plan)
        for name, (cls, options) in OPTIMIZERS.items():
            pm.load_state_dict(model.state_dict())
            decays = "adamw" in name or "factory" in name
            groups = {"*.bias": {k: v for k, v in GROUPS["*.bias"].items() if k != "weight_decay" or decays}}
            optimizer = pm.optimizer(cls, groups=groups, **options)
            schedule = _scheduled(optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                pm.step(batch)
                optimizer.step()
                schedule.step()
            state = pm.state_dict()
            for parameter, value in references[name].items():
                # The gradient of key biases is rounding noise, which these scale up.
                noisy = {"signum": 1e-3, "adafactor": 1e-7, "rprop": 2e-3} if "qkv.bias" in parameter else {}
                limit = noisy.get(name, 1e-10)
                error = (state[parameter] - value).abs().max()
                assert error <= limit, f"{name} {degrees} zero {zero} {parameter}: {error}"
            if name not in (*WHOLE, *PLAIN):
                _check_state(optimizer, zero)
            if name == "adafactor":
                cut = zero > 0 or degrees.tp > 1
                assert any("Adafactor reads whole tensors" in notice for notice in pm.notices) is cut
                if cut:
                    _check_whole_state(optimizer, model)


def _check_whole_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """A tensor's state is on one of the ranks that share it, about evenly: none has much more than its part."""
    whole = torch.optim.Adafactor(copy.deepcopy(model).parameters())
    for p in whole.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    whole.step()
    assert 0.2 * _elements(whole) <= _elements(optimizer) <= 0.7 * _elements(whole)


def _elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.numel() for state in optimizer.state.values() for v in state.values())


def _check_state(optimizer: torch.optim.Optimizer, zero: int) -> None:
    """State lies as its parameter does."""
    for p, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape == p.shape:
                assert isinstance(value, DTensor) is (zero > 0)
                assert local_part(value).shape == local_part(p).shape


def _two() -> None:
    _train([(Degrees(dp=2), 0), (Degrees(dp=2), 1), (Degrees(dp=2), 3), (Degrees(tp=2), 0), (Degrees(pp=2), 0)])


@pytest.mark.distributed
def test_optimizers_groups_and_schedules_train_as_in_one_process() -> None:
    run_ranks(2, _two, timeout_s=250)


@pytest.mark.parametrize(
    ("cls", "options", "found"),
    [
        (Lars, {"lr": 1e-9}, "tensors"),
        (Signum, {"lr": 1e-9}, None),
        (torch.optim.Adafactor, {"lr": 0.0}, "tensors"),
        (torch.optim.AdamW, {"lr": 0.0}, None),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, None),
        (torch.optim.AdamW, {"lr": 0.1, "fused": True}, None),
        (torch.optim.RMSprop, {"lr": 0.1}, None),
        (nesterov, {"lr": 0.1}, None),
        (Signum, {"lr": 0.1}, None),
        (Lars, {"lr": 0.1}, "tensors"),
        (torch.optim.Adafactor, {"lr": 0.1}, "tensors"),
        (torch.optim.Muon, {"lr": 0.1}, "tensors"),
        (torch.optim.LBFGS, {"lr": 0.1}, "parameters"),
    ],
)
def test_an_optimizer_is_known_by_what_it_does(cls: Any, options: dict[str, Any], found: str | None) -> None:
    assert reads_across(cls, options, (), torch.device("cpu")) == found


def test_the_options_of_a_group_count() -> None:
    def found(*groups: dict[str, Any]) -> str | None:
        return reads_across(ByGroup, {"lr": 0.1}, groups, torch.device("cpu"))

    assert found({}, {"by_norm": False}) is None
    assert found({}, {"by_norm": True}) == "tensors"


def _refused() -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    traced = prepare(trace(model, batch))
    pm = build(copy.deepcopy(model), traced, plans.megatron("tiny_gpt", Degrees(tp=2)))
    late = pm.optimizer(Lars, lr=0.1)
    with pytest.raises(SpecError, match="Lars gets its gradients before its step here, so a closure is too late"):
        late.step(lambda: 0.0)
    with pytest.raises(SpecError, match="LBFGS reads all parameters together, and ranks hold some of them"):
        pm.optimizer(torch.optim.LBFGS, lr=0.1)
    with pytest.raises(
        SpecError, match="Lars steps other tensors in place of this rank's slices, and would step slices"
    ):
        late.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    grown = ByGroup([{"params": [p for n, p in pm.named_parameters() if "norm" in n]}], lr=0.1)
    pm.step(batch)
    grown.step()
    grown.add_param_group({"params": [p for n, p in pm.named_parameters() if "norm" not in n], "by_norm": True})
    with pytest.raises(SpecError, match="ByGroup reads more than single elements"):
        grown.step()
    pm.zero_grad()
    staged = build(copy.deepcopy(model), traced, plans.megatron("tiny_gpt", Degrees(pp=2), micro_batch=2))
    with pytest.raises(SpecError, match="LBFGS reads all parameters together"):
        staged.optimizer(torch.optim.LBFGS, lr=0.1)
    staged.optimizer(Lars, lr=0.1)
    _refused_under_any_plan(staged, model)
    # Made by hand over the same parameters: at its first step.
    pm.step(batch)
    with pytest.raises(SpecError, match=r"Adafactor reads more than single elements.*pm.optimizer\(Adafactor, ...\)"):
        torch.optim.Adafactor(pm.parameters()).step()
    by_hand = ByGroup([{"params": pm.parameters(), "by_norm": True}], lr=0.1)
    for _ in range(2):
        with pytest.raises(SpecError, match="ByGroup reads more than single elements"):
            by_hand.step()
    torch.optim.AdamW(pm.parameters()).step()


def _refused_under_any_plan(pm: ParallelModule, model: nn.Module) -> None:
    adam = torch.optim.AdamW
    for cls, options, says in (
        (torch.optim.SparseAdam, {}, "SparseAdam cannot step what a rank holds: .*does not support dense gradients"),
        (adam, {"capturable": True}, "AdamW cannot step what a rank holds: If capturable=True"),
        (adam, {"differentiable": True}, "AdamW cannot step what a rank holds: a leaf Variable"),
        (torch.optim.Muon, {}, "Muon cannot be made: Muon only supports 2D parameters.*only="),
        (adam, {"rate": 1.0}, "AdamW cannot be made: .*unexpected keyword argument 'rate'"),
        (adam, {"lr": -1.0}, "AdamW cannot be made: Invalid learning rate"),
        (_nothing, {}, "_nothing gives NoneType, no torch.optim.Optimizer"),
        (lambda _: adam(model.parameters()), {}, "holds other parameters than it was given"),
    ):
        with pytest.raises(SpecError, match=says):
            pm.optimizer(cls, **options)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no parameter matches '.*gamma'"):
        pm.optimizer(adam, only=["*.gamma"])
    with pytest.raises(SpecError, match=r"only=\[\] leaves it nothing to train"):
        pm.optimizer(adam, only=[])


def _nothing(params: Any) -> None:
    torch.optim.AdamW(params)


@pytest.mark.distributed
def test_what_a_plan_cannot_run_is_refused_by_name() -> None:
    run_ranks(2, _refused, timeout_s=100)
