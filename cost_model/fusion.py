"""Bytes of elementwise chains when a stack fuses them.

Memory-bound ops that feed each other fuse if no product lies on any path between them: they then have the same number
of products on the longest path from the block's inputs. A fused group reads each tensor from outside once and writes
what is used outside; its backward reads the gradients of what it wrote and its inputs again (not for sums, whose
gradient needs no input), and writes its inputs' gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.block_measures import BlockMeasures
from autopar.cost_model.op_facts import is_view, storage_root
from autopar.placement import Placement

__all__ = ["fused_bytes"]

_ALONE = frozenset({"embedding", "cross_entropy_loss", "cross_entropy_sum", "arange"})
"""Memory-bound ops that are kernels of their own in every stack."""

_SUMS = frozenset({"add", "sub", "neg", "cat", "to"})

Strategies = Mapping[fx.Node, tuple[Sequence[Placement | None], Placement]]


def fused_bytes(
    nodes: Sequence[fx.Node], layout: Strategies, measures: BlockMeasures, tp: int
) -> dict[fx.Node, tuple[float, float]]:
    """(forward, backward) local bytes of every fusible op: a group's at its last op, 0 at the others."""
    depth = _depths(nodes)
    group: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if not _fusible(node, measures):
            continue
        leader = node
        for source in node.all_input_nodes:
            producer = storage_root(source)
            if producer in group and depth[producer] == depth[node]:
                leader = _merge(group, members, leader, group[producer])
        group[node] = leader
        members[leader].append(node)
    found: dict[fx.Node, tuple[float, float]] = {}
    for ops in members.values():
        for node in ops:
            found[node] = (0.0, 0.0)
        if ops:
            found[max(ops, key=list(nodes).index)] = _group_bytes(ops, layout, measures, tp)
    return found


def _merge(
    group: dict[fx.Node, fx.Node], members: dict[fx.Node, list[fx.Node]], leader: fx.Node, other: fx.Node
) -> fx.Node:
    if leader is not other:
        for node in members.pop(leader, []):
            group[node] = other
            members[other].append(node)
    return other


def _fusible(node: fx.Node, measures: BlockMeasures) -> bool:
    size = measures.sizes.get(node)
    return size is not None and size.kind == "memory" and op_name(node) not in _ALONE and bool(node.all_input_nodes)


def _depths(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Products and lookups on the longest path from the block's inputs."""
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((depth.get(n, 0) for n in node.all_input_nodes), default=0)
        heavy = node.op == "call_function" and op_name(node) in _HEAVY
        depth[node] = before + heavy
    return depth


_HEAVY = _ALONE | {"linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "scaled_dot_product_attention"}


def _group_bytes(ops: Sequence[fx.Node], layout: Strategies, measures: BlockMeasures, tp: int) -> tuple[float, float]:
    inside = set(ops)
    read: dict[fx.Node, tuple[float, bool]] = {}
    written = 0.0
    written_grad = 0.0
    for node in ops:
        strategy = layout[node]
        for source, placed in zip(node.all_input_nodes, strategy[0], strict=False):
            root = storage_root(source)
            if root in inside or source not in measures.tensor_bytes:
                continue
            local = measures.tensor_bytes[source] / (tp if placed is not None and placed.is_shard else 1)
            again = op_name(node) not in _SUMS
            known = read.get(root, (0.0, False))
            read[root] = (max(local, known[0]), again or known[1])
        if _leaves(node, inside):
            local = measures.tensor_bytes[node] / (tp if strategy[1].is_shard else 1)
            written += local
            written_grad += local if node.meta.get("grad") else 0.0
    forward = sum(local for local, _ in read.values()) + written
    if not written_grad:
        return forward, 0.0
    backward = written_grad + sum(local * again for local, again in read.values())
    return forward, backward + sum(local for root, (local, _) in read.items() if root.meta.get("grad"))


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    """True if some kernel outside the group reads the node's storage."""
    for user in node.users:
        if user in inside:
            continue
        if user.op != "call_function" or not is_view(user) or _leaves(user, inside):
            return True
    return False
