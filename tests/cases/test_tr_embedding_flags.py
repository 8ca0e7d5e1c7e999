"""Neighbours of tie-03, tr-11 and div-03: the flags of nn.Embedding hold however ids are cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import UnsupportedModelError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.specs import Pins
from autopar.trace import trace
from autopar.verify import verify_plans
from autopar.verify.layout import FixedLayouts
from tests.models import VOCAB, default_batch
from tests.plans import on_every_axis

DIM = 16


class Model(nn.Module):
    def __init__(self, *, tied: bool, **flags: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM, **flags), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)) for _ in range(2))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def flagged(tied: bool, **flags: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Model(tied=tied, **flags).double(), default_batch()


@pytest.mark.distributed
@pytest.mark.parametrize(("tied", "flags"), [(False, {"sparse": True}), (True, {"padding_idx": 3})])
def test_the_table_trains_as_in_one_process(tied: bool, flags: dict[str, Any]) -> None:
    factory = partial(flagged, tied, **flags)
    traced = prepare(trace(*factory()))
    failed = [r.text() for r in verify_plans(factory, on_every_axis(traced)) if not r.passed]
    assert not failed, "\n\n".join(failed)


def test_a_gradient_that_was_sparse_is_said_to_be_dense() -> None:
    notices = prepare(trace(*flagged(False, sparse=True))).notices
    assert "embed: the gradient of this embedding is dense (sparse=True)" in notices
    assert not prepare(trace(*flagged(False))).notices


def test_gradients_by_frequency_want_the_whole_batch() -> None:
    """The number of times an id comes up in a part of the batch is another number."""
    traced = prepare(trace(*flagged(False, scale_grad_by_freq=True)))
    layouts = FixedLayouts(traced, 8, 16)
    for degrees in (Degrees(dp=2), Degrees(cp=2), Degrees(pp=2)):
        with pytest.raises(UnsupportedModelError, match="embed: embedding mixes the rows of a batch"):
            apply(traced, layouts.plan(degrees, Pins()))


@pytest.mark.distributed
def test_gradients_by_frequency_under_tensor_parallelism() -> None:
    factory = partial(flagged, False, scale_grad_by_freq=True)
    layouts = FixedLayouts(prepare(trace(*factory())), 8, 16)
    wanted = [layouts.plan(Degrees(tp=2), Pins(microbatch=8, sp=sp)) for sp in (False, True)]
    failed = [r.text() for r in verify_plans(factory, wanted) if not r.passed]
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("name", ["code", "graph", "meta"])
def test_a_name_that_graphs_have_themselves_is_refused(name: str) -> None:
    model, batch = flagged(False)
    setattr(model, name, model.layers)
    del model.layers
    model.__dict__["layers"] = list(getattr(model, name))
    with pytest.raises(UnsupportedModelError, match=f"{name}: torch.fx has something of its own under this name"):
        trace(model, batch)
