"""All strategies of every op of a graph over one mesh axis, from the rules.

A strategy fixes the placement of each argument and of the result. Which strided shards (dim, left) are worth offering
is found by a fixpoint: shards enter at weights, attention heads, the sequence and widened dims, and travel along
letters and through reshape and split in both directions. That is how the layout of a fused q|k|v projection is found
without a pattern: heads of q, k and v seen backwards through view and split are S(.., left=3) of the projection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.dim_maps import Shard2, is_mapped, map_backward, map_forward
from autopar.cost_model.sharding_rules import LOSSES, Letter, Rule, rule_of
from autopar.cost_model.splits import PADDABLE, Splits, vocabularies
from autopar.cost_model.structural_rules import structural_rule
from autopar.graph_walks import alike
from autopar.ir import Shape, TracedModel
from autopar.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Placement, Shard

__all__ = [
    "Strategy",
    "StrategyTable",
    "attention_over_sequence",
    "ops_without_rule",
    "strategies_of_graph",
    "strategy_table",
    "tensor_arguments",
]

R, RP = REPLICATE, REPLICATE_PARTIAL_GRAD


@dataclass(frozen=True, slots=True)
class Strategy:
    """Placements of a node's arguments (aligned with `node.all_input_nodes`, None for sizes) and of its result."""

    inputs: tuple[Placement | None, ...]
    output: Placement

    def __str__(self) -> str:
        return f"{', '.join(str(p) for p in self.inputs if p is not None)} -> {self.output}"


StrategyTable: TypeAlias = Mapping[fx.Node, tuple[Strategy, ...]]


def strategy_table(
    traced: TracedModel, ranks: int, seq_len: int, axis: str = "tp", segments: Container[int] | None = None
) -> StrategyTable:
    """Strategies of every tensor node of `traced` over `ranks` of a mesh axis; layers of one class share the work.

    Over tp anything may be split but the batch (dp's) and the sequence of queries; over cp the sequence alone.
    seq_len: the tokens of a sequence, which its degree has to divide. Parameters and inputs are listed
    with what they can be; graph inputs are replicated over tp. segments: those whose nodes are wanted, default all.
    """
    table: dict[fx.Node, tuple[Strategy, ...]] = {}
    first_of_class: dict[str, tuple[list[fx.Node], dict[fx.Node, tuple[Strategy, ...]]]] = {}

    wanted = [n for n in traced.graph_module.graph.nodes if segments is None or n.meta.get("segment") in segments]
    splits = Splits(ranks, {traced.seq: seq_len}, vocabularies(wanted) if axis == "tp" else frozenset())

    def offer(node: fx.Node, options: tuple[Strategy, ...]) -> None:
        table[node] = tuple(dict.fromkeys((*table.get(node, ()), *options)))  # a tied weight has users in two segments

    for segment, nodes in zip(traced.segments, traced.nodes_by_segment(), strict=True):
        if segments is not None and segment.index not in segments:
            continue
        twins, local = first_of_class.get(segment.class_id, ([], {}))
        if not alike(nodes, twins):
            twins, local = nodes, strategies_of_graph(nodes, splits, axis)
            first_of_class.setdefault(segment.class_id, (nodes, local))
        for node, twin in zip(nodes, twins, strict=True):
            for here, there in zip((node, *node.all_input_nodes), (twin, *twin.all_input_nodes), strict=True):
                if there in local and (here is node or here.op == "get_attr"):
                    offer(here, local[there])
    for node in wanted:
        if node.op in ("placeholder", "get_attr") and node.meta["shape"] is not None:
            table.setdefault(node, _source_strategies(node, splits))
    return table


def ops_without_rule(traced: TracedModel) -> dict[str, int]:
    """Ops inside layers that carry gradient and can only run replicated, and how many there are of each."""
    found: Counter[str] = Counter()
    count = Counter(s.class_id for s in traced.layers)
    for segment in {s.class_id: s for s in traced.layers}.values():
        for node in traced.nodes_of(segment):
            if node.meta["grad"] and not is_mapped(node) and isinstance(node.meta["shape"], tuple):
                tensors = tensor_arguments(node)
                if rule_of(node, tensors) is None and structural_rule(node, tensors) is None:
                    found[op_name(node)] += count[segment.class_id]
    return dict(found)


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that are tensors, in order, once each."""
    return [n for n in node.all_input_nodes if isinstance(n.meta["shape"], tuple)]


def _source_strategies(node: fx.Node, splits: Splits) -> tuple[Strategy, ...]:
    shape = node.meta["shape"]
    sharded = [
        Strategy((), Shard(d)) for d, size in enumerate(shape) if isinstance(size, int) and splits(shape, (d, 1))
    ]
    return (Strategy((), R), *(sharded if node.op == "get_attr" else ()))


def strategies_of_graph(nodes: list[fx.Node], splits: Splits, axis: str = "tp") -> dict[fx.Node, tuple[Strategy, ...]]:
    """Strategies of `nodes` (a segment, in order)."""
    relations = {n: relation for n in nodes if (relation := _relation(n)) is not None}
    shards = _fixpoint(relations, _seeds(relations, axis), splits)
    table = {n: _strategies(n, relation, shards, splits) for n, relation in relations.items()}
    if axis == "cp":
        table |= {n: (*table[n], *attention_over_sequence(n)) for n in relations if op_name(n) in _ATTENTION}
    for node in relations:
        for source in tensor_arguments(node):
            if source.op == "get_attr" and source not in table:
                options = [Shard(*s) for s in sorted(shards.get(source, ()))]
                table[source] = (Strategy((), R), *(Strategy((), s) for s in options))
    return table


@dataclass(frozen=True)
class _Relation:
    """How the shards of a node's arguments and result belong together: by letters, or by a map of dims."""

    tensors: list[fx.Node]
    rule: Rule
    mapped: bool = False


def _relation(node: fx.Node) -> _Relation | None:
    if not isinstance(node.meta["shape"], tuple):
        return None  # a size
    tensors = tensor_arguments(node)
    if is_mapped(node):
        return _Relation(tensors, Rule((), ((PARTIAL,),)), mapped=True)
    if len(tensors) == 1 and node.all_input_nodes.count(tensors[0]) == 1 and _reads_twice(node, tensors[0]):
        doubled = rule_of(node, tensors * 2)  # x * x: both arguments are the one tensor, so it is not linear in it
        letters = tuple(Letter(x.name, x.inputs[:1], x.output) for x in doubled.letters) if doubled else ()
        return _Relation(tensors, Rule(letters))
    rule = rule_of(node, tensors) or structural_rule(node, tensors)
    return _Relation(tensors, rule or Rule(()))


def _reads_twice(node: fx.Node, tensor: fx.Node) -> bool:
    return sum(a is tensor for a in (*node.args, *node.kwargs.values())) > 1


Shards: TypeAlias = dict[fx.Node, set[Shard2]]

_HEADS = {"scaled_dot_product_attention": 1, "matmul": 1, "bmm": 0}


_ADDED = {"linear": 2, "addmm": 0}
"""Argument that is added to the product."""

_ATTENTION = ("scaled_dot_product_attention",)


def attention_over_sequence(node: fx.Node) -> tuple[Strategy, ...]:
    """Queries cut over the sequence. Without a mask keys are cut too (the kernel goes round the ranks); with one, with
    dropout, or where keys have another length, every rank has all keys and its rows of the mask."""
    tensors = tensor_arguments(node)
    if len(node.meta["shape"]) != 4 or len(tensors) != len(node.all_input_nodes):
        return ()
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    rows, (whole, *whole_keys) = Shard(2), ((2, 1) not in _sequence_dims(t) for t in tensors[:3])
    if whole:
        return ()
    if len(tensors) == 3 and not dropout and not any(whole_keys):
        return (Strategy((rows, rows, rows), rows),)
    if causal:
        return ()
    mask = tuple(rows if len(t.meta["shape"]) == 4 and t.meta["shape"][2] != 1 else RP for t in tensors[3:])
    return (Strategy((rows, RP, RP, *mask), rows),)


def _seeds(relations: Mapping[fx.Node, _Relation], axis: str) -> Shards:
    """Weight dims, attention heads, the sequence of activations, and dims an expand widens; over cp the sequence."""
    seeds: Shards = {}
    for node, relation in relations.items():
        for source in relation.tensors:
            if source.op == "get_attr":
                dims = range(len(source.meta["shape"])) if axis == "tp" else ()
                seeds.setdefault(source, set()).update((d, 1) for d in dims)
            else:
                seeds.setdefault(source, set()).update(_sequence_dims(source))
        seeds.setdefault(node, set()).update(_sequence_dims(node))
        if axis == "cp":
            continue
        heads = _HEADS.get(op_name(node))
        if heads is not None and len(node.meta["shape"]) == heads + 3:
            for tensor in (node, *relation.tensors):
                if len(tensor.meta["shape"]) == heads + 3:
                    seeds.setdefault(tensor, set()).add((heads, 1))
        if op_name(node) == "expand":
            seeds[node].update(
                (x.output, 1) for x in relation.rule.letters if x.inputs == (None,) and x.output is not None
            )
    return seeds


def _sequence_dims(node: fx.Node) -> Collection[Shard2]:
    shape = _shape(node)
    return tuple((d, 1) for d, size in enumerate(shape) if isinstance(size, sympy.Symbol) and size.name == "seq")


def _fixpoint(relations: Mapping[fx.Node, _Relation], seeds: Shards, splits: Splits) -> Shards:
    """Spread shards over all relations until nothing changes; only shards that divide are kept."""
    shards: Shards = {}

    def add(node: fx.Node, shard: Shard2 | None) -> bool:
        if shard is None or shard in shards.setdefault(node, set()):
            return False
        if shard[0] >= len(_shape(node)) or not splits(_shape(node), shard):
            return False
        shards[node].add(shard)
        return True

    for node, initial in seeds.items():
        for shard in initial:
            add(node, shard)
    changed = True
    while changed:
        changed = False
        for node, relation in relations.items():
            for target, implied in _spread(node, relation, shards):
                changed |= add(target, implied)
    return shards


def _spread(node: fx.Node, relation: _Relation, shards: Shards) -> list[tuple[fx.Node, Shard2 | None]]:
    """What the shards known at one op imply for its arguments and its result."""
    found: list[tuple[fx.Node, Shard2 | None]] = []
    if relation.mapped:
        source = relation.tensors[0]
        found += [(node, map_forward(node, source.meta["shape"], s)) for s in shards.get(source, ())]
        found += [(source, map_backward(node, source.meta["shape"], s)) for s in shards.get(node, ())]
        return found
    for letter in relation.rule.letters:
        places = _places(node, relation.tensors, letter)
        lefts = {left for tensor, dim in places for d, left in shards.get(tensor, ()) if d == dim}
        found.extend((tensor, (dim, left)) for tensor, dim in places for left in lefts)
    return found


def _places(node: fx.Node, tensors: list[fx.Node], letter: Letter) -> list[tuple[fx.Node, int]]:
    places = [(t, dim) for t, dim in zip(tensors, letter.inputs, strict=True) if dim is not None]
    return places if letter.output is None else [*places, (node, letter.output)]


def _shape(node: fx.Node) -> Shape:
    """Shape of a tensor, or of the first of several equal ones (split)."""
    shape: Shape = node.meta["shape"]
    return shape[0] if shape and isinstance(shape[0], tuple) else shape


def _strategies(node: fx.Node, relation: _Relation, shards: Shards, splits: Splits) -> tuple[Strategy, ...]:
    """All R, all R|P, partial sums that pass, and every letter at every known left."""
    rows: list[tuple[tuple[Placement, ...], Placement]] = []
    count = len(relation.tensors)
    rows.append(((R,) * count, R))
    if node.meta["grad"]:
        rows.append(((RP,) * count, RP))
        rows += [(inputs, PARTIAL) for inputs in relation.rule.partial]
    if relation.mapped:
        source = relation.tensors[0]
        for shard in sorted(shards.get(source, ())):
            target = map_forward(node, source.meta["shape"], shard)
            if (
                target is not None
                and target in shards.get(node, ())
                and _stays_padded(node, source, shard, target, splits)
            ):
                rows.append(((Shard(*shard),), Shard(*target)))
    for letter in relation.rule.letters:
        rows += _letter_strategies(node, relation.tensors, letter, shards, splits)
    position = {t: i for i, t in enumerate(relation.tensors)}
    return tuple(
        Strategy(tuple(inputs[position[n]] if n in position else None for n in node.all_input_nodes), output)
        for inputs, output in dict.fromkeys(rows)
    )


def _stays_padded(node: fx.Node, source: fx.Node, shard: Shard2, target: Shard2, splits: Splits) -> bool:
    """A dim whose last shard is filled up may be moved by a reshape, not merged or cut."""
    size = _shape(source)[shard[0]]
    return not splits.pads(size) or (op_name(node) in PADDABLE and _shape(node)[target[0]] == size)


def _letter_strategies(
    node: fx.Node, tensors: list[fx.Node], letter: Letter, shards: Shards, splits: Splits
) -> list[tuple[tuple[Placement, ...], Placement]]:
    places = _places(node, tensors, letter)
    if not places or all(t is node for t, _ in places):
        lefts = {left for d, left in shards.get(node, ()) if d == letter.output}
    else:
        lefts = {left for t, dim in places for d, left in shards.get(t, ()) if d == dim}
    unequal = len({str(_shape(t)[dim]) for t, dim in places}) > 1
    if op_name(node) == "cross_entropy_loss" and letter.name != "v":
        return []
    padded = any(splits.pads(_shape(t)[dim]) for t, dim in places)
    summed = letter.output is None or (op_name(node) == "linear" and letter.name == "k")
    if padded and (op_name(node) not in PADDABLE or (summed and letter.name != "v")):
        return []
    rows = []
    for left in sorted(lefts):
        if not all(splits(_shape(t), (dim, left)) for t, dim in places) or (unequal and left > 1):
            continue
        inputs = tuple(RP if dim is None else Shard(dim, left) for dim in letter.inputs)
        rows.append(_special(node, letter, inputs, PARTIAL if letter.output is None else Shard(letter.output, left)))
    return rows


def _special(
    node: fx.Node, letter: Letter, inputs: tuple[Placement, ...], output: Placement
) -> tuple[tuple[Placement, ...], Placement]:
    """Where a kernel or a bias deviates from the plain reading of a letter."""
    name = op_name(node)
    if name in LOSSES and letter.name == "v":
        return (inputs[0], R), R  # the vocabulary-parallel kernel sums over ranks inside
    if name in _ADDED and letter.name == "k" and len(inputs) == 3:
        # The bias joins the partial sum once: R -> P keeps it on one rank.
        return tuple(PARTIAL if i == _ADDED[name] else p for i, p in enumerate(inputs)), output
    if name == "embedding" and letter.name == "v":
        return (inputs[0], R), PARTIAL  # indices carry no gradient
    return inputs, output
