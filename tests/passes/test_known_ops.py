"""Ops without a rule become ops with one: the same values, and heads that tp splits, on every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.blocks import op_name
from autopar.cost_model.propagation import propagate
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.attention_styles import STYLES, Model
from tests.models import default_batch
from tests.plans import on_every_axis

PRODUCTS = ("linear", "matmul", "bmm", "addmm", "scaled_dot_product_attention")


def build() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Model().double(), default_batch()


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    return prepare(trace(*build()))


def test_values_stay(traced: TracedModel) -> None:
    model, batch = build()[0], default_batch(3, 11)
    found = traced.graph_module(**batch)[0]
    torch.testing.assert_close(found, traced_loss := model(**batch), rtol=1e-13, atol=0)
    assert traced_loss.requires_grad


def test_no_op_is_left_without_a_rule_and_no_heads_are_joined(traced: TracedModel) -> None:
    assert traced.notices == ()
    shapes = [n.meta["shape"] for n in traced.graph_module.graph.nodes if isinstance(n.meta.get("shape"), tuple)]
    assert not any(size == 4 * traced.batch for shape in shapes for size in shape)


def test_every_product_of_every_style_is_split_over_tp(traced: TracedModel) -> None:
    plan = on_every_axis(traced)[0]
    found = propagate(traced, plan)
    for name, layer in zip(STYLES, traced.layers, strict=True):
        whole = [
            str(node)
            for node in traced.nodes_of(layer)
            if node in found.strategy
            and op_name(node) in PRODUCTS
            and node.meta["grad"]
            and not (found.placement[node].is_shard or found.placement[node].is_partial)
        ]
        assert not whole, f"{name}: {whole}"


@pytest.mark.distributed
def test_they_train_as_in_one_process_on_every_axis(traced: TracedModel) -> None:
    failed = [r.text() for r in verify_plans(build, on_every_axis(traced)) if not r.passed]
    assert not failed, "\n\n".join(failed)


EQUATIONS = {
    "bqhd,bkhd->bhqk": ((2, 5, 3, 4), (2, 5, 3, 4)),
    "bhqk,bkhd->bqhd": ((2, 3, 5, 5), (2, 5, 3, 4)),
    "bsd,hde->bhse": ((2, 5, 4), (3, 4, 6)),
    "hde,bsd->bshe": ((3, 4, 6), (2, 5, 4)),
    "bhse,hed->bsd": ((2, 3, 5, 4), (3, 4, 6)),
    "bsd,d->bs": ((2, 5, 4), (4,)),
    "bsghd,bsgd->bsgh": ((2, 5, 3, 2, 4), (2, 5, 3, 4)),
    "bsd,bsd->bs": ((2, 5, 4), (2, 5, 4)),
}
KEPT = {
    "bs,d->bsd": ((2, 5), (4,)),  # nothing is contracted
    "bsd,bte->bde": ((2, 5, 4), (2, 5, 6)),  # summed over one operand alone
    "bsd,btd->st": ((2, 5, 4), (2, 5, 4)),  # two letters that would be joined, one of them the batch
    "...d,de->...e": ((2, 5, 4), (4, 6)),
}


@pytest.mark.parametrize("equation", [*EQUATIONS, *KEPT])
def test_einsum(equation: str) -> None:
    class Net(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum(equation, a, b)

    shapes = {**EQUATIONS, **KEPT}[equation]
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    prepared = prepare(trace(Net(), {"a": a, "b": b}, training=True))
    assert any("einsum" in n.name for n in prepared.graph_module.graph.nodes) == (equation in KEPT)
    torch.testing.assert_close(prepared.graph_module(a, b)[0], torch.einsum(equation, a, b), rtol=0, atol=1e-14)


class Pieces(nn.Module):
    """Ops with arguments of other kinds, beside those that change."""

    def forward(self, x: Tensor) -> list[Tensor]:
        first, second = x.unflatten(-1, (2, 3)).unbind(-2)
        return [
            first,
            torch.stack([first, second], 1),
            torch.stack([first, second]),
            torch.nn.functional.glu(x, -1),
            x.repeat_interleave(2),
            x.repeat_interleave(3, -1),
            x.repeat(1, 2, 1),
            x[:, :1].repeat(2, 1, 4, 1),
            torch.baddbmm(x[:, :, :1], x, x.transpose(1, 2), beta=0),
            torch.baddbmm(x[:, :, :1], x, x.transpose(1, 2), beta=2, alpha=0.5),
        ]


def test_pieces() -> None:
    model, x = Pieces(), torch.randn(2, 5, 6, dtype=torch.float64)
    graph_module = prepare(trace(model, x)).graph_module
    for found, wanted in zip(graph_module(x), model(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    left = {op_name(n) for n in graph_module.graph.nodes if n.op == "call_function"}
    assert not left & {"unbind", "stack", "baddbmm", "glu"}


class Written(nn.Module):
    """Keys and values written part by part into empty tensors; a part of what a layer made is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]) for _ in range(2))
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for first, second in self.layers:
            parts = torch.empty_like(x)
            parts[..., :20] = first(x)[..., 12:]
            parts[..., 20:] = x[..., :12]
            made = second(parts)
            made[..., 8:-8] = 1.0
            x = x + made
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


def test_what_is_written_part_by_part_is_put_together() -> None:
    torch.manual_seed(0)
    model = Written().double()
    written = prepare(trace(model, default_batch()))
    names = {op_name(n) for n in written.graph_module.graph.nodes if n.op == "call_function"}
    assert "cat" in names
    assert not names & {"slice_scatter", "empty_like", "expand_as"}
    batch = default_batch(3, 11)
    wanted = torch.autograd.grad(model(**batch), list(model.parameters()))
    own = dict(written.graph_module.named_parameters())
    found = torch.autograd.grad(written.graph_module(**batch)[0], [own[n] for n, _ in model.named_parameters()])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
