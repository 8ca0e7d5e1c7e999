"""What a plan may say that this runtime does not execute yet: refused by name before anything is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from autopar.errors import PlanMismatchError, SpecError
from autopar.graph_walks import joined_apart, stage_of_segments
from autopar.ir import StageGraph, TracedModel
from autopar.mesh import AXES
from autopar.plan import Plan
from autopar.runtime.pipeline import check_micro_batches
from autopar.runtime.precision import compute_dtype

__all__ = ["check_axes", "model_precision", "refuse_unbuilt"]

_MIXED = {"fp32": ("bf16-mixed", "fp16")}  # what fp32 parameters may be masters of
_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def refuse_unbuilt(plan: Plan, traced: TracedModel, stages: Sequence[StageGraph]) -> None:
    """Raise SpecError or PlanMismatchError for the first thing in the plan that cannot be run."""
    if plan.zero and plan.schedule == "zero-bubble" and plan.degrees.pp > 1:
        raise SpecError(
            f"zero {plan.zero} with schedule zero-bubble: FSDP reduces before the split backward has weight gradients",
            where="zero",
            try_="zero 0, or schedule 1f1b or interleaved",
        )
    if plan.zero and plan.degrees.dp * plan.degrees.cp > 1:
        _check_sharded(plan, traced, stages)
    _check_schedule(plan)
    if plan.schedule == "zero-bubble" and plan.degrees.pp > 1:
        _check_split_backward(plan, traced, stages)
    own = model_precision(traced)
    if plan.precision not in (own, *_MIXED.get(own, ())):
        raise PlanMismatchError(
            f"the plan trains in {plan.precision}, the model's parameters are {own}",
            where="precision",
            try_=f"cast the model before parallelize, or plan with precision {own}",
        )
    _check_mixed(plan, traced)


def _check_sharded(plan: Plan, traced: TracedModel, stages: Sequence[StageGraph]) -> None:
    """What FSDP cannot shard together. Of all stages, so that all ranks refuse alike."""
    dtypes = {p.dtype for p in traced.parameters.values() if p.requires_grad or plan.zero == 3}
    if len(dtypes) > 1:
        raise SpecError(
            f"the sharded parameters have several dtypes: {', '.join(sorted(map(str, dtypes)))}",
            where="zero",
            try_="zero 0, or cast the model to one dtype",
        )
    pp = plan.degrees.pp
    for rank in range(pp):
        readers = Counter(name for stage in stages[rank::pp] for name in {s.name for s in stage.parameters.values()})
        shared = next((name for name, count in readers.items() if count > 1), None)
        if shared is not None:
            raise SpecError(
                f"{shared} is read by two stages of one rank, which FSDP cannot shard together",
                where="zero",
                try_="zero 0, or virtual_stages 1",
            )


def check_axes(axes: Collection[str]) -> tuple[str, ...]:
    """The axes, if they are mesh axes. Raises SpecError for another name."""
    for axis in axes:
        if axis not in AXES:
            raise SpecError(f"{axis!r} is no mesh axis", where="fp32_reduce", try_=f"some of {', '.join(AXES)}")
    return tuple(axes)


def _check_mixed(plan: Plan, traced: TracedModel) -> None:
    nodes = {str(n.target): n for n in traced.graph_module.graph.nodes if n.op == "get_attr"}
    for name, spec in traced.parameters.items():
        wanted = compute_dtype(plan, spec.dtype)
        if name in nodes and nodes[name].meta.get("dtype", wanted) != wanted:
            raise PlanMismatchError(
                f"the plan computes in {wanted}, the model was captured in {nodes[name].meta['dtype']}",
                where=name,
                try_="trace(..., parameter_dtype=...), as parallelize does",
            )
    if plan.precision != model_precision(traced) and plan.schedule == "zero-bubble" and plan.degrees.pp > 1:
        raise SpecError(
            f"{plan.precision} with schedule zero-bubble: the split backward would add up gradients in 16 bits",
            where="precision",
            try_="schedule 1f1b or interleaved",
        )


def _check_split_backward(plan: Plan, traced: TracedModel, stages: Sequence[StageGraph]) -> None:
    """Torch finds a stage's weight gradients from where they meet the path of its input: there must be such a path, and
    weights that meet one another before it, as those of a decoder's first layer do, would have theirs asked twice."""
    stage_of = stage_of_segments(traced.segments, plan)
    weights = [n for n in traced.graph_module.graph.nodes if n.op == "get_attr"]
    made = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    for stage in stages[1:]:
        placeholders = {n.name: n for n in stage.graph_module.graph.nodes if n.op == "placeholder"}
        if not any(placeholders[name].meta.get("grad", True) for name in stage.receives):
            raise SpecError(
                f"schedule zero-bubble: everything before stage {stage.index} is frozen, and the split backward would "
                "lose that stage's weight gradients",
                where="schedule",
                try_="schedule 1f1b or interleaved",
            )
        received = {n for n in made if n.meta["grad"] and stage_of[n.meta["segment"]] < stage.index}
        own = [n for n in made if stage_of[n.meta["segment"]] == stage.index]
        apart = joined_apart([*weights, *own], received)
        if apart is not None:
            raise SpecError(
                f"schedule zero-bubble: weights of stage {stage.index} meet at {apart.meta['key']} before what it "
                "receives, and the split backward cannot tell their gradients",
                where="schedule",
                try_="schedule 1f1b or interleaved",
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


def model_precision(model: TracedModel | nn.Module) -> str:
    """The dtype most parameters have, by the plan's name for it ("fp64", "fp32", "bf16", "fp16")."""
    if isinstance(model, TracedModel):
        numel = _by_dtype((p.dtype, p.numel) for p in model.parameters.values())
    else:
        numel = _by_dtype((p.dtype, p.numel()) for p in model.parameters())
    if not numel:
        raise SpecError("the model has no floating-point parameters", where="model")
    return _PRECISIONS[numel.most_common(1)[0][0]]


def _by_dtype(sizes: Iterable[tuple[torch.dtype, int]]) -> Counter[torch.dtype]:
    numel: Counter[torch.dtype] = Counter()
    for dtype, size in sizes:
        if dtype in _PRECISIONS:
            numel[dtype] += size
    return numel
