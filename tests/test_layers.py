"""Layers of models that keep them in no list: found where the modules are, planned and trained like any other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.layers import layer_of
from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.models import default_batch
from tests.plans import on_every_axis

DIM, VOCAB = 16, 64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(input_ids))).flatten(0, 1), labels.flatten())


class OneBlock(Base):
    def build(self) -> None:
        self.block = Mlp()

    def body(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class Linears(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def body(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))  # type: ignore[no-any-return]


class Named(Base):
    def build(self) -> None:
        self.first, self.second = Mlp(), Mlp()
        self.third = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, DIM))

    def body(self, x: Tensor) -> Tensor:
        return self.third(x + self.second(self.first(x)))  # type: ignore[no-any-return]


class Chain(Base):
    """One Sequential of single linears of different widths."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, DIM))

    def body(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Wrapped(Base):
    """Blocks by attribute, one module further in."""

    def build(self) -> None:
        self.core = nn.Module()
        self.core.one, self.core.two = Mlp(), Mlp()

    def body(self, x: Tensor) -> Tensor:
        return self.core.two(self.core.one(x))  # type: ignore[no-any-return, operator]


class InTurns(Base):
    """Two parts that run in turns cannot be told apart by a cut."""

    def build(self) -> None:
        self.first, self.second = Mlp(), Mlp()

    def body(self, x: Tensor) -> Tensor:
        return self.first(self.second(self.first(x)))  # type: ignore[no-any-return]


LAYERS = {
    OneBlock: ["block"],
    Linears: ["a", "b", "head"],
    Named: ["first", "second", "third"],
    Chain: ["net.0", "net.2", "net.4"],
    Wrapped: ["core.one", "core.two"],
    InTurns: ["whole_model"],
}


def build(model: type[Base]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return model().double(), default_batch()


@pytest.mark.parametrize("model", LAYERS)
def test_layers_are_found_without_a_list(model: type[Base]) -> None:
    traced = prepare(trace(*build(model)))
    assert [s.path for s in traced.layers] == LAYERS[model]
    assert traced.segments[0].path == "prologue"
    assert next(traced.nodes_of(traced.segments[0])).target is torch.ops.aten.embedding.default
    assert "first.up.weight" not in traced.segments[0].parameters
    assert traced.segments[-1].path == "epilogue"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("model", [Named, Chain, InTurns])
def test_they_train_as_one_process_on_every_axis(model: type[Base]) -> None:
    plans = on_every_axis(prepare(trace(*build(model))))
    failed = [r.text() for r in verify_plans(partial(build, model), plans) if not r.passed]
    assert not failed, "\n\n".join(failed)


def test_layer_of_takes_the_outermost_number() -> None:
    assert layer_of("model.layers.3.experts.1.up") == ("model.layers", "3")
    assert layer_of("encoder.block.0") == ("encoder.block", "0")
    assert layer_of("0.norm") == ("", "0")
    assert layer_of("blocks.07.up") == ("blocks", "07")
    assert layer_of("mlp.conv2d.norm") is None
