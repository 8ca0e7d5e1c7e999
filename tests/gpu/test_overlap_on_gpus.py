"""On a box with two GPUs: overlaps keep the gradients, waits are measured. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.sharding import local_part
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.gpu


def _rank(rank: int, ranks: int, store: str, check: Any) -> None:
    torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
    )  # fmt: skip
    try:
        check()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _on_gpus(ranks: int, check: Any) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices, {torch.cuda.device_count()} are here")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(ranks, os.path.join(folder, "store"), check), nprocs=ranks)


def _gradients(plan: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    model, batch = models.llama4kv_tiny(dtype), models.default_batch()
    pm = build(copy.deepcopy(model), prepare(trace(model, batch)), plan)
    for _ in range(2):  # the second step reuses memory the first one freed
        pm.zero_grad()
        pm.step(batch)
    return [local_part(p.grad).clone() for p in pm.parameters() if p.grad is not None]


def _overlaps() -> None:
    cases = [
        (Degrees(tp=2), 0, ("tp_linear",), True),
        (Degrees(tp=2), 0, ("tp_ring",), False),
        (Degrees(cp=2), 0, ("cp_ring",), True),
        (Degrees(dp=2), 3, ("zero3_gather",), True),
        (Degrees(dp=2), 0, ("dp_reduce",), True),
        (Degrees(pp=2), 0, ("pp_send",), True),
    ]
    for degrees, zero, overlap, exact in cases:
        plan = plans.megatron("llama", degrees, micro_batch=2, precision="fp32").replace(zero=zero, overlap=())
        plain = _gradients(plan, torch.float32)
        for a, b in zip(_gradients(plan.replace(overlap=overlap), torch.float32), plain, strict=True):
            tolerance = 0.0 if exact else 1e-5
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=f"{overlap} {degrees}")


def test_overlaps_keep_the_gradients() -> None:
    _on_gpus(2, _overlaps)


def _monitored() -> None:
    model, batch = models.llama4kv_tiny(torch.float32), models.default_batch()
    plan = plans.megatron("llama", Degrees(tp=2), micro_batch=2, precision="fp32")
    pm = build(copy.deepcopy(model), prepare(trace(model, batch)), plan)
    with pm.monitor(every=2) as monitor:
        for _ in range(4):
            pm.step(batch)
    (first, second) = monitor.records
    for record in (first, second):
        assert all(size > 0 for size in record.memory)
        assert all(parts["tp"] > 0 for parts in record.ranks)
    with pm.trace() as traced:
        pm.step(batch)
    assert traced.summary.communication_s > 0


def test_parts_of_a_step_are_measured_by_events() -> None:
    _on_gpus(2, _monitored)
