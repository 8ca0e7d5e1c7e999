"""What a plan may say that this runtime does not execute yet: refused by name before anything is built."""

from __future__ import annotations

from collections import Counter

import torch

from autopar.errors import PlanMismatchError, SpecError
from autopar.ir import TracedModel
from autopar.plan import Plan
from autopar.runtime.pipeline import check_micro_batches

__all__ = ["model_precision", "refuse_unbuilt"]

_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def refuse_unbuilt(plan: Plan, traced: TracedModel) -> None:
    """Raise SpecError or PlanMismatchError for the first thing in the plan that cannot be run."""
    if plan.zero and plan.schedule == "zero-bubble" and plan.degrees.pp > 1:
        raise SpecError(
            f"zero {plan.zero} with schedule zero-bubble: FSDP reduces before the split backward has weight gradients",
            where="zero",
            try_="zero 0, or schedule 1f1b or interleaved",
        )
    _check_schedule(plan)
    own = model_precision(traced)
    if plan.precision != own:
        raise PlanMismatchError(
            f"the plan trains in {plan.precision}, the model's parameters are {own}",
            where="precision",
            try_=f"cast the model before parallelize, or plan with precision {own}"
            + ("; bf16-mixed is not built yet" if plan.precision == "bf16-mixed" else ""),
        )


def _check_schedule(plan: Plan) -> None:
    pp, virtual = plan.degrees.pp, plan.virtual_stages
    if plan.schedule in ("gpipe", "1f1b") and virtual > 1:
        raise SpecError(
            f"schedule {plan.schedule} runs one stage a rank, not {virtual}",
            where="virtual_stages",
            try_="schedule interleaved or zero-bubble, or virtual_stages 1",
        )
    if pp == 1 and virtual > 1:
        raise SpecError(f"{virtual} virtual stages without a pipeline", where="virtual_stages", try_="pp of 2 or more")
    if pp > 1 and plan.schedule == "interleaved" and virtual == 1:
        raise SpecError(
            "schedule interleaved needs several stages a rank", where="virtual_stages", try_="virtual_stages 2, or 1f1b"
        )
    if pp > 1:
        check_micro_batches(plan.schedule, pp, plan.micro_batches)


def model_precision(traced: TracedModel) -> str:
    """The dtype most parameters have, by the plan's name for it ("fp64", "fp32", "bf16", "fp16")."""
    numel: Counter[torch.dtype] = Counter()
    for p in traced.parameters.values():
        if p.dtype in _PRECISIONS:
            numel[p.dtype] += p.numel
    if not numel:
        raise SpecError("the model has no floating-point parameters", where="model")
    return _PRECISIONS[numel.most_common(1)[0][0]]
