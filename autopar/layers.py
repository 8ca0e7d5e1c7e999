"""Which ops belong to which layer: the unit that is priced, recomputed and assigned to a pipeline stage.

Layers are the members of the outermost module lists (`model.layers.0`, `encoder.block.3`, ...). A model without such
lists is cut where its modules are: into the parts of forward that hold two or more weight matrices each, else into
those with one; embeddings are no layers. Parts that run more than once, or in turns, make one layer together.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import fx

__all__ = ["Layer", "layer_of", "layers_of"]


class Layer(NamedTuple):
    """A layer by path. Glue between two layers of one family goes with the first."""

    family: str
    path: str


_LAYER = re.compile(r"^((?:[^.]*[^.0-9][^.]*\.)*?)([0-9]+)(?=\.|$)")
_WHOLE = Layer("", "whole_model")


def layer_of(path: str) -> tuple[str, str] | None:
    """`"model.layers.3.mlp"` -> `("model.layers", "3")`: the outermost numbered component, as written; None if there is
    none."""
    found = _LAYER.match(path)
    return (found[1].rstrip("."), found[2]) if found else None


def layers_of(ops: Sequence[fx.Node]) -> list[Layer | None]:
    """The layer of each op, None for glue. Requires `meta["path"]` and `["shape"]`; `ops` in order of execution."""
    numbered = [layer_of(n.meta["path"]) for n in ops]
    lists = _lists_of_layers(ops, numbered)
    if lists:
        return [
            Layer(n[0], f"{n[0]}.{n[1]}".lstrip(".")) if n is not None and n[0] in lists else None for n in numbered
        ]
    return _parts_of_forward(ops)


def _lists_of_layers(ops: Sequence[fx.Node], numbered: Sequence[tuple[str, str] | None]) -> set[str]:
    """Module lists whose members are layers: two or more weights of two dims each, executed one after another, once."""
    weights: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    runs: defaultdict[str, list[str]] = defaultdict(list)
    for node, layer in zip(ops, numbered, strict=True):
        if layer is None:
            continue
        if not runs[layer[0]] or runs[layer[0]][-1] != layer[1]:
            runs[layer[0]].append(layer[1])
        weights[layer].update(_matrices(node))
    return {
        name
        for name, order in runs.items()
        if all(int(a) < int(b) for a, b in itertools.pairwise(order)) and all(len(weights[name, i]) >= 2 for i in order)
    }


def _matrices(node: fx.Node) -> Iterator[str]:
    """Names of the weights of two or more dims that an op reads."""
    return (str(n.target) for n in node.all_input_nodes if n.op == "get_attr" and len(n.meta["shape"]) >= 2)


def _parts_of_forward(ops: Sequence[fx.Node]) -> list[Layer | None]:
    weights: dict[str, set[str]] = defaultdict(set)  # of every module and all inside it
    carriers = []
    for position, node in enumerate(ops):
        used = () if "embedding" in str(node.target) else tuple(_matrices(node))
        if used:
            carriers.append(position)
        for path in _ancestors(node.meta["path"]):
            weights[path].update(used)
    parts = _parts("", weights) or [c for c in _children("", weights) if weights[c]]
    found = [_part_of(n.meta["path"], parts) for n in ops]
    order = [layer for layer, _ in itertools.groupby(layer for layer in found if layer is not None)]
    if order and len(order) == len(set(order)):
        return found
    if not carriers:
        return [None] * len(ops)
    return [_WHOLE if carriers[0] <= i <= carriers[-1] else None for i in range(len(ops))]


def _ancestors(path: str) -> Iterable[str]:
    names = path.split(".") if path else []
    return [".".join(names[:i]) for i in range(len(names) + 1)]


def _children(path: str, weights: dict[str, set[str]]) -> list[str]:
    prefix = f"{path}." if path else ""
    return [p for p in weights if p and p.startswith(prefix) and "." not in p[len(prefix) :]]


def _parts(path: str, weights: dict[str, set[str]]) -> list[str]:
    """Modules inside `path` with two or more matrices: its children, or those of the only such child. If that is a
    list, then its members with one."""
    large = [c for c in _children(path, weights) if len(weights[c]) >= 2]
    if len(large) != 1:
        return large
    members = [c for c in _children(large[0], weights) if weights[c] and c.rpartition(".")[2].isdigit()]
    inner = _parts(large[0], weights)
    return next((parts for parts in (inner, members) if len(parts) > 1), large)


def _part_of(path: str, parts: Sequence[str]) -> Layer | None:
    part = next((p for p in parts if path == p or path.startswith(f"{p}.")), None)
    return None if part is None else Layer("", part)
