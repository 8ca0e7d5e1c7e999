"""What the attention and the products of a layer move and make, in bytes on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.activations import local_storages
from autopar.cost_model.block_measures import BlockMeasures
from autopar.cost_model.block_problem import NodeStrategy
from autopar.cost_model.op_facts import ATTENTION
from autopar.graph_walks import repeated_for_attention
from autopar.placement import Placement
from autopar.recomputation import kept_products

__all__ = ["AttentionBytes", "least_moved"]


@dataclass(frozen=True)
class AttentionBytes:
    """Of a micro-batch in a layer: keys and values, queries; `core` is what attention makes and keeps (its output, the
    log-sum-exp of its rows), `core_alone` what of it nothing else keeps; `products` are the outputs that op-level
    recomputation keeps."""

    key_values: float
    queries: float
    core: float
    core_alone: float
    products: float

    @staticmethod
    def of(
        nodes: Sequence[fx.Node], layout: Mapping[fx.Node, NodeStrategy], measures: BlockMeasures, tp: int
    ) -> AttentionBytes:
        """Sizes at the placements of `layout`."""
        chosen = set(nodes)
        queries = key_values = 0.0
        for node in nodes:
            if node.op == "call_function" and op_name(node) in ATTENTION and node in layout:
                inputs = zip(node.all_input_nodes[:3], layout[node][0], strict=False)
                read = [_local(_as_moved(s, placement, layout), placement, measures, tp) for s, placement in inputs]
                queries, key_values = queries + read[0], key_values + sum(read[1:])
        kept, _ = kept_products([n for n in nodes if n.op == "call_function"])
        products = sum(_local(n, _as_kept(n, layout), measures, tp) for n in nodes if n in kept and n in layout)
        kept_here = [k for k in measures.kept if k.keeper in chosen]
        made = {k for k in kept_here if k.slot is None and op_name(k.keeper) in ATTENTION}
        storages, others = (
            local_storages([k for k in kept_here if (k in made) is mine], measures.kept_elements, layout, tp)
            for mine in (True, False)
        )
        alone = sum(nbytes for key, nbytes in storages.items() if key not in others)
        return AttentionBytes(key_values, queries, sum(storages.values()), alone, products)


def least_moved(attention: fx.Node, measures: BlockMeasures) -> tuple[float, float]:
    """(keys and values, queries) that all ranks together move at least: heads before they are repeated."""
    query, *keys = (
        min(measures.tensor_bytes.get(n, 0.0) for n in (source, repeated_for_attention(source) or source))
        for source in attention.all_input_nodes[:3]
    )
    return sum(keys), query


def _as_moved(source: fx.Node, placement: Placement | None, layout: Mapping[fx.Node, NodeStrategy]) -> fx.Node:
    """Heads before they are repeated, if they are sharded alike: more would be sent for nothing."""
    heads = repeated_for_attention(source)
    if heads is None or heads not in layout or (placement is not None and layout[heads][1] != placement):
        return source
    return heads


def _as_kept(product: fx.Node, layout: Mapping[fx.Node, NodeStrategy]) -> Placement | None:
    """Of a sum over ranks what is kept is the result, as its reader wants it."""
    placed = layout[product][1]
    reader = next((n for n in product.users if n in layout), None)
    if not placed.is_partial or reader is None:
        return placed
    return layout[reader][0][reader.all_input_nodes.index(product)]


def _local(node: fx.Node, placement: Placement | None, measures: BlockMeasures, tp: int) -> float:
    return measures.tensor_bytes.get(node, 0.0) / (tp if placement is not None and placement.is_shard else 1)
