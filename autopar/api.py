"""What users call: `plan` searches, `parallelize` searches and rewrites. Re-exported by `autopar`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar import passes
from autopar.build import Captured, build
from autopar.checks import shown
from autopar.cost_model.model_checks import check_model
from autopar.cost_model.objectives import search_for
from autopar.cost_model.search_result import SearchResult
from autopar.cost_model.step_collectives import rank_collectives
from autopar.errors import AutoparError, SpecError
from autopar.export import LossFn
from autopar.ir import TracedModel
from autopar.models import example_from_config
from autopar.plan import Plan
from autopar.reports.text import render
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import join_torchrun
from autopar.runtime.limits import model_precision
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

__all__ = ["capture", "find_plan", "parallelize", "plan", "search_captured"]


def plan(
    model: nn.Module,
    cluster: ClusterSpec,
    train: TrainSpec | None = None,
    *,
    example: Any = None,
    loss_fn: LossFn | None = None,
    pins: Pins | None = None,
    search: SearchSpec | None = None,
) -> Plan:
    """The best plan for training `model` on `cluster`: the search alone.

    Needs no GPU, no process group and no weights; a model on the meta device will do. Arguments as in `parallelize`.
    """
    return find_plan(model, cluster, train, example=example, loss_fn=loss_fn, pins=pins, search=search).plan


def find_plan(
    model: nn.Module,
    cluster: ClusterSpec,
    train: TrainSpec | None = None,
    *,
    example: Any = None,
    loss_fn: LossFn | None = None,
    pins: Pins | None = None,
    search: SearchSpec | None = None,
) -> SearchResult:
    """`plan` with all the search knows: alternatives, statistics (`capture_s` and `search_s` exclude imports) and
    notices, those of the capture included."""
    _check_types(model, cluster, train, pins, search)
    if pins is not None:
        pins.check(cluster, train or TrainSpec())
    search = search or SearchSpec()
    start_s, deadline_s = time.perf_counter(), search.deadline_s  # the time limit is one for capture and search
    traced = capture(model, cluster, train, example=example, loss_fn=loss_fn)
    statistics = {"capture_s": time.perf_counter() - start_s}
    result = search_captured(traced, cluster, train, pins, search.share_of(deadline_s, 1))
    notices = (*traced.notices, *result.notices)
    return replace(result, statistics={**result.statistics, **statistics}, notices=notices)


def capture(
    model: nn.Module, cluster: ClusterSpec, train: TrainSpec | None = None, *, example: Any = None,
    loss_fn: LossFn | None = None,
) -> TracedModel:  # fmt: skip
    """`model` as `search_captured` takes it, as often as needed; of `cluster` only the kind of device counts."""
    precision = _with_precision(train, model, cluster).precision
    return _capture(model, _example(model, example, train), loss_fn, precision)


def parallelize(
    model: nn.Module,
    cluster: ClusterSpec,
    train: TrainSpec | None = None,
    *,
    example: Any = None,
    loss_fn: LossFn | None = None,
    pins: Pins | None = None,
    search: SearchSpec | None = None,
    plan: Plan | str | Path | None = None,
    **options: Any,
) -> ParallelModule:
    """`model` as a module that trains over the processes of this torchrun job, or alone in one process.

    model     any module with its weights; it is only read, except alone on one device, where its parameters are trained
    cluster   the devices and links to plan for
    train     batch, sequence and precision; what is left out is chosen and reported
    example   one batch, for models whose inputs cannot be derived (Hugging Face configs can): see `autopar.trace.trace`
    loss_fn   `loss_fn(outputs, batch)`, if the model returns no loss itself
    pins      choices to keep fixed
    search    objective, memory to spare, solver, time limit
    plan      a plan, or the path of one: nothing is searched
    options   seed (of dropout and of the weights of a meta-built model); of ParallelModule: bucket_bytes, overlap,
              fp32_reduce, non_finite
    Collective. Rank 0 searches, the others take its plan. Raises AutoparError on every rank.
    """
    _check_types(model, cluster, train, pins, search)
    device = join_torchrun()
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    train = _with_precision(train, model, cluster)
    precision = train.precision if plan is None else plan.precision
    traced = _capture(model, _example(model, example, train), loss_fn, precision)
    result: SearchResult | None = None
    if plan is None:
        plan, result = _plan_on_rank_zero(traced, cluster, train, pins, search)
    report = _Report(plan, result, cluster, traced)

    def captured(arguments: Mapping[str, Any]) -> Captured:
        return _capture(model, arguments, loss_fn, precision), evaluation(arguments)

    def evaluation(batch: Any) -> Callable[[], TracedModel]:
        return cache(partial(_capture, model, batch, loss_fn, precision, training=False))

    evaluated = evaluation(_example(model, example, train))
    pm = build(model, traced, plan, device=device, report=report, evaluated=evaluated, again=captured, **options)
    return pm.train(model.training)


class _Report:
    """Renders the report of a plan when it is asked for."""

    def __init__(self, plan: Plan, result: SearchResult | None, cluster: ClusterSpec, traced: TracedModel) -> None:
        self._plan, self._result, self._cluster, self._notices = plan, result, cluster, traced.notices

    def __call__(self) -> str:
        return render(self._plan, self._result, cluster=self._cluster, notices=self._notices)


def _check_types(model: object, cluster: object, train: object, pins: object, search: object) -> None:
    """Raises SpecError for the text or dict that stands where a specification belongs."""
    wanted: tuple[tuple[str, object, type, str], ...] = (
        ("model", model, nn.Module, "the module itself; one on the meta device will do"),
        ("cluster", cluster, ClusterSpec, 'ClusterSpec.parse("dgx-h100:2")'),
        ("train", train, TrainSpec, "TrainSpec(global_batch=512, seq_len=4096)"),
        ("pins", pins, Pins, 'Pins(tp=2), or Pins.parse(["tp=2"])'),
        ("search", search, SearchSpec, 'SearchSpec(objective="memory")'),
    )
    for name, value, kind, example in wanted:
        optional = name not in ("model", "cluster")
        if not (isinstance(value, kind) or (optional and value is None)):
            raise SpecError(f"must be of type {kind.__name__}, not {shown(value)}", where=name, try_=example)


def _with_precision(train: TrainSpec | None, model: nn.Module, cluster: ClusterSpec) -> TrainSpec:
    """The precision made explicit: mixed for an fp32 model on accelerators, else what the parameters are in."""
    train = train or TrainSpec()
    if train.precision is not None:
        return train
    own = model_precision(model)
    return replace(train, precision="bf16-mixed" if own == "fp32" and cluster.device.kind != "cpu" else own)


def _capture(
    model: nn.Module, example: Any, loss_fn: LossFn | None, precision: str | None, *, training: bool = True
) -> TracedModel:
    """The prepared graph for one mode. Modules that the user froze in evaluation mode inside a model that trains stay
    so; one that is in evaluation mode as a whole is switched as `train()` would."""
    as_it_is = training and model.training
    dtype = {"bf16-mixed": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    return passes.prepare(
        trace(model, example, loss_fn=loss_fn, parameter_dtype=dtype, training=None if as_it_is else training)
    )


def _example(model: nn.Module, example: Any, train: TrainSpec | None) -> Any:
    if example is not None:
        return example
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise SpecError(
            "the inputs of this model cannot be derived", where="example", try_="pass example=, one batch of its inputs"
        )
    return example_from_config(config, seq=None if train is None else train.seq_len)


def search_captured(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec | None = None, pins: Pins | None = None,
    spec: SearchSpec | None = None,
) -> SearchResult:  # fmt: skip
    """The search of `find_plan` for a model that is captured."""
    train = train or TrainSpec()
    if train.seq_len is None:
        train = replace(train, seq_len=_longest_sequence(traced))
    assert train.seq_len is not None
    check_model(traced, train.seq_len)  # a model without a loss or layers is told so, whatever its sequences
    _check_sequence(traced, train.seq_len)
    result = search_for(traced, cluster, train, pins, spec)
    return replace(result, plan=_with_collectives(traced, result.plan))


def _with_collectives(traced: TracedModel, plan: Plan) -> Plan:
    """The plan with what a rank of its slowest stage sends in a step, as a dry run counts it."""
    d, first = plan.degrees, plan.prediction["slowest_stage"]
    if d.world_size == 1 or traced.loss is None:
        return plan
    stages = range(first, len(plan.stages), d.pp)
    found = rank_collectives(passes.summed(traced, plan), plan, stages)
    rows = [{"purpose": p, "kind": k, "axis": a, "bytes": b, "count": n} for (p, k, a, b), n in sorted(found.items())]
    return plan.replace(prediction={**plan.prediction, "collectives": rows})


def _check_sequence(traced: TracedModel, seq_len: int) -> None:
    """The model's code may have branched on the length, or written it down: then other lengths are another program."""
    low, high = traced.seq_range
    if seq_len < low or (high is not None and seq_len > high):
        valid = f"sequences of {low} tokens only" if low == high else f"sequences of {low} to {high or 'any'} tokens"
        raise SpecError(
            f"the model was captured for {valid}, seq_len is {seq_len}",
            where="train",
            try_="an example of that length; or derive sizes from the inputs (x.shape[1]) in forward",
        )


def _longest_sequence(traced: TracedModel) -> int:
    longest = traced.seq_range[1]
    if longest is None:
        raise SpecError("seq_len is not stated and the model sets no maximum", where="train", try_="seq_len=2048")
    return longest


def _plan_on_rank_zero(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins | None, spec: SearchSpec | None
) -> tuple[Plan, SearchResult | None]:
    """Rank 0's plan on every rank, and its error too: a rank that goes on alone would hang."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        result = search_captured(traced, cluster, train, pins, spec)
        return result.plan, result
    answer: list[Any] = [None]
    found: SearchResult | None = None
    if dist.get_rank() == 0:
        try:
            found = search_captured(traced, cluster, train, pins, spec)
            answer = [found.plan.dumps()]
        except AutoparError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], AutoparError):
        raise answer[0]
    return Plan.loads(answer[0]), found
