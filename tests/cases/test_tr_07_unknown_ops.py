"""Field case tr-07: operators nobody wrote a sharding rule for run replicated, with a notice, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import UnsupportedModelError
from autopar.passes import prepare
from autopar.trace import trace
from autopar.verify import verify_plans
from tests.models import captured, default_batch
from tests.plans import on_every_axis

DIM, VOCAB = 16, 64


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes, scaled, as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 0.5 * grad, None


class TwoResults(torch.autograd.Function):
    """Product and sum, with a backward of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product * y + total, product * x + 2 * total


class Unknown(nn.Module):
    """torch.full, cumsum over the hidden dim, einsum, two autograd.Functions and sort."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.mix = nn.Parameter(torch.randn(DIM, DIM) / DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h + torch.full((2 * DIM,), 0.5, dtype=h.dtype, device=h.device)
        h = StraightThrough.apply(h, 8)
        h = h.cumsum(-1) / 8
        product, total = TwoResults.apply(h, h.tanh())
        y = self.down(product + total)
        y = torch.einsum("bsk,kn->bsn", y, self.mix)
        z: Tensor = x + y.sort(-1).values
        return z


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module] = Unknown) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([layer() for _ in range(4)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Stack().double(), default_batch()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_tr_07_functions_keep_their_own_backward() -> None:
    model, batch = build()
    other = default_batch(rows=3, seq=11, seed=4)
    loss = model(**other)
    wanted = gradients(model, loss)
    traced = prepare(trace(model, batch))
    assert traced.repeated_layers == ("layers.1", "layers.2")
    found = traced.graph_module(*traced.signature.bind((), other).values())[0]
    assert torch.equal(found, loss)
    have = gradients(model, found)
    assert all(torch.equal(have[n], wanted[n]) for n in wanted)
    said = " ".join(traced.notices)
    for name in ("StraightThrough is kept whole", "custom_TwoResults (4 in", "sort (4 in"):
        assert name in said


@pytest.mark.distributed
def test_tr_07_unknown_ops_train_as_one_process_on_every_axis() -> None:
    model, batch = build()
    failed = [r.text() for r in verify_plans(build, on_every_axis(prepare(trace(model, batch)))) if not r.passed]
    assert not failed, "\n\n".join(failed)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class TakesAFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        return function(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize(
    ("apply", "says"),
    [
        (lambda h: Dirty.apply(h), r"Dirty changes its argument in place"),
        (lambda h: TakesAFunction.apply(h, torch.relu), r"TakesAFunction is applied to an object .*"),
    ],
)
def test_tr_07_a_function_that_cannot_be_kept_is_refused(apply: Any, says: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return apply(self.inner(x))  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedModelError, match=rf"layers\.0: .*{says} \(.*test_tr_07_unknown_ops\.py:\d+\)"):
        trace(Stack(Layer), default_batch())


@torch.library.custom_op("autopar_tests::softmax", mutates_args=())
def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@_scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.factor = inputs[1]


_scaled.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_setup)


def test_tr_07_an_op_of_another_library_is_not_taken_for_atens_of_that_name() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(_scaled(self.a(x), 2.0))
            return y

    traced = prepare(trace(Stack(Layer), default_batch()))
    assert any(notice.startswith("autopar_tests.softmax (4 in the layers)") for notice in traced.notices)


def test_writing_into_a_given_tensor_is_refused() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.empty_like(x)
            torch.mul(x.detach(), 2, out=mask)
            y: Tensor = self.inner(x) * mask
            return y

    with pytest.raises(UnsupportedModelError, match=r"layers\.0: aten::mul writes into its argument out"):
        trace(Stack(Layer), default_batch())


def test_rules_for_ops_of_other_libraries_are_found() -> None:
    notices = prepare(captured("mixtral")).notices
    assert [n for n in notices if "grouped_mm" in n] == []  # experts are cut over tp
