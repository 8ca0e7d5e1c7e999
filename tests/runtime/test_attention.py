"""Ring, all-gather and all-to-all attention against one process in fp64, forward and backward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.placement import REPLICATE, Shard
from autopar.runtime import attention
from autopar.runtime.attention import KINDS, context_attention, query_key_pairs
from autopar.runtime.collectives import run_collective
from autopar.runtime.launch import run_ranks
from autopar.runtime.sequence import to_zigzag, zigzag_part

HEADS, SEQ, DIM = 4, 16, 8


def _pieces(x: Tensor, rank: int, ranks: int, zigzag: bool) -> Tensor:
    if not zigzag:
        return x.chunk(ranks, 2)[rank]
    chunks = x.chunk(2 * ranks, 2)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], 2)


def _errors(kind: str, causal: bool, dtype: torch.dtype, groups: int = HEADS, width: int = DIM) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes, scale = ((HEADS, DIM), (groups, DIM), (groups, width)), 0.3 if width == DIM else None
    whole = [torch.randn(2, h, SEQ, d, dtype=dtype).requires_grad_() for h, d in sizes]
    grad = torch.randn(2, HEADS, SEQ, width, dtype=dtype)
    q, k, v = whole
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=groups != HEADS)
    gradients = torch.autograd.grad(wanted, whole, grad)
    mine = [_pieces(x.detach(), rank, ranks, causal).clone().requires_grad_() for x in whole]
    found = context_attention(*mine, is_causal=causal, scale=scale, kind=kind, group=dist.group.WORLD.group_name)
    shares = torch.autograd.grad(found, mine, _pieces(grad, rank, ranks, causal))
    pairs = [(found, wanted), *zip(shares, gradients, strict=True)]
    return [(a - _pieces(b, rank, ranks, causal)).abs().max().item() for a, b in pairs]


def _every_way() -> dict[str, list[float]]:
    cases = [(k, c, torch.float64) for k in KINDS for c in (False, True)]
    errors = {f"{kind} causal={causal}": _errors(kind, causal, dtype) for kind, causal, dtype in cases}
    for kind, width in ((kind, width) for kind in KINDS for width in (DIM - 3, DIM + 2)):
        errors[f"{kind} values of width {width}"] = _errors(kind, True, torch.float64, width=width)
    for kind in ("ring", "all-gather"):  # fewer key/value heads, which all-to-all may not be able to share out
        errors[f"{kind} grouped"] = _errors(kind, True, torch.float64, groups=1)
    return errors


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients_are_those_of_one_process(ranks: int) -> None:
    for result in run_ranks(ranks, _every_way):
        for way, errors in result.items():
            assert max(errors) < 1e-12, (way, errors)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_in_zigzag_order_keeps_nothing_of_the_others(ranks: int) -> None:
    x = torch.arange(1 * 2 * SEQ * 3.0).view(1, 2, SEQ, 3)
    for rank in range(ranks):
        part = zigzag_part(x, 2, rank, ranks)
        assert torch.equal(part, to_zigzag(x, 2, ranks).chunk(ranks, 2)[rank])
        assert part.untyped_storage().nbytes() == x.nbytes // ranks


def _kept_of_a_slice(zigzag: bool) -> tuple[int, int]:
    x = torch.randn(1, 8, 3)
    part = run_collective("slice", x, REPLICATE, Shard(1), dist.group.WORLD, zigzag)
    return part.nbytes, part.untyped_storage().nbytes()


@pytest.mark.distributed
def test_a_slice_keeps_nothing_of_the_whole() -> None:
    """A view of one sequence is contiguous, and would keep all of it for the backward."""
    for pairs in run_ranks(2, _both_slices):
        assert pairs == [(48, 48), (48, 48)]


def _both_slices() -> list[tuple[int, int]]:
    return [_kept_of_a_slice(False), _kept_of_a_slice(True)]


def _count_hops() -> tuple[int, int]:
    """Tensors of K and V size sent in forward, and in backward."""
    group = dist.group.WORLD.group_name
    mine = [torch.randn(1, HEADS, SEQ, DIM).requires_grad_() for _ in range(3)]
    sent: list[int] = []
    original = attention.Hop.__init__

    def counted(self: Any, tensor: Tensor, process_group: Any, overlap: bool = True) -> None:
        sent.append(tensor.numel())
        original(self, tensor, process_group, overlap)

    with mock.patch.object(attention.Hop, "__init__", counted):
        out = context_attention(*mine, is_causal=True, group=group)
        forward = len(sent)
        out.sum().backward()
    return forward, len(sent) - forward


@pytest.mark.distributed
def test_keys_and_values_are_sent_once_a_step() -> None:
    for forward, backward in run_ranks(4, _count_hops):
        assert forward == 3  # n - 1 hops
        assert backward == 3 + 4  # K and V again, and their gradients all the way home


def _uneven_heads() -> str:
    x = torch.randn(1, 3, SEQ, DIM)
    try:
        context_attention(x, x, x, is_causal=False, kind="all-to-all", group=dist.group.WORLD.group_name)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_all_to_all_refuses_heads_that_do_not_divide() -> None:
    for message in run_ranks(2, _uneven_heads):
        assert message.startswith("3 query heads do not divide over 2 ranks")


def test_cp_05_zigzag_balances_causal_work() -> None:
    assert query_key_pairs(32, 4, causal=True) == [132, 132, 132, 132]
    assert query_key_pairs(32, 4, causal=False) == [256, 256, 256, 256]
