"""What users call: `plan` searches, `parallelize` searches and rewrites. Re-exported by `autopar`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from autopar import passes
from autopar.cost_model.objectives import search_for
from autopar.cost_model.search import SearchResult
from autopar.cost_model.step_collectives import rank_collectives
from autopar.errors import AutoparError, PlanMismatchError, SpecError, UnsupportedModelError
from autopar.export import LossFn
from autopar.ir import TracedModel
from autopar.models import example_from_config
from autopar.plan import Plan, match_path
from autopar.printing import format_graph
from autopar.reports.text import render
from autopar.runtime.calls import WholeGraph
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import join_torchrun
from autopar.runtime.limits import model_precision
from autopar.runtime.programs import Program
from autopar.runtime.stage import set_training
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

__all__ = ["build", "capture", "find_plan", "parallelize", "plan", "search_captured"]


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


Captured: TypeAlias = "tuple[TracedModel, Callable[[], TracedModel] | None]"
"""A capture in training mode, and how to get one in evaluation mode."""


def build(
    model: nn.Module,
    traced: TracedModel,
    plan: Plan,
    *,
    seed: int = 0,
    evaluated: Callable[[], TracedModel] | None = None,
    again: Callable[[Mapping[str, Any]], Captured] | None = None,
    **options: Any,
) -> ParallelModule:
    """Rewrite a prepared model by a plan and put it on this process's device. Collective.

    A model that returns no loss may be called, not stepped, and not pipelined.
    seed: of dropout, and of the initial weights of a model that was built on the meta device.
    evaluated: captures the model in evaluation mode, which may run other code than training does; without it dropout is
    switched off and nothing else.
    again: captures the model for arguments that differ in what is no tensor; without it they are refused.
    """
    if traced.unknown_buffers:
        raise SpecError(
            f"values of {', '.join(traced.unknown_buffers)} are unknown: the model was built on the meta device",
            where="model",
            try_="build it on the CPU; for planning alone autopar.plan needs no values",
        )
    options.setdefault("device", join_torchrun())
    return ParallelModule(
        model,
        _program(traced, evaluated, plan, seed),
        plan,
        again=None if again is None else lambda arguments: _another_program(*again(arguments), plan, seed),
        seed=seed,
        **options,
    )


def _program(traced: TracedModel, evaluated: Callable[[], TracedModel] | None, plan: Plan, seed: int) -> Program:
    """What a plan makes of a capture."""
    if passes.draws_randomly(traced.graph_module.graph):
        traced = replace(traced, inputs=(*traced.inputs, passes.row_ids_spec(traced.batch)))
    called_only = traced.loss is None and plan.degrees.pp == 1  # no step to take: the user makes a loss of the outputs
    return Program(
        traced,
        passes.apply(traced, plan, seed=seed, outputs="all" if called_only else "loss"),
        None if called_only else passes.token_count(traced, plan),
        whole=partial(_whole, traced, plan, seed, evaluated) if plan.degrees.pp == 1 else None,
        evaluates_otherwise=None if evaluated is None else partial(_evaluates_otherwise, traced, evaluated),
    )


def _another_program(
    traced: TracedModel, evaluated: Callable[[], TracedModel] | None, plan: Plan, seed: int
) -> Program:
    """The same, where the plan was made for another capture of the same model: placements of single ops may name none
    of this one's, or others than were meant. Then they follow from the parameters'."""
    fitting = _of_other_graph(plan, traced)
    try:
        return _program(traced, evaluated, fitting, seed)
    except PlanMismatchError:
        return _program(traced, evaluated, replace(fitting, ops={}), seed)


def _of_other_graph(plan: Plan, traced: TracedModel) -> Plan:
    """`plan` without what it says of ops that this graph does not have."""
    keys = [n.meta["key"] for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    there = {k: v for k, v in plan.ops.items() if k in keys or any(match_path(k, key) for key in keys)}
    return replace(plan, ops=there, fingerprints={})  # both are of the other graph


def _whole(
    traced: TracedModel, plan: Plan, seed: int, evaluated: Callable[[], TracedModel] | None, training: bool
) -> WholeGraph:
    """The graph of all the user's outputs in one mode."""
    if not training and evaluated is not None:
        traced = evaluated()
        plan = _of_other_graph(plan, traced)
    stage = passes.apply(traced, plan, outputs="all", seed=seed)[0]
    counted = None
    if traced.loss is not None:
        with suppress(UnsupportedModelError):  # of a loss that stays whole: where it is cut, `apply` has refused it
            counted = passes.token_count(traced, plan)
    return WholeGraph(stage, traced, counted)


def _evaluates_otherwise(traced: TracedModel, evaluated: Callable[[], TracedModel]) -> bool:
    """Whether forward does more in evaluation mode than to leave out dropout."""
    quiet = passes.copy_graph(traced.graph_module)
    set_training(quiet, False)
    return format_graph(passes.canonicalize(quiet).graph) != format_graph(evaluated().graph_module.graph)


class _Report:
    """Renders the report of a plan when it is asked for."""

    def __init__(self, plan: Plan, result: SearchResult | None, cluster: ClusterSpec, traced: TracedModel) -> None:
        self._plan, self._result, self._cluster, self._notices = plan, result, cluster, traced.notices

    def __call__(self) -> str:
        return render(self._plan, self._result, cluster=self._cluster, notices=self._notices)


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


def _check_sequence(traced: TracedModel, seq_len: int | None) -> None:
    """The model's code may have branched on the length, or written it down: then other lengths are another program."""
    low, high = traced.seq_range
    if seq_len is not None and (seq_len < low or (high is not None and seq_len > high)):
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
