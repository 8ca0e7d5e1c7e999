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
