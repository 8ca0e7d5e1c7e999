"""From a capture and a plan to the module that trains: the passes are run, the engine gets their graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from autopar import passes
from autopar.errors import PlanMismatchError, SpecError, UnsupportedModelError
from autopar.ir import TracedModel
from autopar.plan import Plan, match_path
from autopar.printing import format_graph
from autopar.runtime.calls import WholeGraph
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import join_torchrun
from autopar.runtime.programs import Program
from autopar.runtime.stage import set_training

__all__ = ["Captured", "build"]

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
