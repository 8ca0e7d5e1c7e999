"""A loss is cut into sums and divisors: over any parts of a batch they give the loss and gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import UnsupportedModelError
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.passes import apply, prepare, token_count
from autopar.passes.prepare import copy_graph
from autopar.passes.token_loss import sum_loss
from autopar.plan import Plan
from autopar.runtime.tokens import divided
from autopar.trace import trace

ROWS, SEQ, DIM, VOCAB = 6, 8, 12, 16
Loss = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(2)]
        )
        self.head = nn.Linear(DIM, VOCAB)
        self.register_buffer("class_weight", torch.linspace(0.5, 2.0, VOCAB))
        self.loss = loss

    def forward(self, x: Tensor, targets: Tensor, weight: Tensor, items: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        given = {"targets": targets, "weight": weight, "items": items, "class_weight": self.class_weight, "x": x}
        return self.loss(self.head(x), given, self.head.weight)


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    targets[:2, 3:] = -100
    weight = torch.rand(ROWS, SEQ, generator=generator, dtype=torch.float64)
    x = torch.randn(ROWS, SEQ, DIM, generator=generator, dtype=torch.float64)
    return {"x": x, "targets": targets, "weight": weight, "items": torch.tensor(77.0, dtype=torch.float64)}


def _ce(logits: Tensor, targets: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), **options)  # type: ignore[arg-type]


def _each(logits: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), given["targets"], reduction="none")


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda z, b, w: _ce(z, b["targets"]),
    "z-loss": lambda z, b, w: _ce(z, b["targets"]) + 1e-2 * torch.logsumexp(z, -1).pow(2).mean(),
    "two shifts": lambda z, b, w: (
        _ce(z[:, :-1], b["targets"][:, 1:]) - 0.3 * _ce(z[:, :-2], b["targets"][:, 2:]) / 2
    ),
    "token weights": lambda z, b, w: (_each(z, b) * b["weight"]).sum() / b["weight"].sum(),
    "masked mean": lambda z, b, w: (_each(z, b) * (b["weight"] > 0.9)).sum() / (b["weight"] > 0.9).sum().clamp(min=1),
    "per sequence": lambda z, b, w: ((_each(z, b) * b["weight"]).sum(1) / b["weight"].sum(1)).mean(),
    "number of items given": lambda z, b, w: _ce(z, b["targets"], reduction="sum") / b["items"],
    "sum": lambda z, b, w: _ce(z, b["targets"], reduction="sum") * 0.01,
    "over rows": lambda z, b, w: _ce(z, b["targets"], reduction="sum") / z.shape[0],
    "over numel": lambda z, b, w: _ce(z, b["targets"], reduction="sum") / b["targets"].numel(),
    "over mean weight": lambda z, b, w: (_each(z, b) * b["weight"]).mean() / b["weight"].mean(),
    "class weights": lambda z, b, w: _ce(z, b["targets"], weight=b["class_weight"]),
    "label smoothing": lambda z, b, w: _ce(z, b["targets"], label_smoothing=0.1),
    "log-likelihood": lambda z, b, w: F.nll_loss(z.log_softmax(-1).reshape(-1, VOCAB), b["targets"].reshape(-1)),
    "soft targets": lambda z, b, w: _ce(z, b["targets"].clamp(min=0)) + F.cross_entropy(
        z.reshape(-1, VOCAB), z.detach().softmax(-1).roll(1, -1).reshape(-1, VOCAB)
    ),
    "divergence": lambda z, b, w: F.kl_div(
        z.log_softmax(-1), z.detach().roll(1, -1).softmax(-1), reduction="batchmean"
    ),
    "binary": lambda z, b, w: F.binary_cross_entropy_with_logits(z[..., 0], b["weight"]),
    "smooth l1": lambda z, b, w: F.smooth_l1_loss(z[..., 0], b["weight"], beta=0.5),
    "huber": lambda z, b, w: F.huber_loss(z[..., 0], b["weight"], delta=0.7),
    "mean of dims": lambda z, b, w: _each(z, b).mean(dim=(0, 1)) + z.pow(2).mean(1).mean(),
    "in chunks": lambda z, b, w: (
        _ce(z[:, :4], b["targets"][:, :4], reduction="sum") + _ce(z[:, 4:], b["targets"][:, 4:], reduction="sum")
    ) / b["items"],
    "from zero": lambda z, b, w: z.new_zeros(()) + _ce(z, b["targets"]) - torch.zeros((), dtype=z.dtype),
    "from a constant zero": lambda z, b, w: sum([_ce(z, b["targets"]), z.pow(2).mean()], torch.tensor(0.0)),
    "sum of a stack": lambda z, b, w: torch.stack([_ce(z, b["targets"]), torch.tensor(0.0), z.pow(2).mean()]).sum(),
    "mean of a stack": lambda z, b, w: 3 * torch.stack([_ce(z, b["targets"]), -z.pow(2).mean()]).mean(0),
    "weighted stack": lambda z, b, w: (
        torch.stack([_ce(z, b["targets"]), z.pow(2).mean()]) * torch.tensor([0.3, 2.0]) / b["items"]
    ).sum(),
    "dot of a cat": lambda z, b, w: torch.dot(
        torch.cat([_ce(z, b["targets"]).view(1), z.abs().mean().unsqueeze(0)]), b["class_weight"][1:3]
    ),
    "if any counts": lambda z, b, w: torch.where(
        b["targets"].ge(0).sum() > 0, (_each(z, b) * b["weight"]).sum() / b["targets"].ge(0).sum(), 0 * z.sum()
    ),
    "if none counts": lambda z, b, w: torch.where(
        (b["weight"] > 9).sum() > 0, _each(z, b).sum() / (b["weight"] > 9).sum().clamp(min=1), z.pow(2).mean()
    ) + torch.where((b["weight"] > 9).any(), z.mean(), 0.0) + torch.where(b["items"] > 3, torch.tensor(0.0), z.mean()),
}  # fmt: skip

WHOLE_ONLY: dict[str, tuple[Loss, str]] = {
    "perplexity": (lambda z, b, w: _ce(z, b["targets"]).exp(), "ends in exp"),
    "penalty on weights": (lambda z, b, w: _ce(z, b["targets"]) + w.pow(2).sum(), "does not depend on the batch"),
    "learnt divisor": (lambda z, b, w: _each(z, b).sum() / z.pow(2).sum(), "ends in div"),
    "largest weight": (lambda z, b, w: _each(z, b).sum() / b["weight"].max(), "by the result of max"),
    "largest of a stack": (
        lambda z, b, w: torch.stack([_ce(z, b["targets"]), z.pow(2).mean()]).max(), "ends in max"
    ),
    "learnt weights of a stack": (
        lambda z, b, w: (torch.stack([_ce(z, b["targets"]), z.mean()]) * w[0, :2].softmax(0)).sum(), "ends in mul"
    ),
    "balance of experts": (
        lambda z, b, w: _ce(z, b["targets"]) + z.softmax(-1).mean((0, 1)).pow(2).sum(), "mean mixes the rows"
    ),
}  # fmt: skip


def _traced(loss: Loss) -> TracedModel:
    return prepare(trace(Model(loss).double(), _batch()))


def _plan(dp: int = 2, micro_batch: int = 1) -> Plan:
    layers = (("layers.0", "layers.1"),)
    return Plan(degrees=Degrees(dp=dp), global_batch=ROWS, seq_len=SEQ, micro_batch=micro_batch, stages=layers)


def _rows(batch: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    return {name: t[first:last] if t.dim() else t for name, t in batch.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_batch_give_the_loss_and_gradient_of_the_whole(name: str) -> None:
    traced, batch = _traced(LOSSES[name]), _batch()
    apply(traced, _plan())  # what mixes no rows is not refused
    parameters = dict(traced.graph_module.named_parameters())
    assert traced.loss is not None
    whole = traced.graph_module(**batch)[traced.loss]
    wanted = torch.autograd.grad(whole, list(parameters.values()), allow_unused=True)

    counter = token_count(traced, _plan())
    read = [str(n.target) for n in counter.graph.nodes if n.op == "placeholder"]
    divisors = counter(**{n: batch[n] for n in read})
    summed = sum_loss(copy_graph(traced.graph_module), traced, _plan())
    cuts = ((0, 1), (1, 3), (3, 6))
    parts = [divided(summed(**_rows(batch, *cut))[0], divisors) for cut in cuts]
    found = torch.autograd.grad(torch.stack(parts).sum(), list(parameters.values()), allow_unused=True)
    torch.testing.assert_close(torch.stack(parts).sum(), whole.double(), rtol=1e-12, atol=0)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_other_losses_run_in_one_piece_only(name: str) -> None:
    loss, said = WHOLE_ONLY[name]
    traced, batch = _traced(loss), _batch()
    for plan in (_plan(), _plan(dp=1)):
        with pytest.raises(UnsupportedModelError, match=said):
            _ = apply(traced, plan), token_count(traced, plan)
    one_piece = _plan(dp=1, micro_batch=ROWS)
    (stage,) = apply(traced, one_piece)
    assert traced.loss is not None
    counter = token_count(traced, one_piece)
    read = [str(n.target) for n in counter.graph.nodes if n.op == "placeholder"]
    found = divided(
        stage.graph_module(**{n: batch[n] for n in stage.inputs})[0], counter(**{n: batch[n] for n in read})
    )
    torch.testing.assert_close(found, traced.graph_module(**batch)[traced.loss].double())


def test_a_size_that_depends_on_values_is_refused_with_the_way_out() -> None:
    def selected(z: Tensor, b: Mapping[str, Tensor], w: Tensor) -> Tensor:
        kept = b["weight"] > 0.5
        return F.cross_entropy(z[kept], b["targets"][kept])

    with pytest.raises(UnsupportedModelError, match=r"depends on values.*torch\.where"):
        _traced(selected)
