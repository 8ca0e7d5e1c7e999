"""Neighbours of loss-02 and vp-03: a loss taken chunk by chunk over joined rows and tokens is that of all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.blocks import op_name
from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.models import VOCAB, default_batch
from tests.plans import on_every_axis

DIM = 16
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB), loss
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.head, x, labels)


def _hidden(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The head on every chunk, targets shifted, in a loop."""
    flat, targets = x[:, :-1].reshape(-1, DIM), labels[:, 1:].reshape(-1)
    total = x.new_zeros(())
    for h, y in zip(flat.chunk(4), targets.chunk(4), strict=True):
        total = total + F.cross_entropy(30 * torch.tanh(head(h) / 30), y, reduction="sum")
    return total / (targets != -100).sum()


def _logits(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Chunks of a size, averaged in the end."""
    pairs = zip(head(x).view(-1, VOCAB).split(32), labels.view(-1).split(32), strict=True)
    return torch.stack([F.cross_entropy(z, y, reduction="sum") for z, y in pairs]).sum() / labels.numel()


def _masked(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Several tensors of a chunk, and a sum written out."""
    seen = (labels.flatten() != 3).to(x.dtype)
    total = 0.0
    for h, y, m in zip(x.flatten(0, 1).chunk(2), labels.flatten().chunk(2), seen.chunk(2), strict=True):
        total = total + (F.cross_entropy(head(h), y, reduction="none") * m).sum()
    return total / seen.sum()


def _means(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(head(x).view(-1, VOCAB).chunk(4), labels.view(-1).chunk(4), strict=True)
    return torch.stack([F.cross_entropy(z, y) for z, y in pairs]).mean()


def _weighed(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(head(x).view(-1, VOCAB).chunk(2), labels.view(-1).chunk(2), strict=True)
    first, second = (F.cross_entropy(z, y, reduction="sum") for z, y in pairs)
    return (first + 2 * second) / labels.numel()


def _centred(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(head(x).view(-1, VOCAB).chunk(2), labels.view(-1).chunk(2), strict=True)
    return sum(F.cross_entropy(z - z.mean(0), y, reduction="sum") for z, y in pairs) / labels.numel()  # type: ignore[return-value]


def _one_left_out(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    pairs = list(zip(head(x).view(-1, VOCAB).chunk(3), labels.view(-1).chunk(3), strict=True))
    return sum(F.cross_entropy(z, y, reduction="sum") for z, y in pairs[:2]) / labels.numel()  # type: ignore[return-value]


JOINED = {"hidden": _hidden, "logits": _logits, "masked": _masked}
APART = {"means": _means, "weighed": _weighed, "tokens meet": _centred, "one left out": _one_left_out}


def chunked(loss: Loss) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = default_batch()
    batch["labels"][:, ::5] = -100
    if loss is _masked:
        batch["labels"][:, ::5] = 3
    return Model(loss).double(), batch


@pytest.mark.parametrize("how", [*JOINED, *APART])
def test_the_graph_has_the_models_loss_and_chunks_only_where_they_matter(how: str) -> None:
    model, batch = chunked({**JOINED, **APART}[how])
    graph_module = prepare(trace(model, batch)).graph_module
    losses = [n for n in graph_module.graph.nodes if "cross_entropy" in op_name(n)]
    assert (len(losses) == 1) is (how in JOINED)
    for rows in (8, 6) if how in JOINED else (8,):
        part = {name: t[:rows] for name, t in batch.items()}
        if rows == 8 or how != "logits":  # the model itself was captured in four chunks
            torch.testing.assert_close(graph_module(**part)[0], model(**part), rtol=1e-12, atol=0)


@pytest.mark.distributed
@pytest.mark.parametrize("how", JOINED)
def test_loss_02_chunks_train_as_in_one_process(how: str) -> None:
    factory = partial(chunked, JOINED[how])
    wanted = on_every_axis(prepare(trace(*factory())))
    failed = [r.text() for r in verify_plans(factory, wanted) if not r.passed]
    assert not failed, "\n\n".join(failed)
