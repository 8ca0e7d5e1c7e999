"""What a dry run says of a rank is what the rank does: collectives and peak memory of the engine on real processes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from autopar import passes
from autopar.build import build
from autopar.dryrun import dry_run_captured
from autopar.dryrun.recorder import Recorder
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed

LAYOUTS = [
    plans.megatron(model, degrees, **options)
    for model, degrees, options in [
        ("llama", Degrees(dp=4), {}),
        ("llama", Degrees(dp=2, tp=2), {"checkpoint": True}),
        ("llama", Degrees(tp=4), {"sequence_sharding": False, "micro_batch": 2}),
        ("llama", Degrees(dp=2, pp=2), {"checkpoint": True}),
        ("llama", Degrees(tp=2, pp=2), {"schedule": "gpipe"}),
        ("llama", Degrees(pp=4), {}),
        ("llama", Degrees(cp=2, pp=2), {"checkpoint": True}),
        ("llama", Degrees(cp=4), {}),
    ]
]


def _engine(layouts: list[Plan]) -> list[tuple[Counter[tuple[str, str, int]], int]]:
    """Per layout, what this rank issued and held at the peak in its third step."""
    torch.manual_seed(0)
    model, batch = models.llama4kv_tiny(), models.default_batch()
    traced = passes.prepare(trace(model, batch))
    return [_one_layout(copy.deepcopy(model), traced, plan, batch) for plan in layouts]


def _one_layout(model: Any, traced: Any, plan: Plan, batch: Any) -> tuple[Counter[tuple[str, str, int]], int]:
    pm = build(model, traced, plan)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    axes = {name: axis for axis, name in pm.world.group_names().items()}
    with Recorder() as recorder:
        for parameter in pm.parameters():
            recorder.claim(parameter, "parameters")
        for _ in range(2):  # of these ranks compare their batches
            pm.step(batch)
            optimizer.step()
            optimizer.zero_grad()
        recorder.issued.clear()
        recorder.peak_bytes = 0
        pm.step(batch)
    issued = [i for i in recorder.issued if i.kind != "receive"]
    return Counter((i.kind, axes[i.group], i.nbytes) for i in issued), recorder.peak_bytes


def test_collectives_and_memory_are_those_of_the_engine() -> None:
    real = run_ranks(4, _engine, LAYOUTS, timeout_s=200)
    traced = passes.prepare(trace(models.llama4kv_tiny(), models.default_batch()))
    off = []
    for i, plan in enumerate(LAYOUTS):
        for report in dry_run_captured(plan, traced, range(4) if plan.degrees.pp == 4 else (0, 3)).ranks:
            expected, peak = real[report.rank][i]
            said: Counter[tuple[str, str, int]] = Counter()
            for row in report.collectives:
                kind, nbytes = row.kind, row.nbytes
                if kind == "reduce_scatter":  # over gloo: an all-to-all of the parts, of which each rank has a whole
                    kind, nbytes = "all_to_all", nbytes * getattr(plan.degrees, row.axis)
                said[kind, row.axis, nbytes] += row.count
            assert said == expected, f"{plan.degrees}, rank {report.rank}"
            held = {row.category: row.measured for row in report.memory}
            seen = held["total"] - held["inputs"]
            if abs(seen - peak) > 0.05 * peak:
                off.append(f"{plan.degrees}, {plan.schedule}, rank {report.rank}: {seen} said, {peak} held")
    assert not off, "\n".join(off)
