"""What the attention and the products of a layer move and make, in bytes on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.activations import local_bytes
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
    log-sum-exp of its rows); `products` are the outputs that op-level recomputation keeps."""

    key_values: float
    queries: float
    core: float
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
        products = sum(_local(n, layout[n][1], measures, tp) for n in nodes if n in kept and n in layout)
        own = [k for k in measures.kept if k.keeper in chosen and k.slot is None and op_name(k.keeper) in ATTENTION]
        core = local_bytes(own, measures.kept_elements, layout, tp)
        return AttentionBytes(key_values, queries, core, products)


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


def _local(node: fx.Node, placement: Placement | None, measures: BlockMeasures, tp: int) -> float:
    return measures.tensor_bytes.get(node, 0.0) / (tp if placement is not None and placement.is_shard else 1)
