"""Weights of meta-built models: from the model's own initialiser, whatever the order they are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.initial_weights import InitialWeights
from tests.models import BUILDERS


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_values_do_not_depend_on_who_asks(family: str) -> None:
    with torch.device("meta"):
        model = BUILDERS[family](torch.float32)
    weights = dict(InitialWeights(model, 7).items())
    backwards = InitialWeights(model, 7)
    assert all(torch.equal(backwards[name], weights[name]) for name in reversed(list(weights)))
    assert list(weights) == [n for n, _ in model.named_parameters()]
    assert all(p.is_meta for p in model.parameters())


def test_layers_differ_and_follow_the_models_initialiser() -> None:
    with torch.device("meta"):
        model = BUILDERS["llama"](torch.float32)
    weights = InitialWeights(model, 7)
    first, second = (weights[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert abs(first.std().item() - model.config.initializer_range) < 0.005
    assert torch.equal(weights["model.layers.0.input_layernorm.weight"], torch.ones(32))
    assert not torch.equal(first, InitialWeights(model, 8)["model.layers.0.mlp.up_proj.weight"])


def test_own_modules_use_reset_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    weights = InitialWeights(model, 0)
    assert weights["0.weight"].abs().max() <= 1 / 8
    assert torch.equal(weights["1.bias"], torch.zeros(64))


def test_parameter_that_nobody_sets_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with torch.device("meta"):
        model = nn.Sequential(Scale())
    with pytest.raises(AutoparError, match="0: nothing initialises scale of this Scale"):
        InitialWeights(model, 0)["0.scale"]


class _Own(nn.Module):
    """Initialised by `_init_weights`, which leaves biases as they were; `after` is done at the end of __init__."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.apply(self._init_weights)
        if after == "fill":
            nn.init.constant_(self.head.weight, 0.5)
        elif after == "normal":
            nn.init.normal_(self.embed.weight, std=0.01)
        elif after == "cast":
            self.half()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)


@pytest.mark.parametrize(
    ("after", "lost"), [("fill", "head: weight"), ("normal", "embed: weight"), ("cast", ""), ("", "")]
)
def test_what_init_sets_after_the_initialisers_is_refused_by_name(after: str, lost: str) -> None:
    with torch.device("meta"):
        model = _Own(after)
    weights = InitialWeights(model, 0)
    if lost:
        with pytest.raises(AutoparError, match=f"{lost} was set again after .* own initialiser"):
            weights.refuse_lost()
        return
    weights.refuse_lost()
    assert (weights["head.weight"] == 0.25).all()
    assert 0 < weights["head.bias"].abs().max() < 1


@pytest.mark.parametrize("family", [f for f in BUILDERS if f != "tiny_gpt"])
def test_no_family_loses_anything(family: str) -> None:
    with torch.device("meta"):
        model = BUILDERS[family](torch.float32)
    InitialWeights(model, 0).refuse_lost()


def test_embeddings_scaled_by_the_model_are_refused() -> None:
    with torch.device("meta"):
        model = BUILDERS["tiny_gpt"](torch.float32)
    with pytest.raises(AutoparError, match="tokens: weight was set again after Embedding's own initialiser"):
        InitialWeights(model, 0).refuse_lost()
