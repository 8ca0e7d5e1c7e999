"""Field case tr-11: tensors changed in place, and buffers that forward changes, are neither lost nor done twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.errors import UnsupportedModelError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests.models import default_batch
from tests.plans import on_every_axis

DIM, VOCAB, HEADS = 16, 64, 2


class Block(nn.Module):
    """`x +=`, masked_fill_ on scores, and a count that the block itself reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (p(x).view(batch, seq, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        self.calls.add_(1)
        scores = q @ k.transpose(-1, -2)
        hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, DIM)
        x = x.clone()
        x += self.out(y)
        h = self.up(x) / (1 + 0.1 * self.calls)
        self.calls.mul_(2)
        return x + self.down(h.relu_())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("steps", torch.zeros(2, dtype=torch.long))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.steps[0] += 1
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def counting() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Counting().double(), default_batch()


def _accumulated(model: nn.Module, batch: dict[str, Tensor], parts: int, replicas: int) -> Tensor:
    """The model's own loss and gradients, called once for every micro-batch; replicas count for themselves."""
    losses = []
    start = {n: b.clone() for n, b in model.named_buffers()}
    for replica in range(replicas):
        for name, buffer in model.named_buffers():
            buffer.copy_(start[name])
        rows = {name: t.chunk(replicas)[replica] for name, t in batch.items()}
        for i in range(parts):
            loss = model(**{name: t.chunk(parts)[i] for name, t in rows.items()}) / (parts * replicas)
            loss.backward()
            losses.append(loss.detach())
    return torch.stack(losses).sum()


def _trained(plans: list[Plan]) -> list[float]:
    errors = []
    for plan in plans:
        model, batch = counting()
        pm = build(model, prepare(trace(model, batch)), plan)
        reference, _ = counting()
        for _ in range(2):
            reference.zero_grad()
            pm.zero_grad()
            loss = _accumulated(reference, batch, plan.micro_batches, plan.degrees.dp)
            errors.append(abs(float(pm.step(batch)) - float(loss)))
            found = pm.full_gradients()
            errors += [float((found[n] - p.grad).abs().max()) for n, p in reference.named_parameters()]
        state = pm.state_dict()
        errors += [float((state[n] - b).abs().max()) for n, b in reference.named_buffers()]
        if not pm.world.alone:
            assert not any(b.any() for b in model.buffers())  # the user's model is only read
    return errors


def _with_recompute(plans: list[Plan]) -> list[Plan]:
    return [*plans, plans[2].replace(checkpoint={"layers.*": "full"})]


@pytest.mark.distributed
def test_tr_11_counts_are_those_of_every_micro_batch_on_every_axis() -> None:
    plans = _with_recompute(on_every_axis(prepare(trace(*counting()))))
    assert plans[2].degrees.pp == 2
    assert plans[2].micro_batches == 4
    for errors in run_ranks(2, _trained, plans):
        assert max(errors) < 1e-10


def test_tr_11_what_capture_says_of_buffers() -> None:
    model, batch = counting()
    traced = prepare(trace(model, batch))
    assert "buffer layers.0.calls is changed in forward: once for every micro-batch of a step" in traced.notices
    assert float(model.layers[0].calls) == 0.0
    assert int(model.steps.sum()) == 0


class RunningMean(nn.Module):
    """A statistic of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean((0, 1)))
        return (x - self.mean).pow(2).mean()


def _plan(**options: Any) -> Plan:
    defaults = {"degrees": Degrees(), "global_batch": 4, "seq_len": 3, "micro_batch": 4, "precision": "fp32"}
    return Plan(**{**defaults, "stages": (("layers.0", "layers.1"),), **options})


def test_tr_11_a_running_mean_is_kept_where_the_batch_is_whole_and_refused_where_it_is_cut() -> None:
    torch.manual_seed(0)
    model, x = RunningMean(), torch.rand(4, 3, 4)
    traced = prepare(trace(model, {"x": x}))
    reference = RunningMean()
    reference.load_state_dict(model.state_dict())
    pm = build(model, traced, _plan())
    for _ in range(2):
        pm.step({"x": x})
        reference(x)
    assert torch.equal(pm.state_dict()["mean"], reference.mean)
    for cut in ({"micro_batch": 2}, {"degrees": Degrees(dp=2), "micro_batch": 2}):
        with pytest.raises(UnsupportedModelError, match="mean: a buffer is changed in forward by what it sees"):
            apply(traced, _plan(**cut))


class ByLength(RunningMean):
    """A table for the length of its sequences, as scaled rotary frequencies are."""

    def forward(self, x: Tensor) -> Tensor:
        table = torch.where(torch.arange(x.shape[1]).max() + 1 > 2, torch.arange(4.0), torch.ones(4))
        self.mean.copy_(table)
        for layer in self.layers:
            x = layer(x * self.mean)
        return x.pow(2).mean()


def test_tr_11_a_table_by_length_is_the_same_for_any_rows() -> None:
    torch.manual_seed(0)
    model, x = ByLength(), torch.rand(4, 3, 4)
    traced = prepare(trace(model, {"x": x}))
    pm = build(model, traced, _plan(micro_batch=2))
    for length in (3, 2):
        torch.testing.assert_close(pm.step({"x": x[:, :length]}), model(x[:, :length]), rtol=1e-6, atol=0)
        assert torch.equal(pm.state_dict()["mean"], torch.arange(4.0) if length == 3 else torch.ones(4))


def _by_length() -> None:
    """Of the whole length on every rank, also where it holds a part of the sequence; of one stage, on all of them."""
    torch.manual_seed(0)
    model, x = ByLength(), torch.rand(4, 4, 4)
    traced = prepare(trace(model, {"x": x}))
    halves = (("layers.0",), ("layers.1",))
    for layout in ({"degrees": Degrees(cp=2)}, {"degrees": Degrees(pp=2), "stages": halves, "micro_batch": 2}):
        pm = build(copy.deepcopy(model), traced, _plan(seq_len=4, **layout))
        loss = pm.step({"x": x})
        model.zero_grad()
        expected = model(x)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        for name, gradient in pm.full_gradients().items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-8)
        assert torch.equal(pm.state_dict()["mean"], torch.arange(4.0))


@pytest.mark.distributed
def test_tr_11_a_table_by_length_is_that_of_the_whole_sequence() -> None:
    run_ranks(2, _by_length)


class Changes(nn.Module):
    """Changes what is not its own."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner = what, nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "input":
            x.mul_(2)
        if self.what == "parameter":
            with torch.no_grad():
                self.inner.weight.mul_(0.9)
        y = self.inner(x)
        return (self.norm(y) if self.what == "statistics" else y).mean()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("input", "x: an input is changed in place"),
        ("parameter", "inner.weight: a parameter is changed in forward"),
        ("statistics", "norm: running statistics are changed in forward"),
    ],
)
def test_tr_11_changes_that_cannot_be_kept_are_refused_by_name(what: str, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        trace(Changes(what), {"x": torch.rand(3, 4)})
