"""The reducer on parameters of its own, without a model: sums, memory, gradients that share memory or have gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime.launch import run_ranks
from autopar.runtime.reducer import GradientReducer

SIZES = (6, 10, 4, 12, 8, 64)
BUCKET_BYTES = 64


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in SIZES]


def _backward(parameters: list[nn.Parameter], factor: float) -> None:
    sum((p * (factor * (i + 1))).sum() for i, p in enumerate(parameters)).backward()  # type: ignore[union-attr]


def _reducer(parameters: list[nn.Parameter], **options: Any) -> GradientReducer:
    group = dist.group.WORLD
    return GradientReducer(dict.fromkeys(parameters, group), bucket_bytes=BUCKET_BYTES, **options)


def _storages(parameters: list[nn.Parameter]) -> dict[int, int]:
    """Bytes of the memory of all gradients, by address."""
    held = [p.grad.untyped_storage() for p in parameters if p.grad is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in held}


class _Travels:
    """Stands in for dist.all_reduce: where each tensor lies, and how many are not waited for."""

    def __init__(self) -> None:
        self.all_reduce = dist.all_reduce
        self.addresses: list[int] = []
        self.under_way = self.most = 0

    def __call__(self, tensor: torch.Tensor, **options: Any) -> _Travels:
        self.addresses.append(tensor.untyped_storage().data_ptr())
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.all_reduce(tensor, **options).wait()  # type: ignore[union-attr]
        return self

    def wait(self) -> None:
        self.under_way -= 1


def _sums_take_no_memory() -> None:
    for wide in (False, True):
        parameters = _parameters(torch.bfloat16 if wide else torch.float32)
        reducer = _reducer(parameters, wide=wide)
        for step in (1, 2):  # nobody drops the gradients between: they add up
            dist.all_reduce = travels = _Travels()  # type: ignore[assignment]
            reducer.begin(2)
            for part in (1, 2):
                _backward(parameters, step * part * (1 + dist.get_rank()))
            during = _storages(parameters)
            reducer.finish()
            dist.all_reduce = travels.all_reduce
            for i, p in enumerate(parameters):
                assert torch.equal(p.grad, torch.full_like(p, 9.0 * (i + 1) * (1, 3)[step - 1])), (wide, i)  # type: ignore[arg-type]
            assert sum(during.values()) == sum(p.numel() * p.element_size() for p in parameters)
            assert len(during) == len(travels.addresses) < len(parameters)
            assert (set(travels.addresses) == set(during)) is not wide
            assert (travels.most == 2) is wide


def _alone_is_not_copied_and_shared_is() -> None:
    group = dist.group.WORLD
    alone, one, other = (nn.Parameter(torch.zeros(8, 8)) for _ in range(3))
    reducer = GradientReducer(dict.fromkeys((alone, one, other), group), bucket_bytes=1)
    own: list[int] = []
    alone.register_post_accumulate_grad_hook(lambda p: own.append(p.grad.data_ptr()))  # type: ignore[union-attr]
    reducer.begin(1)
    sums = (one.view(-1) + other.view(-1)) * torch.ones(64)
    (sums.sum() * (1 + dist.get_rank()) + (alone * alone.new_ones(8, 8)).sum()).backward()
    reducer.finish()
    assert alone.grad is not None
    assert own == [alone.grad.data_ptr()]
    for p, expected in ((alone, 2.0), (one, 3.0), (other, 3.0)):
        assert torch.equal(p.grad, torch.full((8, 8), expected))  # type: ignore[arg-type]


def _strides_stay_and_late_ones_come() -> None:
    turned = nn.Parameter(torch.zeros(4, 3).t())
    other, gated = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(5))
    reducer = _reducer([other, turned, gated])
    for step in range(3):
        turned.grad = other.grad = gated.grad = None
        dist.all_reduce = travels = _Travels()  # type: ignore[assignment]
        reducer.begin(2)
        for _ in range(2):
            # Silent in the first step, so that its bucket is not waited for in the second; its backward is the last.
            loss = gated.sum() if step else torch.zeros(())
            (loss + other.sum() + (turned * torch.arange(12.0).view(3, 4)).sum()).backward()
        reducer.finish()
        dist.all_reduce = travels.all_reduce
        assert turned.grad is not None
        assert turned.grad.stride() == turned.stride()
        assert torch.equal(turned.grad, 4 * torch.arange(12.0).view(3, 4))
        expected = torch.full((5,), 4.0)
        assert (gated.grad is None) if step == 0 else torch.equal(gated.grad, expected)  # type: ignore[arg-type]


def _all() -> None:
    _sums_take_no_memory()
    _alone_is_not_copied_and_shared_is()
    _strides_stay_and_late_ones_come()


@pytest.mark.distributed
def test_gradients_are_summed_where_they_are() -> None:
    run_ranks(2, _all, timeout_s=120)
