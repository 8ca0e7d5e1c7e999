"""Models that hold what cannot be copied, or whose own code looks at masks, are captured all the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import UnsupportedModelError
from autopar.shell import copied
from autopar.trace import trace


class Holder(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held, self.table = held, {"list": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        with self.held["lock"]:
            self.table["list"].append(2.0)
            y: Tensor = self.layer(x) * self.table["list"][0]
        return y


def test_what_cannot_be_copied_is_shared_and_the_rest_is_not() -> None:
    held = {"lock": threading.Lock(), "steps": (i for i in range(3)), "last": torch.ones(2, requires_grad=True) * 2}
    model = Holder(held)
    copy = copied(model)
    assert copy.held["lock"] is held["lock"]
    assert copy.held is not held
    assert copy.layer.weight is not model.layer.weight
    x = torch.randn(2, 4)
    assert torch.equal(trace(model, x).graph_module(x)[0], model(x))
    assert model.table["list"] == [1.0, 2.0]  # of the call above: capture left no trace


def test_what_holds_modules_and_cannot_be_copied_is_refused_by_name() -> None:
    class Wrapper:
        def __init__(self, module: nn.Module) -> None:
            self.module, self.lock = module, threading.Lock()

    model = Holder({"lock": threading.Lock()})
    model.other = Wrapper(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match="^other: cannot be copied for the capture: TypeError"):
        trace(model, torch.randn(2, 4))


def test_masks_of_the_transformer_modules_are_not_looked_at() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            y: Tensor = self.net(source, target, tgt_mask=mask)
            return y

    model = Net()
    source, target = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    graph = trace(model, {"source": source, "target": target}).graph_module
    torch.testing.assert_close(graph(source, target)[0], model(source, target))
