"""pf-01, pf-05: gradients leave during the last backward, once a step, and overlap changes no bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed


class _Recorded(TorchDispatchMode):
    """Elements all-reduced, and how many collectives had left when each parameter's gradient arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.calls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allreduce_" in func._schema.name:
            sizes = [t.numel() for t in args[0] if t.numel() > 1]  # not losses and token counts
            self.calls += len(sizes)
            self.elements += sum(sizes)
        return func(*args, **(kwargs or {}))


def _reduced_elements() -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    traced = prepare(trace(model, batch))
    for degrees in (Degrees(dp=2, pp=2), Degrees(dp=4), Degrees(dp=2, cp=2)):
        seen = set()
        for micro_batch in (1, 2):
            pm = build(copy.deepcopy(model), traced, plans.megatron("tiny_gpt", degrees, micro_batch=micro_batch))
            pm.step(batch)
            with _Recorded() as recorded:
                pm.step(batch)
            seen.add(recorded.elements)
            tied = model.tokens.weight.numel() if degrees.pp > 1 else 0  # summed over its two stages as well
            assert recorded.elements == sum(p.numel() for p in pm.parameters()) + tied, degrees
        assert len(seen) == 1


def test_pf_05_bytes_do_not_depend_on_micro_batches() -> None:
    run_ranks(4, _reduced_elements, timeout_s=150)


def _overlapped() -> None:
    torch.manual_seed(0)
    model, batch = models.TinyGPT(layers=8).double(), models.default_batch()
    traced = prepare(trace(model, batch))
    for degrees in (Degrees(dp=2), Degrees(cp=2)):
        gradients = []
        for overlap in (True, False):
            plan = plans.megatron("tiny_gpt", degrees, micro_batch=2, layers=8)
            pm = build(copy.deepcopy(model), traced, plan, overlap=overlap, bucket_bytes=2**16)
            gone = _step_recorded(pm, batch)
            assert (gone > 1) is overlap, f"{gone} sums had left when the first block's backward ended"
            gradients.append([p.grad for p in pm.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def _step_recorded(pm: nn.Module, batch: Any) -> int:
    """All-reduces of gradients that had left when the first block got its last gradient."""
    gone: list[int] = []
    with _Recorded() as recorded:
        first = dict(pm.named_parameters())["blocks.0.norm1.weight"]
        handle = first.register_post_accumulate_grad_hook(lambda _: gone.append(recorded.calls))
        pm.step(batch)
        handle.remove()
    return gone[-1]


def test_pf_01_reductions_start_under_the_last_backward() -> None:
    run_ranks(2, _overlapped, timeout_s=150)
