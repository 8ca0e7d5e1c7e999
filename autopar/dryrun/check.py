"""Run ranks of a plan without a cluster and hold what they do against what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from autopar import passes
from autopar.cost_model.memory import COMPUTE_DTYPES
from autopar.cost_model.step_collectives import rank_collectives
from autopar.dryrun.rank import MeasuredRank, measure_rank
from autopar.dryrun.result import CollectiveRow, DryRun, MemoryRow, RankReport
from autopar.errors import SpecError
from autopar.ir import TracedModel
from autopar.models import ModelSource
from autopar.plan import Plan
from autopar.runtime.precision import in_dtype
from autopar.trace import trace

__all__ = ["dry_run", "dry_run_captured"]


def dry_run(plan: Plan, source: ModelSource, ranks: Sequence[int] | None = None, *, optimizer: str = "adamw") -> DryRun:
    """Build and run `ranks` of `plan` (default: the first rank of every stage), one after the other, in this process.

    optimizer: "adamw", "adam" or "sgd"; its state is part of the memory. Raises SpecError for a rank outside the mesh,
    PlanMismatchError if the plan does not fit the model or cannot be executed.
    """
    _check_ranks(plan, ranks or ())
    traced, plan, notices = _capture(plan, source)
    result = dry_run_captured(plan, traced, ranks, optimizer=optimizer)
    return replace(result, notices=(*traced.notices, *notices))


def dry_run_captured(
    plan: Plan, traced: TracedModel, ranks: Sequence[int] | None = None, *, optimizer: str = "adamw"
) -> DryRun:
    """`dry_run` of a model that is captured and prepared already, in the dtype it shall run in."""
    if ranks is None:
        ranks = [plan.degrees.rank(pp=place) for place in range(plan.degrees.pp)]
    _check_ranks(plan, ranks)
    stages = passes.apply(traced, plan)
    summed = passes.summed(traced, plan)
    measured = [measure_rank(traced, plan, stages, rank, optimizer) for rank in ranks]
    reports = [_report(rank, plan, summed) for rank in measured]
    return DryRun(plan, tuple(reports), traced.notices, _broken_boundaries(measured))


def _check_ranks(plan: Plan, ranks: Sequence[int]) -> None:
    size = plan.degrees.world_size
    for rank in ranks:
        if not 0 <= rank < size:
            raise SpecError(f"rank {rank} is outside the plan's {size} ranks", where="rank", try_=f"0 to {size - 1}")


def _capture(plan: Plan, source: ModelSource) -> tuple[TracedModel, Plan, list[str]]:
    """The model in the dtype the plan computes in. The plan's fingerprint is of the model as it was planned with."""
    model = source.build(device="meta")
    mixed = plan.precision in ("bf16-mixed",)
    compute = COMPUTE_DTYPES[plan.precision]
    dtype = torch.float32 if mixed else compute
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    notices: list[str] = []
    if own != {dtype}:
        model = model._apply(partial(in_dtype, dtype=dtype))
        if plan.fingerprints.get("model"):
            plan = plan.replace(fingerprints={k: v for k, v in plan.fingerprints.items() if k != "model"})
            notices.append(
                f"the plan's model fingerprint was not compared: the model was captured in {_name(dtype)}, which the "
                "plan trains"
            )
    traced = passes.prepare(trace(model, source.example(), parameter_dtype=compute if mixed else None))
    return traced, plan, notices


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _report(measured: MeasuredRank, plan: Plan, summed: TracedModel) -> RankReport:
    predicted = rank_collectives(summed, plan, measured.stages)
    keys = sorted({*predicted, *measured.collectives})
    rows = [CollectiveRow(*key, measured.collectives.get(key, 0), predicted.get(key, 0)) for key in keys]
    return RankReport(
        rank=measured.rank,
        stage=measured.stages[0],
        parameters=measured.parameters,
        micro_batches=plan.micro_batches,
        micro_batches_run=measured.micro_batches_run,
        memory=tuple(_memory(measured, plan)),
        collectives=tuple(rows),
    )


def _memory(measured: MeasuredRank, plan: Plan) -> list[MemoryRow]:
    """Categories at the peak, and their sum. What no tensor holds (reserved) cannot be measured and is left out."""
    stages = plan.prediction.get("peak_memory_bytes")
    predicted = dict(stages[measured.stages[0]]) if stages else None
    merged = {"activations": ("activations", "logits")}
    rows = []
    for category in ("parameters", "gradients", "optimizer", "activations", "communication", "inputs"):
        expected = None
        if predicted is not None and category != "inputs":
            expected = sum(predicted.get(name, 0) for name in merged.get(category, (category,)))
        rows.append(MemoryRow(category, measured.peak.get(category, 0), expected))
    total = None if predicted is None else predicted["total"] - predicted.get("reserved", 0)
    return [*rows, MemoryRow("total", sum(measured.peak.values()), total)]


def _broken_boundaries(measured: Sequence[MeasuredRank]) -> tuple[str, ...]:
    """Neighbouring stages that do not agree on what crosses, where both were run."""
    sends = {stage: shapes for m in measured for stage, shapes in m.sends.items()}
    receives = {stage: shapes for m in measured for stage, shapes in m.receives.items()}
    return tuple(
        f"stage {s} sends {shapes}, stage {s + 1} receives {receives[s + 1]}"
        for s, shapes in sorted(sends.items())
        if s + 1 in receives and shapes != receives[s + 1]
    )
