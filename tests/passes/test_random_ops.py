"""Ops that draw random numbers and are not seeded are refused under a plan, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import UnsupportedModelError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.trace import trace


class Noisy(nn.Module):
    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)])
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.noise(x).pow(2).mean()


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: x * (torch.rand(x.shape[0], 1, 1) < 0.8),
    "randn_like": lambda x: x + torch.randn_like(x),
    "exponential": lambda x: F.gumbel_softmax(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.1, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_ranks_would_draw_other_numbers(name: str) -> None:
    traced = prepare(trace(Noisy(RANDOM[name]), {"x": torch.rand(4, 6, 8)}))
    layers = (("layers.0", "layers.1"),)
    plan = Plan(degrees=Degrees(dp=2), global_batch=4, seq_len=6, micro_batch=2, stages=layers)
    with pytest.raises(UnsupportedModelError, match=f"{name}.* draws from each process's own generator"):
        apply(traced, plan)
    apply(traced, plan.replace(degrees=Degrees(), micro_batch=4))
