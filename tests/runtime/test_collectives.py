"""Every conversion, forward and backward, against the definition of the placements in one process (fp64)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.placement import CONVERSIONS, parse_placement
from autopar.runtime.collectives import bind, convert
from autopar.runtime.launch import run_ranks
from autopar.runtime.sharding import assemble, local_slice

SHAPE = (4, 24, 8)
SHARDS = ("S(0)", "S(1)", "S(2)", "S(1,left=3)")


def _texts(kind: str) -> tuple[str, ...]:
    return SHARDS if kind == "S" else (kind,)


PAIRS = [(src, dst) for a, b in CONVERSIONS for src in _texts(a) for dst in _texts(b)]


def _summand(name: str, rank: int, n: int, total: Tensor) -> Tensor:
    """Rank's summand: random on all but the last rank, which makes the sum right."""
    parts = [torch.randn(SHAPE, dtype=torch.float64, generator=_seed(f"{name}{r}")) for r in range(n - 1)]
    parts.append(total - sum(parts, torch.zeros_like(total)))
    return parts[rank]


def _seed(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(text.encode()))


def _held(text: str, what: str, whole: Tensor, rank: int, n: int) -> Tensor:
    """What `rank` holds of `whole` under a placement; `what` is "value" or "gradient"."""
    placement = parse_placement(text)
    partial = placement.kind == ("P" if what == "value" else "R|P")
    return _summand(text + what, rank, n, whole) if partial else local_slice(whole, placement, rank, n)


def _gathered(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def _convert_and_back(src: str, dst: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    value = torch.randn(SHAPE, dtype=torch.float64, generator=_seed("value"))
    gradient = torch.randn(SHAPE, dtype=torch.float64, generator=_seed("gradient"))
    x = _held(src, "value", value, rank, n).clone().requires_grad_()
    before = x.detach().clone()
    y = convert(x, src, dst, group=dist.group.WORLD.group_name)
    if parse_placement(dst).is_partial:  # only the sum over ranks is determined
        torch.testing.assert_close(sum(_gathered(y.detach())), value, rtol=0, atol=1e-13)
    else:
        torch.testing.assert_close(y.detach(), _held(dst, "value", value, rank, n), rtol=0, atol=1e-13)
    y.backward(_held(dst, "gradient", gradient, rank, n))
    assert x.grad is not None
    if parse_placement(src).kind == "R|P":  # only the sum over ranks is determined
        torch.testing.assert_close(sum(_gathered(x.grad)), gradient, rtol=0, atol=1e-13)
    else:
        torch.testing.assert_close(x.grad, _held(src, "gradient", gradient, rank, n), rtol=0, atol=1e-13)
    assert torch.equal(x.detach(), before), "the input was written to"


def _convert_every_pair() -> int:
    for src, dst in PAIRS:
        try:
            _convert_and_back(src, dst)
        except AssertionError as error:
            raise AssertionError(f"{src} -> {dst}: {error}") from error
    return len(PAIRS)


@pytest.mark.parametrize("n", [2, 4])
def test_every_conversion(n: int) -> None:
    assert run_ranks(n, _convert_every_pair, timeout_s=60) == [40] * n


def _convert_others() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    ids = torch.arange(32).view(4, 8)
    for whole in (ids, ids % 3 == 0, ids.to(torch.bfloat16), torch.complex(ids.float(), -ids.float())):
        part = convert(whole, "R", "S(1)", group=group)
        assert torch.equal(part, local_slice(whole, parse_placement("S(1)"), rank, n))
        assert torch.equal(convert(part, "S(1)", "R", group=group), whole)
        moved = convert(part, "S(1)", "S(0)", group=group)
        assert torch.equal(moved, local_slice(whole, parse_placement("S(0)"), rank, n))
    transposed = torch.arange(32.0).view(8, 4).T
    part = convert(transposed, "R", "S(0)", group=group)
    assert torch.equal(convert(part, "S(0)", "R", group=group), transposed)


def test_masks_ids_half_precision_and_transposed_tensors() -> None:
    run_ranks(2, _convert_others, timeout_s=60)


def _refusals() -> None:
    group = dist.group.WORLD.group_name
    with pytest.raises(ValueError, match="no conversion from S.0. to P"):
        convert(torch.ones(4), "S(0)", "P", group=group)
    with pytest.raises(ValueError, match="dim 0 of size 5 does not divide into 2 ranks"):
        convert(torch.ones(5), "R", "S(0)", group=group)
    with pytest.raises(ValueError, match="was the graph bound"):
        convert(torch.ones(4), "R", "S(0)", group="tp")


def test_what_cannot_be_converted_is_refused() -> None:
    run_ranks(2, _refusals, timeout_s=60)


def test_bind_reaches_nested_graphs() -> None:
    inner = fx.Graph()
    x = inner.placeholder("x")
    inner.output(inner.call_function(convert, (x, "P", "R"), {"group": "tp"}))
    outer = fx.Graph()
    outer.output(outer.call_module("inner", (outer.placeholder("x"),)))
    module = fx.GraphModule({"inner": fx.GraphModule({}, inner)}, outer)
    bind(module, {"tp": "17"})
    assert "group = '17'" in module.inner.code


@pytest.mark.parametrize(("make", "read", "owned"), [
    ("linear", "linear", (True, True)),
    ("linear", "add", (True, False)),
    ("shared linear", "linear", (False, True)),
    ("tanh", "linear", (False, True)),
])  # fmt: skip
def test_a_sum_is_taken_in_place_where_nobody_else_reads(make: str, read: str, owned: tuple[bool, bool]) -> None:
    run_ranks(2, _summed_in_place, make, read, owned, timeout_s=60)


def _summed_in_place(make: str, read: str, owned: tuple[bool, bool]) -> None:
    graph = fx.Graph()
    x, v, w = (graph.placeholder(name) for name in "xvw")
    made = graph.call_function(torch.ops.aten.linear.default, (x, v))
    if make == "tanh":  # keeps its output for backward
        made = graph.call_function(torch.tanh, (made,))
    moved = graph.call_function(convert, (made, "P", "R|P"), {"group": "tp"})
    reads = {"linear": torch.ops.aten.linear.default, "add": torch.add}[read]  # add hands both one gradient
    result = graph.call_function(reads, (moved, w))
    graph.output((result, made) if make == "shared linear" else (result,))
    module = fx.GraphModule({}, graph)
    bind(module, {"tp": dist.group.WORLD.group_name})
    assert moved.kwargs["owned"] == owned
    outcomes = []
    for in_place in (owned, (False, False)):
        moved.kwargs = {**moved.kwargs, "owned": in_place}
        module.recompile()
        tensors = [torch.randn(4, 4, dtype=torch.float64, generator=_seed(name)) for name in "xvw"]
        outputs = module(*(t.requires_grad_() for t in tensors))
        gradients = torch.autograd.grad([y.square().sum() for y in outputs], tensors)
        outcomes.append([y.detach() for y in outputs] + list(gradients))
    for a, b in zip(*outcomes, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("text", [*SHARDS, "R"])
def test_assemble_inverts_local_slice(text: str) -> None:
    whole, placement = torch.randn(SHAPE), parse_placement(text)
    assert torch.equal(assemble([local_slice(whole, placement, r, 4) for r in range(4)], placement), whole)


def test_a_strided_shard_takes_its_part_of_each_third() -> None:
    qkv = torch.tensor([10, 11, 20, 21, 30, 31])
    assert local_slice(qkv, parse_placement("S(0,left=3)"), 1, 2).tolist() == [11, 21, 31]
