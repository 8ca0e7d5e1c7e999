"""Write a search's choice down as a Plan: by pattern, and only what propagation would not choose by itself."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from torch import fx

from autopar.cost_model.block_problem import NodeStrategy
from autopar.cost_model.candidates import Setting
from autopar.cost_model.evaluate import Evaluation
from autopar.cost_model.pipeline_ilp import PipelineSolution
from autopar.cost_model.propagation import propagate
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.stage_runs import chunk_sizes
from autopar.cost_model.strategy_table import Strategy, StrategyTable, strategy_table
from autopar.ir import Segment, TracedModel
from autopar.placement import REPLICATE
from autopar.plan import Plan
from autopar.plan_checks import OVERLAPS

__all__ = ["checkpoint_patterns", "chunk_runs", "layer_ranges", "parameter_patterns", "with_overrides", "write_plan"]

Layout = Mapping[fx.Node, NodeStrategy]

_COUNTED = re.compile("0|[1-9][0-9]{0,8}")
"""Numbers that a range of a plan counts through."""


def layer_ranges(paths: Iterable[str]) -> tuple[str, ...]:
    """Consecutive layer paths as ranges, in order: model.layers.0, .1, .2 -> model.layers.0-2."""
    runs: list[tuple[str, int, int]] = []
    for path in paths:
        head, _, number = path.rpartition(".")
        if not _COUNTED.fullmatch(number):
            runs.append((path, -1, -1))
        elif runs and runs[-1][0] == head and runs[-1][2] == int(number) - 1:
            runs[-1] = (head, runs[-1][1], int(number))
        else:
            runs.append((head, int(number), int(number)))
    return tuple(_range_text(*run) for run in runs)


def _range_text(head: str, low: int, high: int) -> str:
    if low < 0:
        return head
    number = str(low) if low == high else f"{low}-{high}"
    return f"{head}.{number}" if head else number


def _class_patterns(traced: TracedModel, segments: list[Segment]) -> tuple[str, ...]:
    """Patterns that cover exactly these layers: `*` where they are all there is in their list."""
    patterns = []
    ours = defaultdict(list)
    for segment in segments:
        ours[segment.path.rpartition(".")[0]].append(segment.path)
    for head, paths in ours.items():
        whole = len(paths) > 1 and paths[0].rpartition(".")[2].isdigit() and _members(traced, head) == set(paths)
        patterns += [f"{head}.*"] if whole else list(layer_ranges(paths))
    return tuple(patterns)


def _members(traced: TracedModel, head: str) -> set[str]:
    """Paths one below `head` that ops or parameters lie in."""
    depth = head.count(".") + 2 if head else 1
    inside = [str(n.meta.get("path", "")) for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    names = [".".join(path.split(".")[:depth]) for path in (*inside, *traced.parameters)]
    return {name for name in names if name.startswith(f"{head}." if head else "")} - {""}


def _by_class(traced: TracedModel) -> dict[str, list[Segment]]:
    found: dict[str, list[Segment]] = defaultdict(list)
    for segment in traced.layers:
        found[segment.class_id].append(segment)
    return found


def parameter_patterns(traced: TracedModel, layout: Layout) -> dict[str, str]:
    """Placements of the sharded parameters; the layout holds the glue and the first layer of each class."""
    first = {segments[0].index: segments for segments in _by_class(traced).values()}
    patterns = {index: _class_patterns(traced, segments) for index, segments in first.items()}
    entries: dict[str, str] = {}
    for node, (_, placement) in layout.items():
        if node.op != "get_attr" or placement == REPLICATE or str(node.target) not in traced.parameters:
            continue
        name, segments = str(node.target), first.get(node.meta["segment"])
        prefix = segments[0].path + "." if segments else ""
        if segments and name.startswith(prefix):
            for pattern in patterns[segments[0].index]:
                entries[f"{pattern}.{name[len(prefix) :]}"] = str(placement)
        else:
            entries[name] = str(placement)
    return entries


def write_plan(traced: TracedModel, best: Evaluation, price: SettingPrice, stated: Mapping[str, Any]) -> Plan:
    """The plan of a solved setting. `stated`: fields that the user set."""
    assert best.pipeline is not None
    setting = best.setting
    degrees, layout = setting.degrees, price.blocks.layout
    chunks = chunk_runs(best.pipeline.runs, setting.virtual_stages)
    plan = Plan(
        degrees=degrees,
        micro_batch=setting.micro_batch,
        stages=tuple(layer_ranges(s.path for s in traced.layers[i:j]) for i, j in chunks),
        schedule=setting.schedule,
        virtual_stages=setting.virtual_stages,
        sequence_sharding=setting.sequence_sharding,
        parameters=parameter_patterns(traced, layout) if degrees.tp > 1 else {},
        checkpoint=checkpoint_patterns(traced, best.pipeline, price),
        checkpoint_segment=best.pipeline.segment,
        zero=setting.zero,
        zero_group=setting.zero_group,
        context_parallel=setting.exchange,
        overlap=_overlap(setting, price.cluster.stack.overlap),
        **stated,
    )
    if degrees.tp == 1:
        return plan
    tokens, walked = plan.seq_len // degrees.cp, {node.meta["segment"] for node in layout}
    return with_overrides(traced, plan, layout, strategy_table(traced, degrees.tp, tokens, segments=walked))


def _overlap(setting: Setting, declared: Collection[str]) -> tuple[str, ...]:
    """What the stack declares, and what costs nothing, as far as the setting has something to hide."""
    d = setting.degrees
    something = {
        "dp_reduce": d.dp * d.cp > 1,
        "cp_ring": d.cp > 1 and setting.exchange == "ring",
        "zero3_gather": setting.zero == 3 and d.dp * d.cp > 1,
        "tp_linear": d.tp > 1,
        "tp_ring": d.tp > 1 and setting.sequence_sharding,
        "pp_send": d.pp > 1 and setting.schedule == "1f1b",
    }
    wanted = {*declared, "cp_ring", "zero3_gather"}
    return tuple(name for name in OVERLAPS if name in wanted and something[name])


def chunk_runs(runs: Sequence[tuple[int, int]], chunks: int) -> list[tuple[int, int]]:
    """Layers [i, j) of every stage in model order: chunk k of rank r is stage k p + r. The layers of a rank are spread
    evenly over its chunks; `runs` are those of the ranks, which for several chunks says their number only."""
    each = chunk_sizes(np.array([j - i for i, j in runs]), chunks).ravel()
    return list(itertools.pairwise([0, *np.cumsum(each).tolist()]))


def checkpoint_patterns(traced: TracedModel, pipeline: PipelineSolution, price: SettingPrice) -> dict[str, str]:
    """Modes of the layers that recompute: of each class the first ones of a stage (layers of a class cost the same),
    those recomputed whole before the others, spread evenly over the chunks of a rank."""
    chosen: dict[str, list[Segment]] = defaultdict(list)
    runs, ranks = chunk_runs(pipeline.runs, price.setting.virtual_stages), len(pipeline.runs)
    for rank, stage in enumerate(pipeline.stages):
        chunks = [traced.layers[i:j] for i, j in runs[rank::ranks]]
        for index, class_id in enumerate(price.prices.classes):
            by_mode = dict(zip(price.modes_of(index), stage.modes[index], strict=True))
            modes = [mode for mode in _WHOLE_FIRST for _ in range(by_mode.get(mode, 0))]
            for segment, mode in zip(_evenly(chunks, class_id), modes, strict=True):
                chosen[mode].append(segment)
    order = {s.index: n for n, s in enumerate(traced.layers)}
    patterns = {}
    for mode, segments in sorted(chosen.items(), key=lambda item: min(order[s.index] for s in item[1])):
        if mode != "none":
            segments.sort(key=lambda s: order[s.index])
            patterns.update(dict.fromkeys(_class_patterns(traced, segments), mode))
    return patterns


_WHOLE_FIRST = ("full", "selective-ops", "selective", "none")


def _evenly(chunks: Sequence[Sequence[Segment]], class_id: str) -> list[Segment]:
    """The layers of a class, such that of every part at the front each chunk has its share."""
    own = [[s for s in chunk if s.class_id == class_id] for chunk in chunks]
    places = [(Fraction(i, len(mine)), chunk, s) for chunk, mine in enumerate(own) for i, s in enumerate(mine)]
    return [s for _, _, s in sorted(places, key=lambda place: place[:2])]


def with_overrides(traced: TracedModel, plan: Plan, layout: Layout, table: StrategyTable) -> Plan:
    """`plan` with an `ops` entry at every first op where propagation would leave the layout, none where it agrees.

    One strategy is as good as another where no tensor moves: R and R|P of a tensor without gradient are one.
    """
    if plan.degrees.tp == 1:
        return plan
    first = {segments[0].index: segments for segments in _by_class(traced).values()}
    chosen = [node for node in layout if node.op == "call_function" and node in table]
    order = {node: i for i, node in enumerate(traced.graph_module.graph.nodes)}
    chosen.sort(key=order.__getitem__)
    ops: dict[str, str] = {}
    for _ in range(len(chosen)):
        found = propagate(traced, plan.replace(ops=ops), table).strategy
        different = next((n for n in chosen if not _same(n, found[n], layout[n])), None)
        if different is None:
            break
        text = str(next(s for s in table[different] if _same(different, s, layout[different])))
        segments = first.get(different.meta["segment"])
        for key in _key_patterns(traced, different, segments):
            assert key not in ops, f"propagation does not follow the override of {key}"
            ops[key] = text
    return plan.replace(ops=ops)


def _key_patterns(traced: TracedModel, node: fx.Node, segments: list[Segment] | None) -> list[str]:
    key = str(node.meta["key"])
    if not segments or not key.startswith(segments[0].path):
        return [key]
    return [pattern + key[len(segments[0].path) :] for pattern in _class_patterns(traced, segments)]


def _same(node: fx.Node, strategy: Strategy, wanted: NodeStrategy) -> bool:
    """Equal where it matters: R|P is R on a tensor without gradient."""
    for have, want, source in zip(strategy.inputs, wanted[0], node.all_input_nodes, strict=True):
        both_replicated = have is not None and want is not None and have.is_replicated and want.is_replicated
        if have != want and not (both_replicated and not source.meta.get("grad")):
            return False
    output, want = strategy.output, wanted[1]
    return output == want or (not node.meta.get("grad") and output.is_replicated and want.is_replicated)
