"""What this machine does in a second: matrix products, attention, memory, kernels, collectives; all ranks at once.

Ranks share cores, memory and links, with each other and perhaps with other jobs, so each figure is taken while all of
them do the same, over windows that are long against a scheduler's slices (a single short call mostly falls between two
interruptions and looks faster than it is in a step), and in rounds over all figures, so that a change of load meets all
of them alike. It is the median over the rounds of the slowest rank's. What computes runs forward and backward, as in a
step: gradients read their operands across the grain, results lie in fresh memory. The same code runs on CPUs over gloo
and on GPUs over NCCL.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.links import COLLECTIVES
from autopar.runtime.collectives import all_gather_single, finished, issue_reduce_scatter

__all__ = ["Sample", "measure", "measurement_count", "send_partner"]

_ROUNDS = 3
_WINDOW_S = 0.06
_TINY_OPS = 50
_CHAIN_PASSES = 13
"""Tensors that silu(x) * y reads and writes op by op: 2 and 3 forward, 3 and 5 backward, as the search counts them."""


@dataclass(frozen=True)
class Sample:
    """One figure: `amount` of work in `seconds`.

    kind    "matmul", "attention" (amount: flops), "memory" (bytes read and written), "launch" (kernels), or a
            collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" (bytes of the whole tensor, of which
            a rank holds a part where it is cut), "send" (bytes of the message)
    dtype   of the operands, by the plan's name for it
    ranks   size of the group; 1 for what a rank does alone (all others doing the same)
    shape   the sizes, for the reader
    """

    kind: str
    dtype: str
    amount: float
    seconds: float
    ranks: int = 1
    shape: str = ""


@dataclass(frozen=True)
class _Job:
    kind: str
    dtype: str
    amount: float
    shape: str
    prepare: Callable[[], Callable[[], Any]]
    group: dist.ProcessGroup | None = None
    calls: int = 1  # of what is measured, in one run

    def sample(self, seconds: float) -> Sample:
        ranks = 1 if self.group is None else self.group.size()
        return Sample(self.kind, self.dtype, self.amount, seconds, ranks, self.shape)


_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def measurement_count(device: torch.device, group_sizes: Sequence[int]) -> int:
    """How often `measure` reports, for a progress bar: each figure once a round."""
    sizes = _sizes(device)
    compute = len(sizes.dtypes) * len(sizes.products) + 3
    return _ROUNDS * (compute + sum(len(COLLECTIVES) * len(sizes.messages) for n in group_sizes if n > 1))


def measure(
    device: torch.device, group_sizes: Sequence[int] = (), progress: Callable[[Sample], None] | None = None
) -> list[Sample]:
    """Samples of this device, and of collectives over aligned groups of consecutive ranks of each size.

    Collective if a process group exists: every rank measures at the same time and gets the same samples.
    """
    jobs = list(_jobs(device, group_sizes))
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(_ROUNDS):
        for job, taken in zip(jobs, times, strict=True):
            taken.append(_seconds(job, device))
            if progress is not None:
                progress(job.sample(taken[-1]))
    return [job.sample(statistics.median(taken)) for job, taken in zip(jobs, times, strict=True)]


@dataclass(frozen=True)
class _Sizes:
    dtypes: tuple[str, ...]
    products: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int, int]
    stream_elements: int
    messages: tuple[int, ...]


def _sizes(device: torch.device) -> _Sizes:
    """Small enough for a core to finish in seconds, large enough for a GPU to reach its rate."""
    if device.type == "cuda":
        products = ((2048, 4096, 4096), (8192, 4096, 4096), (8192, 8192, 8192))
        return _Sizes(("fp32", "bf16"), products, (4, 16, 4096, 128), 1 << 26, (1 << 16, 1 << 20, 1 << 24, 1 << 28))
    products = ((64, 256, 256), (256, 512, 512), (1024, 1024, 1024))
    return _Sizes(("fp64", "fp32"), products, (2, 4, 256, 32), 1 << 20, (1 << 10, 1 << 14, 1 << 18, 1 << 22))


def _jobs(device: torch.device, group_sizes: Sequence[int]) -> Iterator[_Job]:
    sizes = _sizes(device)
    for dtype in sizes.dtypes:
        for m, k, n in sizes.products:
            yield _Job("matmul", dtype, 6.0 * m * k * n, f"{m} x {k} x {n}", _product(m, k, n, _DTYPES[dtype], device))
    dtype = sizes.dtypes[-1]
    b, h, s, d = sizes.attention
    flops = (4.0 + 10.0) * b * h * s * s * d / 2  # two products forward, five backward; half of the score matrix
    shape = f"{b} x {h} heads, {s} tokens, width {d}"
    yield _Job("attention", dtype, flops, shape, _attention(sizes.attention, _DTYPES[dtype], device))
    elements = sizes.stream_elements
    text = f"silu(x) * y of {elements} elements, forward and backward"
    yield _Job("memory", "fp32", 4.0 * _CHAIN_PASSES * elements, text, _elementwise(elements, device))
    text = "8 elements negated and twice viewed, forward and backward"
    yield _Job("launch", "fp32", 2.0 * _TINY_OPS, text, _tiny_ops(device))
    for size in group_sizes:
        if size > 1:
            group = _group_of(size)
            for nbytes in sizes.messages:
                yield from _collectives(nbytes, group, device)


def _product(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        x, w = (_operand((rows, k), dtype, device) for rows in (m, n))
        gradient = torch.randn(m, n, dtype=dtype, device=device)
        return lambda: torch.autograd.grad(F.linear(x, w), (x, w), gradient)

    return prepare


def _attention(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    def prepare() -> Callable[[], Any]:
        q, k, v = (_operand(sizes, dtype, device) for _ in range(3))
        gradient = torch.randn(sizes, dtype=dtype, device=device)

        def run() -> object:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), gradient)

        return run

    return prepare


def _operand(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(sizes, dtype=dtype, device=device, requires_grad=True)


def _elementwise(elements: int, device: torch.device) -> Callable[[], Any]:
    """What stands between products: results in fresh memory, a function that takes longer than its bytes."""

    def prepare() -> Callable[[], Any]:
        x, y = (_operand((elements,), torch.float32, device) for _ in range(2))
        gradient = torch.ones(elements, device=device)
        return lambda: torch.autograd.grad(F.silu(x) * y, (x, y), gradient)

    return prepare


def _tiny_ops(device: torch.device) -> Callable[[], Any]:
    """Views launch nothing but take a host's time too; a captured layer has two of them for each kernel."""

    def prepare() -> Callable[[], Any]:
        x = torch.ones(2, 4, device=device, requires_grad=True)
        gradient = torch.ones(4, 2, device=device)

        def chain() -> None:
            y = x
            for _ in range(_TINY_OPS):
                y = y.neg().view(8).view(4, 2)
            torch.autograd.grad(y, x, gradient)

        return chain

    return prepare


def _group_of(size: int) -> dist.ProcessGroup:
    """This rank's group of `size` consecutive ranks. Collective over the world."""
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    mine: dist.ProcessGroup = groups[dist.get_rank() // size]
    return mine


def _collectives(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Iterator[_Job]:
    """About `nbytes` of the whole tensor (a send: of the message), in parts of equal size. An all-to-all cuts the part
    of a rank once more, a piece for each of the others. A reduce-scatter is what the runtime makes of it:
    over gloo an all-to-all, and a sum here."""
    n = group.size()
    even, twice_even = (max(1, nbytes // 4 // parts) * parts for parts in (n, n**2))

    def job(kind: str, elements: int, run: Callable[[Tensor, Tensor], Any], between: str = "", calls: int = 1) -> _Job:
        def prepare() -> Callable[[], Any]:
            whole, part = torch.ones(elements, device=device), torch.ones(elements // n, device=device)
            return lambda: run(whole, part)

        shape = f"{4 * elements} bytes {between or f'over {n}'}"
        return _Job(kind, "fp32", 4.0 * elements, shape, prepare, group, calls)

    yield job("all_reduce", even, lambda whole, part: dist.all_reduce(whole, group=group))
    yield job("all_gather", even, lambda whole, part: all_gather_single(whole, part, group=group))
    yield job("reduce_scatter", even, lambda whole, _: finished(issue_reduce_scatter(whole.view(n, -1), group)))
    yield job(
        "all_to_all", twice_even, lambda whole, part: dist.all_to_all_single(torch.empty_like(part), part, group=group)
    )
    between = f"from ranks to those {n // 2} above and back"
    yield job("send", even, lambda whole, part: _to_partner_and_back(whole, group), between, calls=2)


def send_partner(rank: int, ranks: int) -> int | None:
    """Whom a rank of a group exchanges messages with: half the group away, in another node if the group spans several
    whole ones. None for the last of an odd number."""
    half = ranks // 2
    if rank >= 2 * half:
        return None
    return rank + half if rank < half else rank - half


def _to_partner_and_back(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The lower ranks send, then wait for the answer of the upper ones."""
    here = group.rank()
    peer = send_partner(here, group.size())
    if peer is not None:
        turns = (dist.send, dist.recv) if here < peer else (dist.recv, dist.send)
        for turn in turns:
            turn(tensor, dist.get_process_group_ranks(group)[peer], group=group)


def _seconds(job: _Job, device: torch.device) -> float:
    """Mean of as many runs as fill the window; every rank makes the same number. It is found by doubling: the time of a
    few runs says too little on a busy machine."""
    run = job.prepare()
    run()
    runs, seconds = 1, _timed(run, 1, device, job)
    while seconds * runs * job.calls < _WINDOW_S / 2:
        runs *= 2
        seconds = _timed(run, runs, device, job)
    return seconds


def _timed(run: Callable[[], Any], runs: int, device: torch.device, job: _Job) -> float:
    _together(device)
    start = time.perf_counter()
    for _ in range(runs):
        run()
    _finish(device)
    return _slowest((time.perf_counter() - start) / (runs * job.calls), device)


def _slowest(seconds: float, device: torch.device) -> float:
    """Of all ranks."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _together(device: torch.device) -> None:
    _finish(device)
    if dist.is_initialized():
        dist.barrier()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
