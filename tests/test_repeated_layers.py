"""Layers that are filled in instead of run: the graph is that of the full export, and doubt means the full export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.equal_layers import groups_of_equal_layers
from autopar.passes import prepare
from autopar.printing import format_graph
from autopar.trace import trace
from tests.models import BUILDERS, MORE_HF_BUILDERS, captured, default_batch

REPEATED = {"tiny_gpt": "blocks", "bert": "bert.encoder.layer", "mixtral": "model.layers", "gpt2": "transformer.h"}


@pytest.mark.parametrize("family", [*BUILDERS, *MORE_HF_BUILDERS])
def test_graph_is_that_of_the_full_export(family: str) -> None:
    found, build = captured(family), {**BUILDERS, **MORE_HF_BUILDERS}[family]
    full = trace(build(), default_batch(), repeat_layers=False)
    assert full.repeated_layers == ()
    assert format_graph(found.graph_module.graph) == format_graph(full.graph_module.graph)
    assert [n.meta.get("key") for n in found.graph_module.graph.nodes] == [
        n.meta.get("key") for n in full.graph_module.graph.nodes
    ]
    assert (found.fingerprint, found.segments, found.seq_range) == (full.fingerprint, full.segments, full.seq_range)
    assert prepare(found).segments == prepare(full).segments
    if family in REPEATED:
        assert found.repeated_layers == tuple(f"{REPEATED[family]}.{i}" for i in (1, 2))


def test_two_kinds_of_layers_are_two_groups() -> None:
    """Gemma 2 at 8 layers: every other one has a sliding window, and the masks are passed from layer to layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, num_hidden_layers=8, num_attention_heads=4, sliding_window=8))
    found, full = trace(model, default_batch()), trace(model, default_batch(), repeat_layers=False)
    assert found.repeated_layers == tuple(f"model.layers.{i}" for i in (2, 3, 4, 5))
    assert format_graph(found.graph_module.graph) == format_graph(full.graph_module.graph)


class Layer(nn.Module):
    """A residual layer that knows its number. Subclasses depend on it, or on something else, in their own ways."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x).tanh()


class Stack(nn.Module):
    def __init__(self, layer: type[Layer], layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(i) for i in range(layers)])
        for i, made in enumerate(self.layers):
            made.setup(self, i) if hasattr(made, "setup") else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        Counts.seen.clear()
        Looks.seen.clear()
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Scaled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) / (self.number + 1)


class EveryOther(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if self.number % 2 else x - self.inner(x)


class Swallows(Layer):
    def forward(self, x: Tensor) -> Tensor:
        try:
            factor = float(self.number)
        except Exception:  # noqa: BLE001  as careless user code does
            factor = 1.0
        return x + self.inner(x) * factor


class Constant(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = 0.1 * number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.scale


class Looks(Layer):
    """Reads a tensor it was not given."""

    seen: dict[str, Tensor] = {}  # noqa: RUF012  shared on purpose

    def forward(self, x: Tensor) -> Tensor:
        before = self.seen.get("x", x)
        self.seen["x"] = x
        return before + self.inner(x)


class Counts(Layer):
    """Keeps a count in Python that all layers share."""

    seen: list[int] = []  # noqa: RUF012  shared on purpose

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(0)
        return x + self.inner(x) * len(self.seen)


class Remembers(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.inner(x)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x += self.inner(x)
        return x


class Hooked(Layer):
    def setup(self, stack: Stack, number: int) -> None:
        self.inner.register_forward_hook(lambda module, args, out: out * (number + 1))


class Shares(Layer):
    """All layers hold one and the same module."""

    def setup(self, stack: Stack, number: int) -> None:
        self.inner = stack.layers[0].inner


@pytest.mark.parametrize(
    "layer", [Scaled, EveryOther, Swallows, Constant, Looks, Counts, Remembers, InPlace, Hooked, Shares]
)
def test_what_depends_on_the_layer_is_run_for_every_layer(layer: type[Layer]) -> None:
    torch.manual_seed(0)
    model, x = Stack(layer), torch.randn(3, 4)
    wanted = model(x.clone())
    for made in model.layers:
        made.calls = 0
    found = trace(model, {"x": x})
    assert found.repeated_layers == ()
    assert torch.equal(found.graph_module(x.clone())[0], wanted)
    assert [made.number for made in model.layers] == list(range(5))
    assert all("forward" not in vars(made) for made in model.layers)


class PassesNumber(Stack):
    """The caller treats the layers differently: that is not inside the layers and runs as it is."""

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, layer in enumerate(self.layers):
            skips.append(x)
            x = layer(x * (i + 1)) + (skips[i // 2] if i > 2 else 0)
        return x.mean()


def test_what_the_caller_does_between_layers_is_kept() -> None:
    torch.manual_seed(0)
    model, x = PassesNumber(Layer), torch.randn(3, 4)
    found, full = trace(model, {"x": x}), trace(model, {"x": x}, repeat_layers=False)
    assert found.repeated_layers == ("layers.2", "layers.3")  # gradient reaches x from 1 on
    assert format_graph(found.graph_module.graph) == format_graph(full.graph_module.graph)
    assert torch.equal(found.graph_module(x)[0], model(x))


def test_layers_with_a_flag_of_their_own_are_not_equal() -> None:
    model = Stack(Layer, layers=6)
    for i, layer in enumerate(model.layers):
        layer.wide = i % 2
    groups = [[path for path, _ in members] for members, _ in groups_of_equal_layers(model)]
    assert groups == []  # 0 and 1 are numbers, but no layer's own
    for layer in model.layers:
        layer.wide = bool(layer.wide)
    groups = [[path for path, _ in members] for members, _ in groups_of_equal_layers(model)]
    assert groups == [["layers.0", "layers.2", "layers.4"], ["layers.1", "layers.3", "layers.5"]]
