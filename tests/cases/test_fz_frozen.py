"""fz-01, fz-02, fz-03, fz-05: frozen parameters, adapters, optimizers of before, parameters without gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import AutoparError, SpecError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.specs import Pins
from autopar.trace import trace
from autopar.verify import _Comparison
from tests import models, plans

pytestmark = pytest.mark.distributed


class Lora(nn.Module):
    """A frozen linear and a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, dtype=base.weight.dtype) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def qwen2_lora() -> tuple[nn.Module, dict[str, Tensor]]:
    model = models.qwen2_tiny().requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name)))
    return model, models.default_batch()


def _lora_plan(degrees: Degrees, zero: int = 0) -> Plan:
    plan = plans.megatron("qwen2", degrees, micro_batch=2)
    more = {
        f"model.layers.*.self_attn.{name}_proj.{part}": "S(0)"
        for name in "qv"
        for part in ("base.weight", "base.bias", "up")
    }
    adapted = [f"model.layers.*.self_attn.{name}_proj.{part}" for name in "qv" for part in ("weight", "bias")]
    kept = {pattern: placement for pattern, placement in plan.parameters.items() if pattern not in adapted}
    return plan.replace(parameters={**kept, **more} if degrees.tp > 1 else {}, zero=zero)


def _partly_frozen(frozen: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    model = models.tiny_gpt()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # a tie would freeze both ends
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen(name))
    return model, models.default_batch()


_FIRST = ("tokens", "positions", "blocks.0", "blocks.1")


def first_stage_frozen() -> Any:
    return _partly_frozen(lambda name: name.startswith(_FIRST))


def last_stage_frozen() -> Any:
    return _partly_frozen(lambda name: not name.startswith(_FIRST))


def only_last_block() -> Any:
    return _partly_frozen(lambda name: not name.startswith("blocks.3.mlp"))


class _Pooled(nn.Module):
    """BERT with a pooler that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertModel

        self.bert = BertModel(models.bert_tiny().config)
        self.head = nn.Linear(models.DIM, models.VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.bert(input_ids).last_hidden_state
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def bert_pooler() -> Any:
    torch.manual_seed(0)
    return _Pooled().double().train(), models.default_batch()


def _flat(degrees: Degrees, stem: str) -> Plan:
    return Plan(
        degrees=degrees, global_batch=8, seq_len=16, micro_batch=2, stages=((f"{stem}.0-3",),), precision="fp64"
    )


def _parity() -> list[str]:
    two = Degrees(pp=2)
    plain = plans.megatron("tiny_gpt", two, micro_batch=2)
    split = plans.megatron("tiny_gpt", two, schedule="zero-bubble")
    looped = plans.megatron("tiny_gpt", two, micro_batch=2, schedule="interleaved", virtual_stages=2)
    wanted: dict[Any, list[Plan]] = {
        qwen2_lora: [
            _lora_plan(Degrees(tp=2)),
            *(_lora_plan(Degrees(dp=2), zero) for zero in (0, 1, 2, 3)),
            _lora_plan(Degrees(pp=2)),
        ],
        first_stage_frozen: [plain, looped],
        last_stage_frozen: [plain, split, looped],
        only_last_block: [plain, looped],
        bert_pooler: [_flat(Degrees(dp=2), "bert.encoder.layer")],
    }
    failed = []
    for factory, some in wanted.items():
        for result in map(_Comparison(factory, Pins(), "float64", 2).run, some):
            if not result.passed:
                failed.append(f"{factory.__name__}\n{result.text()}")
    with pytest.raises(SpecError, match="everything before stage 1 is frozen, and the split backward would lose"):
        _Comparison(first_stage_frozen, Pins(), "float64", 1).run(split)
    return failed


def test_fz_01_fz_02_fz_05_frozen_stages_adapters_and_unused_parameters() -> None:
    for failed in run_ranks(2, _parity, timeout_s=280):
        assert not failed, "\n\n".join(failed)


def _trained() -> None:
    model, batch = qwen2_lora()
    traced = prepare(trace(model, batch))
    early = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(AutoparError, match="an optimizer .AdamW. already holds this model's parameters"):
        build(model, traced, _lora_plan(Degrees(tp=2)))
    del early
    pm = build(copy.deepcopy(model), traced, _lora_plan(Degrees(tp=2)))
    before = pm.state_dict()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in pm.named_parameters() if p.requires_grad} == trained
    optimizer = pm.optimizer(torch.optim.AdamW, groups={"*.up": {"weight_decay": 0.0}}, lr=0.1, weight_decay=0.1)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1]
    assert len(optimizer.param_groups[0]["params"]) == len(trained) // 2
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        pm.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for name, value in pm.state_dict().items():
        assert torch.equal(value, before[name]) is (name not in trained), name
    with pytest.raises(SpecError, match="no parameter matches '.*gamma'"):
        pm.optimizer(torch.optim.AdamW, groups={"*.gamma": {}})
    with pytest.raises(SpecError, match="is no pattern of names.*not torch's list of groups"):
        pm.optimizer(torch.optim.AdamW, groups=[{"params": ["*.up"], "lr": 0.1}])  # type: ignore[arg-type]
    assert len(pm.optimizer(torch.optim.AdamW, only="*.up").param_groups[-1]["params"]) == len(trained) // 2
    with pytest.raises(SpecError, match="LBFGS reads all parameters together"):
        pm.optimizer(torch.optim.LBFGS)
    _what_ranks_would_not_notice(model, traced, pm, batch)


def _what_ranks_would_not_notice(model: nn.Module, traced: TracedModel, pm: ParallelModule, batch: Any) -> None:
    """Parameters thawed after capture, and hooks on those in whose place others compute."""
    frozen = next(p for _, p in pm.named_parameters() if not p.requires_grad)
    frozen.requires_grad_(True)
    with pytest.raises(AutoparError, match="was frozen when the model was captured, and its gradient is reduced"):
        pm.step(batch)
    frozen.requires_grad_(False)
    pm.step(batch)
    frozen.requires_grad_(dist.get_rank() == 1)  # one rank alone
    with pytest.raises(AutoparError, match="was frozen when the model was captured"):
        pm.step(batch)
    frozen.requires_grad_(False)
    piped = build(model, traced, _lora_plan(Degrees(pp=2)))
    for path in ("model.embed_tokens.weight", "model.norm.weight"):  # of the first stage, and of the last
        here = dict(piped.named_parameters()).get(path, nn.Parameter(torch.zeros(1)))
        here.requires_grad_(True)
        with pytest.raises(AutoparError, match=f"{path}: was frozen when the model was captured"):
            piped.step(batch)
        here.requires_grad_(False)
    piped.step(batch)
    sharded = build(model, traced, _lora_plan(Degrees(dp=2), zero=1))
    trained = next(p for p in sharded.parameters() if p.requires_grad)
    for register in (trained.register_hook, trained.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        with pytest.raises(AutoparError, match="nothing calls a hook on this parameter.*change p.grad between"):
            sharded.step(batch)
        handle.remove()
    if dist.get_rank() == 0:  # one rank alone
        handle = trained.register_hook(lambda *_: None)
    with pytest.raises(AutoparError, match="nothing calls a hook on this parameter"):
        sharded.step(batch)
    handle.remove()
    sharded.step(batch)
    own = next(p for p in model.parameters() if p.requires_grad)
    handle = own.register_hook(lambda g: g)
    with pytest.raises(AutoparError, match="ranks train copies of this parameter, without its hooks"):
        build(model, traced, _lora_plan(Degrees(tp=2)))
    handle.remove()


def test_fz_01_fz_03_only_adapters_are_trained_and_stale_optimizers_refused() -> None:
    run_ranks(2, _trained, timeout_s=120)
