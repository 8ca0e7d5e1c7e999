"""Neighbours of ac-02 and ac-06: layers that the model itself recomputes train as in the plain model, whichever way it
asks for it; the plan says what is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.trace import trace
from tests import models, plans


class Recomputing(models.TinyGPT):
    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.run(self.blocks, self.tokens(input_ids))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())  # type: ignore[union-attr]


def _each(reentrant: bool) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[no-untyped-call]
        return x

    return run


def _in_segments(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=True)  # type: ignore[no-any-return, no-untyped-call]


WAYS = {"plain": _each(False), "reentrant": _each(True), "in segments": _in_segments}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_the_plain_models(way: str, frozen: bool) -> None:
    """`frozen`: below the layers nothing learns, and then the reentrant way trains none of them: so does the plan."""
    torch.manual_seed(0)
    model, batch = Recomputing(WAYS[way]).double(), models.default_batch()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.tokens.requires_grad_(not frozen)
    traced = prepare(trace(model, batch))
    layers = tuple(segment.path for segment in traced.layers)
    plan = plans.megatron("tiny_gpt", Degrees(), micro_batch=2).replace(stages=(layers,))
    pm = build(model, traced, plan)
    loss = pm.step(batch)
    expected = model(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    gradients: dict[str, Any] = pm.full_gradients()
    for name, p in model.named_parameters():
        if p.grad is None:
            assert gradients.get(name) is None or not gradients[name].any(), name
        else:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-12, msg=name)
