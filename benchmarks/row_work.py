"""From a run to the work of its blocks: capture once per block shape, lay out by the plan, count at local shapes."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from published_rows import Run
from reference_models import BlockShape, ReferenceModel, example

from autopar.cost_model.block_layout import BlockWork, block_work, replicated
from autopar.cost_model.block_measures import BlockFormulas
from autopar.cost_model.kernels import ATTENTION, MATMUL
from autopar.cost_model.op_facts import ElementSizes
from autopar.cost_model.propagation import propagate
from autopar.cost_model.run_price import RunWork, attention_over_context
from autopar.cost_model.strategy_table import strategy_table
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.trace import trace

__all__ = ["run_work", "work_key"]

_POSITIONS = 4096


class Captured:
    """A captured shape: nodes of one layer and of both ends, with their formulas."""

    def __init__(self, shape: BlockShape) -> None:
        with torch.device("meta"):
            model = ReferenceModel(shape, _POSITIONS)
        self.traced: TracedModel = prepare(trace(model.to(torch.bfloat16), example(shape)))
        layer = self.traced.layers[0].index
        last = self.traced.layers[-1].index
        nodes = [n for n in self.traced.graph_module.graph.nodes if n.op != "output"]
        self.parts = {
            "layer": [n for n in nodes if n.meta["segment"] == layer],
            "prologue": [n for n in nodes if n.meta["segment"] < layer],
            "epilogue": [n for n in nodes if n.meta["segment"] > last],
        }
        sizes = ElementSizes(torch.bfloat16, torch.bfloat16)
        self.formulas = {
            fused: {name: BlockFormulas(self.traced, part, sizes, fused=fused) for name, part in self.parts.items()}
            for fused in (False, True)
        }


@cache
def captured(shape: BlockShape) -> Captured:
    return Captured(shape)


def work_key(run: Run) -> tuple[Any, ...]:
    """Runs with equal keys do the same work per micro-batch and rank."""
    d = run.layout.degrees
    return (run.shape, d.tp, d.cp, run.layout.sequence_sharding, run.layout.micro_batch, run.layout.seq_len, d.pp == 1,
            run.traits.fused_kernels, run.traits.gathers_again)  # fmt: skip


def run_work(run: Run) -> RunWork:
    """Work of one layer and of both ends on one rank."""
    found, d = captured(run.shape), run.layout.degrees
    traced, tp = found.traced, d.tp
    tokens = run.layout.seq_len // d.cp
    if tp == 1:
        layout = replicated(traced.graph_module.graph.nodes)
    else:
        plan = run.plan.replace(
            seq_len=tokens, degrees=type(d)(tp=tp), global_batch=run.plan.micro_batch, stages=(("layers.0-1",),)
        )
        spread = propagate(traced, plan, strategy_table(traced, tp, tokens))
        layout = {n: (s.inputs, s.output) for n, s in spread.strategy.items()}
        layout |= {n: ((), p) for n, p in spread.placement.items() if n not in layout}
    works = {}
    for name, nodes in found.parts.items():
        measures = found.formulas[run.traits.fused_kernels][name].at(run.layout.micro_batch, tokens)
        works[name] = block_work(traced, nodes, layout, measures, tp=tp, sequence_sharding=run.layout.sequence_sharding,
                                 gathers_again=run.traits.gathers_again)  # fmt: skip
    parameters = {name: _local_parameters(found, nodes, layout, tp) for name, nodes in found.parts.items()}
    if d.pp == 1 and not run.shape.gated_mlp:
        parameters["epilogue"] -= run.shape.vocab * run.shape.hidden / tp  # tied: one tensor
    element = 2.0 * run.layout.micro_batch * tokens
    width = run.shape.kv_heads * run.shape.head_dim
    return RunWork(
        attention_over_context(works["layer"], d.cp), works["prologue"], works["epilogue"],
        parameters["layer"], parameters["prologue"], parameters["epilogue"],
        border_bytes=element * run.shape.hidden / (tp if run.layout.sequence_sharding else 1),
        key_value_bytes=2 * element * width / tp, query_bytes=element * run.shape.hidden / tp,
        logits=run.layout.micro_batch * tokens * run.shape.vocab / tp,
        head_input=run.layout.micro_batch * tokens * run.shape.hidden / tp,
        stream=run.layout.micro_batch * tokens * run.shape.hidden,
        weight_shapes=_weight_shapes(found, layout, tp),
        head_weight=run.shape.vocab * run.shape.hidden / tp,
        **_recompute_bytes(works["layer"]),
    )  # fmt: skip


def _weight_shapes(found: Captured, layout: Any, tp: int) -> tuple[float, ...]:
    return tuple(
        math.prod(node.meta["shape"]) / (tp if node in layout and layout[node][1].is_shard else 1)
        for node in found.parts["layer"]
        if node.op == "get_attr" and len(node.meta["shape"]) >= 2
    )


def _recompute_bytes(layer: BlockWork) -> dict[str, float]:
    """16-bit outputs of attention (with its fp32 log-sum-exp) and of every second product."""
    kernels = layer.forward
    core = sum(k.m * k.batch * (2 * k.k + 4) for k in kernels.rows if k.kind == ATTENTION)
    products = [2 * k.m * k.n * k.batch for k in kernels.rows if k.kind == MATMUL]
    scores = sum(k.m * k.n * k.batch for k in kernels.rows if k.kind == ATTENTION)
    return {"scores": scores, "attention_core_bytes": core, "op_kept_bytes": core + sum(products[::2])}


def _local_parameters(found: Captured, nodes: list[Any], layout: Any, tp: int) -> float:
    total = 0.0
    for node in dict.fromkeys(n for user in nodes for n in (*user.all_input_nodes, user)):
        if node.op == "get_attr" and str(node.target) in found.traced.parameters:
            part = tp if node in layout and layout[node][1].is_shard else 1
            total += found.traced.parameters[str(node.target)].numel / part
    return total
