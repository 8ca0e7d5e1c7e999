"""Module pins on a captured model: which parameter each one places, and layers that they set apart.

The most specific pin that names a parameter places it (`Pins` keeps them in that order). Layers of one class share a
layout; those that pins treat differently are of several classes from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.errors import InfeasiblePlanError
from autopar.ir import TracedModel
from autopar.placement import Placement, parse_placement
from autopar.plan import match_path

__all__ = ["pinned_parameters", "set_apart"]


def pinned_parameters(traced: TracedModel, pins: Mapping[str, str]) -> dict[fx.Node, Placement]:
    """Placements that module pins set: a pattern names a parameter, or a module and then its weights of 2 dims.

    Raises InfeasiblePlanError for a pin that names neither."""
    fixed: dict[fx.Node, Placement] = {}
    for pattern, text in pins.items():
        hit = False
        for node in traced.graph_module.graph.nodes:
            if node.op != "get_attr" or str(node.target) not in traced.parameters:
                continue
            name = str(node.target)
            whole = match_path(pattern, name)
            if whole or (len(node.meta["shape"]) >= 2 and match_path(pattern, name.rpartition(".")[0])):
                fixed.setdefault(node, parse_placement(text))
                hit = True
        if not hit:
            raise InfeasiblePlanError(
                "the pin names no parameter and no module with a weight", where=f"pin {pattern}={text}",
                try_="a pattern such as model.layers.*.mlp.down_proj",
            )  # fmt: skip
    return fixed


def set_apart(traced: TracedModel, pins: Mapping[str, str]) -> TracedModel:
    """`traced` with a class of its own for every way in which pins place the weights of equal layers."""
    placed: dict[int, list[str]] = defaultdict(list)
    paths = {s.index: f"{s.path}." for s in traced.layers}
    for node, placement in pinned_parameters(traced, pins).items():
        index = node.meta["segment"]
        if index in paths:
            placed[index].append(f"{str(node.target).removeprefix(paths[index])}={placement}")
    pinned = {index: " ".join(sorted(texts)) for index, texts in placed.items()}
    ways: dict[str, set[str]] = defaultdict(set)
    for s in traced.layers:
        ways[s.class_id].add(pinned.get(s.index, ""))
    if all(len(of_class) == 1 for of_class in ways.values()):
        return traced
    return replace(traced, segments=tuple(
        replace(s, class_id=f"{s.class_id} {pinned[s.index]}") if s.index in pinned and len(ways[s.class_id]) > 1 else s
        for s in traced.segments
    ))  # fmt: skip
