"""Write a search's choice down as a Plan: by pattern, and only what propagation would not choose by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import fx

from autopar.cost_model.block_problem import NodeStrategy
from autopar.cost_model.evaluate import Evaluation
from autopar.cost_model.propagation import propagate
from autopar.cost_model.strategy_table import Strategy, StrategyTable
from autopar.ir import Segment, TracedModel
from autopar.placement import REPLICATE
from autopar.plan import Plan

__all__ = ["checkpoint_patterns", "layer_ranges", "parameter_patterns", "with_overrides"]

Layout = Mapping[fx.Node, NodeStrategy]


def layer_ranges(paths: Iterable[str]) -> tuple[str, ...]:
    """Consecutive layer paths as ranges, in order: model.layers.0, .1, .2 -> model.layers.0-2."""
    runs: list[tuple[str, int, int]] = []
    for path in paths:
        head, _, number = path.rpartition(".")
        if not number.isdigit():
            runs.append((path, -1, -1))
        elif runs and runs[-1][0] == head and runs[-1][2] == int(number) - 1:
            runs[-1] = (head, runs[-1][1], int(number))
        else:
            runs.append((head, int(number), int(number)))
    return tuple(_range_text(*run) for run in runs)


def _range_text(head: str, low: int, high: int) -> str:
    if low < 0:
        return head
    return f"{head}.{low}" if low == high else f"{head}.{low}-{high}"


def _class_patterns(traced: TracedModel, segments: list[Segment]) -> tuple[str, ...]:
    """Patterns that cover exactly these layers: `*` where they are all layers of their list."""
    patterns = []
    ours = defaultdict(list)
    for segment in segments:
        ours[segment.path.rpartition(".")[0]].append(segment.path)
    for head, paths in ours.items():
        everyone = [s.path for s in traced.layers if s.path.rpartition(".")[0] == head]
        whole = len(everyone) > 1 and everyone == paths and paths[0].rpartition(".")[2].isdigit()
        patterns += [f"{head}.*"] if whole else list(layer_ranges(paths))
    return tuple(patterns)


def _by_class(traced: TracedModel) -> dict[str, list[Segment]]:
    found: dict[str, list[Segment]] = defaultdict(list)
    for segment in traced.layers:
        found[segment.class_id].append(segment)
    return found


def parameter_patterns(traced: TracedModel, layout: Layout) -> dict[str, str]:
    """Placements of the sharded parameters; the layout holds the glue and the first layer of each class."""
    first = {segments[0].index: segments for segments in _by_class(traced).values()}
    entries: dict[str, str] = {}
    for node, (_, placement) in layout.items():
        if node.op != "get_attr" or placement == REPLICATE or str(node.target) not in traced.parameters:
            continue
        name, segments = str(node.target), first.get(node.meta["segment"])
        prefix = segments[0].path + "." if segments else ""
        if segments and name.startswith(prefix):
            for pattern in _class_patterns(traced, segments):
                entries[f"{pattern}.{name[len(prefix) :]}"] = str(placement)
        else:
            entries[name] = str(placement)
    return entries


def checkpoint_patterns(
    traced: TracedModel, evaluation: Evaluation, class_ids: list[str], full: bool
) -> dict[str, str]:
    """Recomputed layers: of each class the first ones of a stage (layers of a class cost the same)."""
    assert evaluation.pipeline is not None
    recomputed = []
    for (i, j), price in zip(evaluation.pipeline.runs, evaluation.pipeline.stages, strict=True):
        left = dict(zip(class_ids, price.counts if full else price.recomputed, strict=True))
        for segment in traced.layers[i:j]:
            if left[segment.class_id] > 0:
                left[segment.class_id] -= 1
                recomputed.append(segment)
    return dict.fromkeys(_class_patterns(traced, recomputed), "full")


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
