"""no_grad regions and detached tensors: same loss and gradients as eager, alone and over two processes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.models import default_batch
from tests.plans import on_every_axis

DIM, VOCAB = 16, 64


class Gated(nn.Module):
    """A gate that learns nothing from the product, and a target computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            scale = self.gate(h).sigmoid()
            shift = scale * 0.5
        return x + self.down(h * scale + (shift * h).detach())


class Model(nn.Module):
    """A frozen first part that runs under no_grad, then layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.frozen = nn.ModuleList([Gated() for _ in range(3)])
        self.layers = nn.ModuleList([Gated() for _ in range(2)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        with torch.no_grad():
            for layer in self.frozen:
                x = layer(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Model().double(), default_batch()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("repeat_layers", [False, True])
def test_no_gradient_flows_where_eager_has_none(repeat_layers: bool) -> None:
    model, batch = build()
    other = default_batch(rows=3, seq=11, seed=4)
    loss = model(**other)
    wanted = gradients(model, loss)
    assert not any(name.startswith(("embed", "frozen")) for name in wanted)
    captured = trace(model, batch, repeat_layers=repeat_layers)
    for traced in (captured, prepare(captured)):
        found = traced.graph_module(*traced.signature.bind((), other).values())[0]
        assert torch.equal(found, loss)
        have = gradients(model, found)
        assert have.keys() == wanted.keys()
        assert all(torch.equal(have[n], wanted[n]) for n in wanted)


@pytest.mark.distributed
def test_regions_train_as_one_process_on_every_axis() -> None:
    model, batch = build()
    failed = [r.text() for r in verify_plans(build, on_every_axis(prepare(trace(model, batch)))) if not r.passed]
    assert not failed, "\n\n".join(failed)
