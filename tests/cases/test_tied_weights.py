"""Field cases tie-01, 03, 04: one tensor under several names stays one, wherever it lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.build import build
from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models, plans


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    return models.gpt2_tiny(), models.default_batch()


def qwen2() -> tuple[nn.Module, dict[str, Any]]:
    return models.qwen2_tiny(), models.default_batch()


def t5() -> tuple[nn.Module, dict[str, Any]]:
    return models.t5_tiny(), models.default_batch()


@pytest.mark.parametrize(("family", "count"), [("gpt2", 54976), ("bert", 39584), ("t5", 43648)])
def test_tie_04_shared_tensors_count_once(family: str, count: int) -> None:
    assert trace(models.BUILDERS[family](), models.default_batch()).parameter_count == count


@pytest.mark.distributed
def test_tie_04_t5_over_two_stages() -> None:
    plan = Plan(
        degrees=Degrees(pp=2), global_batch=8, seq_len=16, micro_batch=2, precision="fp64",
        stages=(("encoder.block.0-1",), ("decoder.block.0-1",)),
    )  # fmt: skip
    (result,) = verify_plans(t5, [plan])
    assert result.passed, result.text()


def _five_steps() -> list[torch.Tensor]:
    """This stage's copy of the tied weight after every SGD step."""
    model, batch = gpt2()
    pm = build(model, prepare(trace(model, batch)), plans.megatron("gpt2", Degrees(pp=2), micro_batch=2))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    copies = []
    for _ in range(5):
        optimizer.zero_grad()
        pm.step(batch)
        optimizer.step()
        copies.append(dict(pm.named_parameters())["transformer.wte.weight"].detach().clone())
    return copies


@pytest.mark.distributed
def test_tie_01_copies_on_two_stages_stay_equal_to_the_bit() -> None:
    model, batch = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = run_ranks(2, _five_steps)
    for a, b in zip(first, second, strict=True):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        assert torch.equal(a, b)
        torch.testing.assert_close(a, model.get_parameter("transformer.wte.weight").detach(), rtol=1e-6, atol=1e-7)


def _tied_over_tp() -> dict[str, Any]:
    model, batch = qwen2()
    pm = build(model, prepare(trace(model, batch)), plans.megatron("qwen2", Degrees(tp=2)))
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    pm.step(batch)
    optimizer.step()
    logits = pm(**batch).logits
    names = [n for n, _ in pm.named_parameters() if "embed" in n or "head" in n]
    return {"rank": dist.get_rank(), "logits": logits.shape, "names": names, "states": len(optimizer.state)}


@pytest.mark.distributed
def test_tie_03_one_shard_one_state_and_whole_logits() -> None:
    unique = len(list(models.qwen2_tiny().parameters()))
    for result in run_ranks(2, _tied_over_tp):
        assert result["logits"] == (8, 16, 64)
        assert result["names"] == ["model.embed_tokens.weight"]
        assert result["states"] == unique
    results = verify_plans(gpt2, [plans.megatron("gpt2", Degrees(tp=2))], steps=3)
    results += verify_plans(qwen2, [plans.megatron("qwen2", Degrees(tp=2))], steps=3)
    assert all(r.passed for r in results), "\n".join(r.text() for r in results)


def _loaded(degrees: Degrees) -> list[Any]:
    """A tied model's state under each of its names, as other plans and libraries leave it."""
    model, batch = qwen2()
    traced = prepare(trace(model, batch))
    pm = build(model, traced, plans.megatron("qwen2", degrees, micro_batch=2))
    state = {name: torch.full_like(t, i / 100) for i, (name, t) in enumerate(model.state_dict().items())}
    found: list[Any] = []
    for left_out in ("lm_head.weight", "model.embed_tokens.weight"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"] = torch.rand(64, 32, dtype=torch.float64)
        given = {name: t for name, t in state.items() if name != left_out}
        found.append(tuple(pm.load_state_dict(given)))
        mine = pm.state_dict()
        found.append(list(mine) == list(state) and all(torch.equal(mine[name], t) for name, t in state.items()))
    neither = {name: t for name, t in state.items() if name not in ("lm_head.weight", "model.embed_tokens.weight")}
    with pytest.raises(AutoparError, match="missing .'model.embed_tokens.weight', 'lm_head.weight'., unknown .'extra'"):
        pm.load_state_dict({**neither, "extra": torch.zeros(1)})
    kept = pm.load_state_dict({"extra": torch.zeros(1), "model.norm.weight": torch.zeros(32)}, strict=False)
    found.append((kept.unexpected_keys, bool((pm.state_dict()["model.norm.weight"] == 0).all())))
    with pytest.raises(AutoparError, match=r"model.norm.weight: shape \(31,\), expected \(32,\)"):  # on every stage
        pm.load_state_dict({**state, "model.norm.weight": torch.zeros(31)})
    return found


@pytest.mark.parametrize("degrees", [Degrees(tp=2), Degrees(pp=2)], ids=str)
def test_tie_06_a_tied_weight_loads_under_either_name(degrees: Degrees) -> None:
    torch.manual_seed(0)
    for found in run_ranks(2, _loaded, degrees):
        assert found == [([], []), True, ([], []), True, (["extra"], True)]
