"""Neighbours of cp-03 and div-04: what would see tokens added at the end of a sequence is found, nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.mesh import Degrees
from autopar.passes import prepare, token_count
from autopar.plan import Plan
from autopar.trace import trace
from tests.models import VOCAB, default_batch

DIM = 8
PLAN = Plan(degrees=Degrees(cp=2), global_batch=8, seq_len=16, micro_batch=4, stages=(("layers.0-1",),))


class Model(nn.Module):
    def __init__(self, mix: Callable[[Model, Tensor], Tensor], ahead: int = 0) -> None:
        super().__init__()
        self.ahead = ahead
        self.embed, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(32, DIM)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)) for _ in range(2)])
        self.causal, self.both = nn.Conv1d(DIM, DIM, 3, padding=2), nn.Conv1d(DIM, DIM, 3, padding=1)
        self.head, self.mix = nn.Linear(DIM, VOCAB), mix

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.mix(self, x)
        scored = x[:, : x.shape[1] - self.ahead]
        loss = F.cross_entropy(self.head(scored).flatten(0, 1), labels[:, self.ahead :].flatten())
        return {"loss": loss, "hidden": x}


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def _attended(x: Tensor, causal: bool) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=causal).transpose(1, 2).flatten(2)


SEEING: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "softmax": lambda m, x: x * x.softmax(1),
    "flip": lambda m, x: x + x.flip(1),
    "roll": lambda m, x: x + x.roll(1, 1),
    "padded slice": lambda m, x: x + F.pad(x, (0, 0, -1, 1)),
    "padded, then sliced": lambda m, x: x + F.pad(x, (0, 0, 0, 1))[:, 1:],
    "convolution to both sides": lambda m, x: m.both(x.transpose(1, 2)).transpose(1, 2),
    "sort": lambda m, x: x + x.sort(1).values,
    "places from the end": lambda m, x: x + m.places(x.shape[1] - 1 - _places(x)),
    "the last place": lambda m, x: x * (_places(x).max() + 1),
    "scaled by the length": lambda m, x: x / x.shape[1],
    "scaled by its logarithm": lambda m, x: x * torch.tensor(x.shape[1]).log(),
    "group norm": lambda m, x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "mean": lambda m, x: x - x.mean(1, keepdim=True),
    "last token": lambda m, x: x + x[:, -1:],
    "second half": lambda m, x: torch.cat([x[:, : x.shape[1] // 2], 2 * x[:, x.shape[1] // 2 :]], 1),
    "products of tokens": lambda m, x: x @ x.mT @ x,
    "attention of all": lambda m, x: _attended(x, causal=False),
}
BLIND: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "nothing": lambda m, x: x,
    "cumsum": lambda m, x: x.cumsum(1),
    "causal convolution": lambda m, x: m.causal(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2),
    "shifted back": lambda m, x: x + F.pad(x, (0, 0, 1, -1)),
    "sliced, then padded in front": lambda m, x: x + torch.cat([x[:, :1], x[:, :-1]], 1),
    "padded, then dropped": lambda m, x: F.pad(x, (0, 0, 0, 3))[:, : x.shape[1]],
    "places": lambda m, x: x + m.places(_places(x)),
    "first token": lambda m, x: x + x[:, :1],
    "joined rows": lambda m, x: m.layers[0](x.reshape(-1, DIM)).view(x.shape),
    "attention": lambda m, x: _attended(x, causal=True),
}


def _seen(mix: Callable[[Model, Tensor], Tensor], plan: Plan = PLAN) -> tuple[str, str]:
    torch.manual_seed(0)
    traced = prepare(trace(Model(mix), default_batch()))
    found: tuple[str, str] = token_count(traced, plan).meta["seen_ends"]
    return found


@pytest.mark.parametrize("how", SEEING)
def test_what_sees_the_end_is_named(how: str) -> None:
    loss, outputs = _seen(SEEING[how])
    assert " in " in loss
    assert " in " in outputs


@pytest.mark.parametrize("how", BLIND)
def test_what_looks_back_alone_may_be_padded(how: str) -> None:
    assert _seen(BLIND[how]) == ("", "")


def test_a_last_token_that_no_target_belongs_to_may_see_it() -> None:
    traced = prepare(trace(Model(SEEING["padded slice"], ahead=1), default_batch()))
    loss, outputs = token_count(traced, PLAN).meta["seen_ends"]
    assert loss == ""
    assert outputs


def test_an_output_beside_the_loss_counts_for_calls_alone() -> None:
    class Pooled(Model):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = super().forward(input_ids, labels)
            return {**outputs, "pooled": outputs["hidden"].mean(1)}

    traced = prepare(trace(Pooled(BLIND["nothing"]), default_batch()))
    assert token_count(traced, PLAN).meta["seen_ends"] == ("", "mean in forward")


def test_plans_that_cut_no_sequence_ask_nothing() -> None:
    assert _seen(SEEING["flip"], PLAN.replace(degrees=Degrees(dp=2))) == ("", "")
