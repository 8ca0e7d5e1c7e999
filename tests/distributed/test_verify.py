"""verify finds what is right and what is wrong; parallelize runs what the search found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.api import parallelize
from autopar.errors import AutoparError, PlanMismatchError, SpecError
from autopar.mesh import Degrees
from autopar.placement import CONVERSIONS
from autopar.runtime.launch import run_ranks
from autopar.runtime.reducer import GradientReducer
from autopar.runtime.training_step import TrainingStep
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.verify import VerifyResult, _Comparison, verify, verify_plans
from tests import models, plans

pytestmark = pytest.mark.distributed


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3", "mistral"])
def test_hugging_face_models_under_tp_and_pp(name: str) -> None:
    wanted = [plans.megatron(name, Degrees(tp=2)), plans.megatron(name, Degrees(pp=2), micro_batch=2)]
    results = verify_plans(_FACTORIES[name], wanted, timeout_s=120)
    failed = [result.text() for result in results if not result.passed]
    assert not failed, "\n\n".join(failed)


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    return models.gpt2_tiny(), models.default_batch()


def qwen2() -> tuple[nn.Module, dict[str, Any]]:
    return models.qwen2_tiny(), models.default_batch()


def qwen3() -> tuple[nn.Module, dict[str, Any]]:
    return models.qwen3_tiny(), models.default_batch()


def mistral() -> tuple[nn.Module, dict[str, Any]]:
    return models.mistral_tiny(), models.default_batch()


class SumLossGPT(models.TinyGPT):
    """Returns the sum over tokens: nothing may be divided by their number."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        assert labels is not None
        logits = super().forward(input_ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def sum_loss_gpt() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return SumLossGPT().double(), models.default_batch()


def _calling_sums_too() -> None:
    module, batch = sum_loss_gpt()
    reference = copy.deepcopy(module)
    plan = plans.megatron("tiny_gpt", Degrees(dp=2))
    pm = parallelize(module, ClusterSpec.parse("local:2"), plan=plan, example=batch)
    loss, expected = pm(**batch), reference(**batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(pm.full_gradients()["norm.weight"], reference.norm.weight.grad)


def test_a_loss_that_is_a_sum_stays_one() -> None:
    (result,) = verify_plans(sum_loss_gpt, [plans.megatron("tiny_gpt", Degrees(dp=2))], timeout_s=120)
    assert result.passed, result.text()
    run_ranks(2, _calling_sums_too, timeout_s=120)


def _no_target_here() -> None:
    """Only the first dp rank's rows have targets: the others add nothing, and no NaN."""
    batch = models.default_batch()
    batch["labels"][2:] = -100
    reference = models.tiny_gpt()
    expected = reference(**batch)
    expected.backward()
    for degrees in (Degrees(dp=4), Degrees(dp=2, tp=2)):
        plan = plans.megatron("tiny_gpt", degrees)
        pm = parallelize(models.tiny_gpt(), ClusterSpec.parse("local:4"), plan=plan, example=batch)
        loss = pm(**batch)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        for name, gradient in pm.full_gradients().items():
            own = dict(reference.named_parameters())[name].grad
            torch.testing.assert_close(gradient, own, rtol=0, atol=1e-12, msg=name)
        nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        assert torch.isnan(pm(**nothing)), "a mean over nothing, as in one process"


def test_ranks_without_a_target_add_nothing_when_the_module_is_called() -> None:
    run_ranks(4, _no_target_here, timeout_s=120)


_FACTORIES = {"gpt2": gpt2, "qwen2": qwen2, "qwen3": qwen3, "mistral": mistral}


def _with_fault(fault: str) -> VerifyResult:
    """A fault of the runtime, put in on purpose on every rank."""
    if fault == "no backward sum":
        CONVERSIONS[("S", "R|P")] = ("all_gather", "slice")
    elif fault == "partial norms not summed":
        _drop_sums()
    elif fault == "loss counted twice":
        scaled = TrainingStep._scaled_loss
        TrainingStep._scaled_loss = lambda self, x: 2 * scaled(self, x)  # type: ignore[method-assign]
    plan = plans.megatron("tiny_gpt", Degrees(tp=2))
    return _Comparison(tiny_gpt, Pins(), "float64", 1).run(plan)


def _drop_sums() -> None:
    build = GradientReducer.__init__

    def without_sums(self: Any, parameters: Any, sums: Any = (), **options: Any) -> None:
        build(self, parameters, (), **options)

    GradientReducer.__init__ = without_sums  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("none", None),
        ("no backward sum", "blocks"),
        ("partial norms not summed", "norm"),
        ("loss counted twice", "loss"),
    ],
)
def test_faults_are_found_and_named(fault: str, named: str | None) -> None:
    result = run_ranks(2, _with_fault, fault, timeout_s=120)[0]
    assert result.passed is (named is None), result.text()
    if named is not None:
        assert any(named in str(entry["name"]) for entry in result.worst), result.text()
        assert "FAILED" in result.text()
    data = result.to_data()
    assert {"loss_error", "grad_error", "weight_error", "worst", "plan"} <= data.keys()


def test_verify_searches_within_pins() -> None:
    result = verify(tiny_gpt, 2, Pins(tp=2), steps=2, timeout_s=120)
    assert result.passed, result.text()
    assert result.plan.degrees == Degrees(tp=2)
    with pytest.raises(AutoparError, match="tp"):
        verify(tiny_gpt, 2, Pins(tp=3), timeout_s=120)


def _parallelize(path: str) -> tuple[list[float], list[float], str]:
    cluster, batch = ClusterSpec.parse("local:2"), models.default_batch()
    model = models.tiny_gpt()
    reference, losses = copy.deepcopy(model), []
    train = TrainSpec(global_batch=8, seq_len=16)
    pm = parallelize(model, cluster, train, example=batch, pins=Pins(pp=2))
    if dist.get_rank() == 0:
        pm.plan.save(path)
    dist.barrier()
    again = parallelize(models.tiny_gpt(), cluster, plan=path, example=batch)
    assert again.plan.fingerprint == pm.plan.fingerprint
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = []
    for _ in range(3):
        losses.append(pm.step(batch).item())
        optimizer.step()
        optimizer.zero_grad()
        loss = reference(**batch)
        loss.backward()
        expected.append(loss.item())
        plain.step()
        plain.zero_grad()
    with pytest.raises(PlanMismatchError, match="another model"):
        parallelize(models.encoder_classifier(), cluster, plan=path, example=batch)
    return losses, expected, pm.report()


def test_parallelize_trains_and_replays_its_plan(tmp_path: Any) -> None:
    results = run_ranks(2, _parallelize, str(tmp_path / "plan.json"), timeout_s=120)
    for losses, expected, report in results:
        assert losses == pytest.approx(expected, abs=1e-9)
        assert losses[-1] < losses[0]
        assert "pp" in report
    assert results[0][0] == results[1][0], "the loss is the same on every rank, to the bit"


def test_one_process_needs_no_group_and_returns_the_users_output() -> None:
    model, batch = models.llama_tiny(), models.default_batch()
    reference = copy.deepcopy(model)
    pm = parallelize(model, ClusterSpec.parse("local:1"), TrainSpec(global_batch=8, seq_len=16), example=batch)
    outputs, expected = pm(**batch), reference(**batch)
    assert type(outputs).__name__ == type(expected).__name__
    outputs.loss.backward()
    expected.loss.backward()
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    for (name, p), q in zip(pm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9, msg=name)
    assert all(p is q for p, q in zip(pm.parameters(), model.parameters(), strict=True))


def _own_batch(wrong: bool) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.arange(3 * 8).reshape(3, 8)
    if wrong:
        ids[2, 5] = models.VOCAB  # one past the table
    return models.TinyGPT(layers=2), {"input_ids": ids, "labels": ids % models.VOCAB}


def own_batch() -> tuple[nn.Module, dict[str, Any]]:
    return _own_batch(wrong=False)


def own_batch_with_a_wrong_token() -> tuple[nn.Module, dict[str, Any]]:
    return _own_batch(wrong=True)


def test_the_users_own_batch_is_trained_on() -> None:
    """Its length and its values, the wrong ones too."""
    result = verify("py:tests.distributed.test_verify:own_batch", 2, Pins(dp=2), steps=1, timeout_s=120)
    assert result.passed, result.text()
    assert (result.plan.global_batch, result.plan.seq_len) == (8, 8)
    with pytest.raises(SpecError, match=r"input_ids holds 64, and tokens.weight has 64 rows \(0 to 63\)"):
        verify("py:tests.distributed.test_verify:own_batch_with_a_wrong_token", 2, Pins(dp=2), steps=1, timeout_s=120)
