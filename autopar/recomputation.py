"""What the modes of recomputation keep of a layer, read off its graph: one definition for the runtime and for prices.

    none            everything that backward needs
    selective       all but the attention core, which runs again: scores, softmax, values, or the fused kernel
    selective-ops   the layer's inputs and the outputs of matrix products and of attention; the rest runs again
    full            the layer's inputs, or with `checkpoint_segment` = k those of every k-th layer

"selective" is the selective recomputation of Korthikanti et al. 2022, "selective-ops" the operator policy of torch's
selective checkpointing as torchtitan uses it, without the products whose result no recomputation reads.

Functions of nodes take those of one layer in order of execution, before the rewriting or after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.blocks import op_name
from autopar.ir import Segment
from autopar.plan import Plan

__all__ = ["FUSED_ATTENTION", "attention_cores", "kept_products", "recomputed_together"]

FUSED_ATTENTION = frozenset({"scaled_dot_product_attention", "context_attention", "attention_with_dropout"})

_PRODUCTS = frozenset({"linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "_grouped_mm"})
_SOFTMAX = frozenset({"softmax", "_softmax"})
_SCORE_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm"})
# What models do to scores between their product and the softmax.
_ON_SCORES = frozenset(
    {"mul", "div", "add", "sub", "masked_fill", "where", "to", "_to_copy", "tanh", "clamp", "reshape", "view",
     "convert", "dropout", "seeded_dropout", "contiguous"}
)  # fmt: skip
# These keep no value that depends on their input, so that nothing above them has to be right in the second run.
_KEEPS_NOTHING = frozenset(
    {"add", "sub", "neg", "cat", "to", "_to_copy", "clone", "contiguous", "convert", "reshape", "view", "transpose",
     "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind",
     "getitem", "flatten", "unflatten", "t", "seeded_dropout"}
)  # fmt: skip


def recomputed_together(segments: Sequence[Segment], plan: Plan) -> list[list[Segment]]:
    """The layers of mode "full" in groups that run again as one: at most `checkpoint_segment` consecutive ones of a
    stage. What stands between two layers (glue, or a layer of another mode) ends a group."""
    stages = [stage for stage, paths in enumerate(plan.layer_paths()) for _ in paths]
    groups: list[list[Segment]] = []
    before: tuple[int, int] | None = None  # (index, stage) of the last layer of the last group
    for layer, stage in zip((s for s in segments if s.kind == "layer"), stages, strict=True):
        if plan.checkpoint_mode(layer.path) != "full":
            continue
        if before == (layer.index - 1, stage) and len(groups[-1]) < plan.checkpoint_segment:
            groups[-1].append(layer)
        else:
            groups.append([layer])
        before = (layer.index, stage)
    return groups


def attention_cores(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The attention kernels of a layer: fused ones as single nodes, written-out ones from scores to values."""
    members = set(nodes)
    cores = [[n] for n in nodes if op_name(n) in FUSED_ATTENTION and n.meta["grad"]]
    for node in nodes:
        if op_name(node) in _SOFTMAX and node.meta["grad"]:
            scores, values = _scores_of(node, members), _values_of(node, members)
            if scores is not None and values is not None:
                between = _reached(scores, members, forth=True) & _reached(values, members, forth=False)
                cores.append([n for n in nodes if n in between])
    return cores


def kept_products(nodes: Sequence[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """(kept, unread): matrix products and attentions whose output "selective-ops" keeps, and those whose output no
    recomputation reads, so that it is neither kept nor made again.

    A product whose only reader is a conversion (a sum over ranks) is unread, and the conversion is kept in its place.
    """
    inner = {n for core in attention_cores(nodes) for n in core[:-1]}
    members = set(nodes)
    kept: set[fx.Node] = set()
    unread: set[fx.Node] = set()
    for node in nodes:
        if not node.meta["grad"] or node in inner or op_name(node) not in _PRODUCTS | FUSED_ATTENTION:
            continue
        made = node
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        if op_name(node) in _PRODUCTS and reader in members and op_name(reader) == "convert":
            unread.add(node)
            made = reader
        (kept if _is_read_again(made, members) else unread).add(made)
    return kept, unread


def _is_read_again(node: fx.Node, members: set[fx.Node]) -> bool:
    """True if an op of the layer keeps a value that depends on this one."""
    open_, seen = [node], {node}
    while open_:
        for user in open_.pop().users:
            if user not in members or user in seen:
                continue
            if op_name(user) not in _KEEPS_NOTHING:
                return True
            seen.add(user)
            open_.append(user)
    return False


def _scores_of(softmax: fx.Node, members: set[fx.Node]) -> fx.Node | None:
    """The product that makes the scores a softmax is taken of, None if it is no attention's."""
    node = softmax
    while True:
        above = next((s for s in node.all_input_nodes if s.meta.get("grad") and s in members), None)
        if above is None:
            return None
        if op_name(above) in _SCORE_PRODUCTS:
            return above
        if op_name(above) not in _ON_SCORES:
            return None
        node = above


def _values_of(softmax: fx.Node, members: set[fx.Node]) -> fx.Node | None:
    """The product of a softmax with the values."""
    node = softmax
    while True:
        below = [u for u in node.users if u in members]
        if len(below) != 1:
            return None
        if op_name(below[0]) in _SCORE_PRODUCTS:
            return below[0]
        if op_name(below[0]) not in _ON_SCORES:
            return None
        node = below[0]


def _reached(start: fx.Node, members: set[fx.Node], *, forth: bool) -> set[fx.Node]:
    open_, seen = [start], {start}
    while open_:
        node = open_.pop()
        for other in node.users if forth else node.all_input_nodes:
            if other in members and other not in seen:
                seen.add(other)
                open_.append(other)
    return seen
