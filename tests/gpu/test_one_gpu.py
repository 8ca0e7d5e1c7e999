"""What one GPU can show: side streams and memory lifetimes, NCCL on a group of one, kernels, a training step.

`pytest -m gpu tests/gpu`: minutes.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.attention_block import block_backward, block_forward
from autopar.runtime.collectives import convert, finished, issue_reduce_scatter
from autopar.runtime.overlapped_linear import column_linears
from autopar.runtime.streams import Pending
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """NCCL, this process alone: its kernels run on streams of their own as ever."""
    torch.cuda.set_device(CUDA)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        try:
            assert dist.group.WORLD is not None
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


def test_what_the_side_stream_reads_is_kept_until_it_is_done() -> None:
    """The allocator must not give its memory to the main stream meanwhile."""
    for _ in range(20):
        x = torch.full((1 << 22,), 2.0, device=CUDA)

        def issue(x: Tensor = x) -> tuple[None, Any]:
            torch.cuda._sleep(1_000_000)
            return None, lambda: x * 3.0

        pending = Pending(issue, (x,), None)  # type: ignore[arg-type]
        del x, issue
        scratch = torch.zeros(1 << 22, device=CUDA)  # would take the freed memory
        assert torch.equal(pending.wait(), torch.full_like(scratch, 6.0))


def test_a_result_of_the_side_stream_is_kept_until_it_is_read() -> None:
    """Freed on the main stream while a kernel there still reads it, and wanted on the side stream."""
    for _ in range(20):
        x = torch.full((1 << 22,), 2.0, device=CUDA)
        result = Pending(lambda x=x: (None, lambda: x * 3.0), (x,), None).wait()  # type: ignore[misc,arg-type]
        torch.cuda._sleep(1_000_000)
        read = result + 1.0
        del result
        later = Pending(lambda x=x: (None, lambda: x * 0.0), (x,), None)  # type: ignore[misc,arg-type]
        assert torch.equal(read, torch.full_like(x, 7.0))
        later.wait()


def test_the_side_stream_waits_for_what_it_reads() -> None:
    x = torch.zeros(1 << 22, device=CUDA)
    torch.cuda._sleep(10_000_000)
    x.fill_(5.0)
    assert torch.equal(Pending(lambda: (None, lambda: x + 1.0), (x,), None).wait(), torch.full_like(x, 6.0))  # type: ignore[arg-type]


def test_overlapped_linears_give_the_bits_of_the_plain_ones(group: dist.ProcessGroup) -> None:
    """In a sum over one rank nothing is added, but the streams, the events and the sum in place are those of many."""
    name = group.group_name

    def gradients(overlapped: bool) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(4, 512, 1024, device=CUDA, requires_grad=True)
        weights = [torch.randn(size, 1024, device=CUDA, requires_grad=True) for size in (1024, 256, 256)]
        if overlapped:
            outputs = column_linears(x.tanh(), weights, [None] * 3, src="R", dst="R|P", group=name)
        else:
            whole = convert(x.tanh(), "R", "R|P", group=name)
            outputs = tuple(F.linear(whole, w) for w in weights)
        sum(y.square().sum() for y in outputs).backward()
        return [t.grad for t in (x, *weights) if t.grad is not None]

    for _ in range(10):  # memory of one round is used again in the next
        for a, b in zip(gradients(True), gradients(False), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kinds", [("P", "R"), ("R", "R|P"), ("P", "S(1)"), ("S(1)", "R|P"), ("S(1)", "S(0)")])
def test_conversions_over_nccl(group: dist.ProcessGroup, kinds: tuple[str, str]) -> None:
    x = torch.randn(8, 64, 32, device=CUDA, requires_grad=True)
    y = convert(x, *kinds, group=group.group_name)
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    assert torch.equal(y, x)
    assert torch.equal(gradient, torch.full_like(x, 3.0))
    parts = x.detach().unsqueeze(0)
    assert torch.equal(finished(issue_reduce_scatter(parts, group)), parts[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 20, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_of_attention_is_that_of_torch(dtype: torch.dtype, width: int, causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 128, width, device=CUDA, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse = block_forward(q, k, v, causal, None)
        gradients = block_backward(grad, q, k, v, out.contiguous(), lse, causal, None)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip((out, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_step_is_that_of_a_cpu(checkpoint: bool, tmp_path: Path) -> None:
    """fp32, dropout off; with monitor and trace."""
    losses, gradients = [], []
    for device in (torch.device("cpu"), CUDA):
        model, batch = models.llama4kv_tiny(torch.float32), models.default_batch()
        plan = plans.megatron("llama", Degrees(), micro_batch=2, precision="fp32", checkpoint=checkpoint)
        pm = build(copy.deepcopy(model), prepare(trace(model, batch)), plan, device=device)
        with pm.monitor(every=1) as monitor:
            pm.zero_grad()
            losses.append(float(pm.step(batch)))
        assert (monitor.records[0].memory != []) == (device == CUDA)
        gradients.append([p.grad.cpu() for p in pm.parameters() if p.grad is not None])
        pm.zero_grad()
        with pm.trace(tmp_path / "trace.json") as traced:
            pm.step(batch)
        assert traced.summary.step_s > 0
        assert traced.summary.communication_s == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
