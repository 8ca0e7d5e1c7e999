"""Let the attention kernel repeat key/value heads itself.

before    k and v [b, kv, s, d] unsqueezed, expanded and reshaped to all heads, because capture cannot know the kernel
after     `scaled_dot_product_attention(.., enable_gqa=True)` on k and v as they are
requires  localize_shapes: the pattern is read on local shapes, after the heads were sharded
ensures   same values; the repeated heads are neither copied nor kept for backward
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph_walks import before_repeat, has_no_mask
from autopar.passes.dead_code import drop_dead_code
from autopar.runtime.attention import context_attention

__all__ = ["native_gqa"]

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def native_gqa(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    for node in list(graph_module.graph.nodes):
        over_ranks = node.target is context_attention
        if over_ranks or (node.target is _ATTENTION and has_no_mask(node)):
            k, v = before_repeat(node.args[1]), before_repeat(node.args[2])
            if k is not None and v is not None:
                node.args = (node.args[0], k, v, *node.args[3:])
                if not over_ranks:
                    node.kwargs = {**node.kwargs, "enable_gqa": True}
                node.meta["wants"] = (node.meta.get("wants") or (None,) * 3)[:3]
    drop_dead_code(graph_module.graph)
    graph_module.recompile()
    return graph_module
