"""A plan as it stands under the prices of a search: its own stages, modes of recomputation and placements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost_model.block_prices import Layout
from autopar.cost_model.candidates import Setting
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.mode_mixes import LayerMode, Mixes
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.pipeline_ilp import PipelineSolution, step_time
from autopar.cost_model.pipeline_problem import PipelineProblem, StagePrice
from autopar.cost_model.propagation import propagate
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.stage_table import price_stage
from autopar.ir import TracedModel
from autopar.plan import Plan

__all__ = ["laid_out", "priced_plan"]

Held = Sequence[Sequence[tuple[int, str]]]
"""(class, mode) of the layers of each chunk of a rank, in order."""


def laid_out(prices: ModelPrices, traced: TracedModel, plan: Plan) -> ModelPrices:
    """`prices` in the layout of the plan. Raises PlanMismatchError if the rules do not allow what it says."""
    if plan.degrees.tp == 1:
        return prices
    found = propagate(traced, plan)
    layout: Layout = {node: ((), placement) for node, placement in found.placement.items()}
    layout |= {node: (s.inputs, s.output) for node, s in found.strategy.items()}
    return prices.in_layout(layout, plan.degrees, plan.sequence_sharding, plan.micro_batch)


def priced_plan(plan: Plan, setting: Setting, evaluator: Evaluator) -> Evaluation | None:
    """The plan's step and memory; None if a stage does not fit, or is not made of what the search may choose.

    `setting` has the choices of the plan, the prices of `evaluator` its layout."""
    price, segment = evaluator.price(setting), plan.checkpoint_segment
    if segment not in evaluator.segments_of(price):
        return None
    problem, chunks, pp = price.problem(segment), plan.layer_paths(), setting.degrees.pp
    number = {c: i for i, c in enumerate(price.prices.classes)}
    kind = {s.path: number[s.class_id] for s in price.prices.traced.layers}
    stages: list[StagePrice] = []
    for rank in range(pp):
        held = [[(kind[path], plan.checkpoint_mode(path)) for path in chunk] for chunk in chunks[rank::pp]]
        if any(mode not in price.modes_of(c) for chunk in held for c, mode in chunk):
            return None
        stage = _stage(problem, rank, held, price)
        if stage is None:
            return None
        stages.append(stage)
    ends = np.cumsum([sum(stage.counts) for stage in stages]).tolist()
    runs = tuple(zip([0, *ends[:-1]], ends, strict=True))
    busy_s = step_time(stages, setting.micro_batches, setting.virtual_stages)
    solution = PipelineSolution(runs, tuple(stages), busy_s, 0.0, segment)
    return evaluator.detailed(Evaluation(setting, solution, price.with_overhead(busy_s)))


def _stage(problem: PipelineProblem, rank: int, held: Held, price: SettingPrice) -> StagePrice | None:
    layers = [layer for chunk in held for layer in chunk]
    counts = tuple(sum(c == own for own, _ in layers) for c in range(len(problem.classes)))
    choice = [layers.count((c, mode)) for c in range(len(problem.classes)) for mode in price.modes_of(c)]
    time_s = sum(_mode(problem, *layer).time_s for layer in layers)
    kept, working = zip(*(_bytes(problem, chunk) for chunk in held), strict=True)
    row = Mixes(np.array([time_s]), np.array([sum(kept)]), np.array([max(working)]), np.array([choice], dtype=np.int64))
    return price_stage(problem, rank, counts, row)


def _mode(problem: PipelineProblem, index: int, name: str) -> LayerMode:
    return next(mode for mode in problem.classes[index].modes if mode.name == name)


def _bytes(problem: PipelineProblem, chunk: Sequence[tuple[int, str]]) -> tuple[float, float]:
    """(kept, working set) of a chunk's layers; those in a row in mode "full" are recomputed in segments."""
    kept = working = 0.0
    place = 0
    while place < len(chunk):
        together = [chunk[place]]
        while chunk[place][1] == "full" and len(together) < problem.segment:
            after = place + len(together)
            if after == len(chunk) or chunk[after][1] != "full":
                break
            together.append(chunk[after])
        modes = [_mode(problem, *layer) for layer in together]
        whole = [problem.classes[c].whole_bytes for c, _ in together]
        beside = max(mode.transient_bytes - own for mode, own in zip(modes, whole, strict=True))
        kept, working = kept + modes[0].saved_bytes, max(working, beside + sum(whole))
        place += len(together)
    return kept, working
