"""The passes in order: a traced model and a plan in, the stages that run out.

prepare (canonicalize, heads_apart, fold_masks)   once, before the search
sum_loss > context_parallel > shard_parameters > insert_collectives > localize_shapes > native_gqa >
overlap_collectives > seed_dropout > outline_blocks > checkpoint_blocks > split_stages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from autopar.errors import PlanMismatchError, nearest
from autopar.ir import StageGraph, TracedModel
from autopar.passes.buffer_updates import check_updates
from autopar.passes.checkpoint_blocks import checkpoint_blocks
from autopar.passes.context_parallel import context_parallel
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.invariants import check_invariants
from autopar.passes.localize_shapes import localize_shapes
from autopar.passes.native_gqa import native_gqa
from autopar.passes.outline_blocks import outline_blocks
from autopar.passes.overlap_collectives import overlap_collectives
from autopar.passes.prepare import copy_graph
from autopar.passes.random_ops import refuse_random_ops
from autopar.passes.rows_apart import check_rows_apart
from autopar.passes.seed_dropout import seed_dropout
from autopar.passes.shard_parameters import shard_parameters
from autopar.passes.split_stages import check_stages, split_stages
from autopar.passes.token_loss import cuts_batch, sum_loss
from autopar.plan import Plan, match_path
from autopar.printing import diff_graphs, format_graph

__all__ = ["PASSES", "Rewrite", "apply"]

Rewrite = Callable[[TracedModel, Plan], fx.GraphModule]

PASSES: tuple[tuple[str, Rewrite], ...] = (
    ("context_parallel", context_parallel),
    ("shard_parameters", shard_parameters),
    ("insert_collectives", lambda traced, plan: insert_collectives(traced.graph_module, plan.degrees.tp)),
    ("localize_shapes", lambda traced, plan: localize_shapes(traced.graph_module, plan.degrees.tp)),
    ("native_gqa", lambda traced, plan: native_gqa(traced.graph_module)),
    ("overlap_collectives", overlap_collectives),
    ("outline_blocks", lambda traced, plan: outline_blocks(traced.graph_module, traced.segments)),
    ("checkpoint_blocks", lambda traced, plan: checkpoint_blocks(traced.graph_module, traced.segments, plan)),
)
"""Rewrites of the whole graph; split_stages then maps it to a graph a stage."""

_TENSOR_PARALLEL = ("shard_parameters", "insert_collectives", "localize_shapes", "overlap_collectives")


def apply(
    traced: TracedModel,
    plan: Plan,
    *,
    outputs: str = "loss",
    seed: int = 0,
    show: Callable[[str], None] | None = None,
) -> tuple[StageGraph, ...]:
    """All stages of `plan` for a prepared model.

    outputs: "loss" for the training step (returns `loss_sum` [terms]), "all" for the user's own outputs; with
    dp > 1 `loss_sum` takes the place of the loss.
    seed: of dropout. Masks depend on it, the op and the row, not on the plan.
    show: called with the text diff of each pass.
    Raises PlanMismatchError if the plan does not fit the model, PassError if a pass cannot keep its promise.
    """
    _check(traced, plan)
    check_updates(traced, plan)
    refuse_random_ops(traced.graph_module.graph, plan)
    if cuts_batch(plan) and traced.loss is not None:
        check_rows_apart(traced, outputs=outputs == "all")
    graph_module = copy_graph(traced.graph_module)
    names = traced.outputs
    if outputs == "loss":
        graph_module, names = sum_loss(graph_module, traced, plan), ("loss_sum",)
    elif plan.degrees.dp > 1 and traced.loss is not None:
        graph_module = sum_loss(graph_module, traced, plan, others=True)
    traced = replace(traced, graph_module=graph_module)
    before = format_graph(graph_module.graph) if show else ""
    for name, rewrite in PASSES:
        if (plan.degrees.tp == 1 and name in _TENSOR_PARALLEL) or (plan.degrees.cp == 1 and name == "context_parallel"):
            continue
        if name == "outline_blocks":
            seed_dropout(graph_module, traced, seed)
        graph_module = rewrite(traced, plan)
        check_invariants(graph_module.graph, after=name)
        if show:
            after = format_graph(graph_module.graph)
            show(diff_graphs(before, after, name))
            before = after
    unapplied = graph_module.meta.get("unapplied", ())
    stages = split_stages(graph_module, traced, plan, names)
    return tuple(replace(stage, unapplied=unapplied) for stage in stages)


def _check(traced: TracedModel, plan: Plan) -> None:
    wanted = plan.fingerprints.get("model")
    if wanted and wanted != traced.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for another model (fingerprint {wanted}, this one {traced.fingerprint})",
            where="fingerprints.model",
            try_="plan again for this model",
        )
    check_stages(traced.segments, plan)
    if plan.seq_len % (2 * plan.degrees.cp) and plan.degrees.cp > 1:
        raise PlanMismatchError(
            f"seq_len {plan.seq_len} does not cut into 2 x cp = {2 * plan.degrees.cp} chunks",
            where="seq_len",
            try_=f"a multiple of {2 * plan.degrees.cp}; shorter batches are padded at run time",
        )
    _check_names(traced, plan)
    low, high = traced.seq_range
    if plan.seq_len < low or (high is not None and plan.seq_len > high):
        raise PlanMismatchError(
            f"seq_len {plan.seq_len} is outside what the captured graph is valid for ({low} to {high or 'any'})",
            where="seq_len",
            try_="capture with an example of that length",
        )


def _check_names(traced: TracedModel, plan: Plan) -> None:
    """Every key of the plan has to name something: a typo would silently train another layout."""
    keys = [n.meta["key"] for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    known = {
        "parameters": [*traced.parameters, *traced.ties],
        "ops": keys,
        "checkpoint": [s.path for s in traced.layers],
    }
    for field, names in known.items():
        for pattern in getattr(plan, field):
            if pattern not in names and not any(match_path(pattern, name) for name in names):
                raise PlanMismatchError(
                    f"{pattern!r} names nothing in this model",
                    where=field,
                    try_=nearest(pattern, sorted(set(names))[:200]),
                )
