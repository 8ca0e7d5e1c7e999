"""Field cases tpm-01, 02, 04, 05, 08: what tensor parallelism gets silently wrong, against one process in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.cost_model.search import search
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from autopar.verify import VerifyResult, verify_plans
from tests import models, plans

pytestmark = [pytest.mark.distributed]


def _passed(results: list[VerifyResult]) -> None:
    failed = [r.text() for r in results if not r.passed]
    assert results
    assert not failed, "\n\n".join(failed)


def _searched(factory: Any, tp: int) -> Plan:
    """The search's own plan for tp ranks; its parameters and op overrides are what a user would run."""
    model, batch = factory()
    traced = prepare(trace(model, batch))
    first = next(t for t in batch.values() if t.dim() >= 2)
    train = TrainSpec(global_batch=first.shape[0], seq_len=first.shape[1], precision="fp64")
    return search(traced, ClusterSpec.parse(f"local:{tp}"), train, Pins(tp=tp)).plan


# --- tpm-01: a bias on a row-split linear


class RowLinear(nn.Module):
    """Weight all ones, bias [10, 20]: output [14, 24], not [24, 44]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        with torch.no_grad():
            self.linear.weight.fill_(1.0)
            self.linear.bias.copy_(torch.tensor([10.0, 20.0]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"loss": y.mean(), "y": y}


def _row_linear_on_two_ranks() -> tuple[list[float], list[float]]:
    model = RowLinear().double()
    traced = prepare(trace(model, {"x": torch.ones(2, 4)}))
    plan = Plan(
        degrees=Degrees(tp=2), global_batch=2, seq_len=4, micro_batch=2, stages=(("linear",),),
        parameters={"linear.weight": "S(1)"}, precision="fp64",
    )  # fmt: skip
    pm = build(model, traced, plan)
    outputs = pm(x=torch.ones(2, 4, dtype=torch.float64))
    outputs["loss"].backward()
    gradient = pm.full_gradients()["linear.bias"]
    assert gradient is not None
    return outputs["y"][0].tolist(), gradient.tolist()


def test_tpm_01_row_split_bias_is_added_once() -> None:
    for y, gradient in run_ranks(2, _row_linear_on_two_ranks):
        assert y == [14.0, 24.0]
        assert gradient == [0.5, 0.5]


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    return models.gpt2_tiny(), models.default_batch()


def bert() -> tuple[nn.Module, dict[str, Any]]:
    return models.bert_tiny(), models.default_batch()


def test_tpm_01_models_with_row_split_biases() -> None:
    _passed(verify_plans(gpt2, [plans.megatron("gpt2", Degrees(tp=2), sequence_sharding=sp) for sp in (False, True)]))
    _passed(verify_plans(bert, [_searched(bert, 2)]))


# --- tpm-02: fused q|k|v and gate|up


class GatedBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate_up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        y: Tensor = x + self.down(F.silu(gate) * up)
        return y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([GatedBlock(16) for _ in range(2)])
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def gated() -> tuple[nn.Module, dict[str, Any]]:
    return Gated().double(), models.default_batch()


@pytest.mark.parametrize("tp", [2, 4])
def test_tpm_02_fused_projections_are_cut_inside_their_parts(tp: int) -> None:
    _passed(verify_plans(gpt2, [plans.megatron("gpt2", Degrees(tp=tp))]))
    plan = Plan(
        degrees=Degrees(tp=tp), global_batch=8, seq_len=16, micro_batch=8, stages=(("blocks.0-1",),), precision="fp64",
        parameters={
            "embed.weight": "S(0)", "head.weight": "S(0)", "head.bias": "S(0)",
            "blocks.*.gate_up.weight": "S(0,left=2)", "blocks.*.gate_up.bias": "S(0,left=2)",
            "blocks.*.down.weight": "S(1)",
        },
    )  # fmt: skip
    _passed(verify_plans(gated, [plan]))


def _fused_slices() -> bool:
    """Each rank holds the same heads of q, k and v; gathered, the weight is back in its own order."""
    model = models.gpt2_tiny()
    whole = model.get_parameter("transformer.h.0.attn.c_attn.weight").detach().clone()
    traced = prepare(trace(model, models.default_batch()))
    pm = build(model, traced, plans.megatron("gpt2", Degrees(tp=2), checkpoint=False))
    mine = dict(pm.named_parameters())["transformer.h.0.attn.c_attn.weight"]
    rank = dist.get_rank()
    q, k, v = (part.chunk(2, 1)[rank] for part in whole.chunk(3, 1))
    local = torch.equal(mine, torch.cat([q, k, v], 1))
    return local and torch.equal(pm.state_dict()["transformer.h.0.attn.c_attn.weight"], whole)


def test_tpm_02_shards_hold_matching_heads() -> None:
    assert run_ranks(2, _fused_slices) == [True, True]


# --- tpm-04, tpm-05: gradients of replicated norms


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama_tiny(), models.default_batch()


def qwen3() -> tuple[nn.Module, dict[str, Any]]:
    return models.qwen3_tiny(), models.default_batch()


def test_tpm_04_norm_gradients_under_sequence_sharding() -> None:
    for name, factory in (("tiny_gpt", tiny_gpt), ("llama", llama)):
        results = verify_plans(factory, [plans.megatron(name, Degrees(tp=2), sequence_sharding=True)], steps=3)
        _passed(results)
        assert results[0].differing_copies == ()


def test_tpm_05_head_norm_gradients_are_summed() -> None:
    results = verify_plans(
        qwen3, [plans.megatron("qwen3", Degrees(tp=2), sequence_sharding=sp) for sp in (False, True)], steps=10
    )
    _passed(results)
    assert [r.differing_copies for r in results] == [(), ()]


# --- tpm-08: global sizes written into view and reshape


class LiteralAttention(nn.Module):
    """`style` is how the author wrote the sizes: from attributes, as numbers, or by unflatten and flatten."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.n_head = style, 4
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def _heads(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        if self.style == "attribute":
            x = x.view(b, t, self.n_head, c // self.n_head)
        elif self.style == "number":
            x = x.view(b, t, 4, 8)
        else:
            x = x.unflatten(-1, (4, 8))
        return x.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = F.scaled_dot_product_attention(*(self._heads(p(x)) for p in (self.q, self.k, self.v)), is_causal=True)
        y = y.transpose(1, 2)
        if self.style == "attribute":
            y = y.contiguous().view(b, t, c)
        else:
            y = y.reshape(b, t, 32) if self.style == "number" else y.flatten(2)
        z: Tensor = x + self.o(y)
        return z


class Literal(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([LiteralAttention(style) for _ in range(2)])
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def attribute() -> tuple[nn.Module, dict[str, Any]]:
    return Literal("attribute").double(), models.default_batch()


def number() -> tuple[nn.Module, dict[str, Any]]:
    return Literal("number").double(), models.default_batch()


def flatten() -> tuple[nn.Module, dict[str, Any]]:
    return Literal("flatten").double(), models.default_batch()


LITERAL_PLAN = Plan(
    degrees=Degrees(tp=2), global_batch=8, seq_len=16, micro_batch=4, stages=(("blocks.0-1",),), precision="fp64",
    parameters={
        "embed.weight": "S(0)",
        **{f"blocks.*.{p}.{kind}": "S(0)" for p in "qkv" for kind in ("weight", "bias")},
        "blocks.*.o.weight": "S(1)",
    },
)  # fmt: skip


@pytest.mark.parametrize("factory", [attribute, number, flatten])
def test_tpm_08_sizes_in_the_code_are_rewritten(factory: Any) -> None:
    _passed(verify_plans(factory, [LITERAL_PLAN, LITERAL_PLAN.replace(sequence_sharding=True)]))
    model, batch = factory()
    before = model(**batch).item()
    trace(model, batch)
    assert model.blocks[0].n_head == 4
    assert model(**batch).item() == before
