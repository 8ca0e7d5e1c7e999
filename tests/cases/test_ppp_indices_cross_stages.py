"""Neighbour of ppp-04: numbers of tokens that one layer chooses and the layers of another stage read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.models import VOCAB, default_batch
from tests.plans import on_every_axis

DIM = 16


class Chosen(nn.Module):
    """The first layer chooses four tokens of each row; the others run on these and put them back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.router = nn.Linear(DIM, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layers[0](self.embed(input_ids))
        weights, places = self.router(x).squeeze(-1).topk(4, dim=1)
        wide = places.unsqueeze(-1).expand(-1, -1, DIM)
        for layer in self.layers[1:]:
            x = x.scatter_add(1, wide, layer(x.gather(1, wide)) * weights.sigmoid().unsqueeze(-1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def chosen() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote then holds numbers that index nothing
    torch.manual_seed(0)
    return Chosen().double(), default_batch()


@pytest.mark.distributed
def test_chosen_tokens_train_as_in_one_process() -> None:
    try:
        wanted = on_every_axis(prepare(trace(*chosen())))
    finally:
        torch.use_deterministic_algorithms(False)
    failed = [r.text() for r in verify_plans(chosen, wanted) if not r.passed]
    assert not failed, "\n\n".join(failed)
