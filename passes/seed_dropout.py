"""Give every dropout a mask that depends on its place in the model and in the data, not on the rank that runs it.

before    `dropout(x, p, True)` and attention with `dropout_p`, which draw from the process's generator
after     `seeded_dropout` and `attention_with_dropout`, which read the rows' numbers from the added input `row_ids`
requires  localize_shapes; placements over cp and tp where there are any
ensures   equal masks on copies, the right parts on shards, other masks on other rows, the same again in recompute.
          PassError where dim 0 is not the batch, so that rows have no number
"""

from __future__ import annotations

import zlib
from typing import Any

import sympy
import torch
from torch import fx

from autopar.errors import PassError
from autopar.ir import InputSpec, TracedModel
from autopar.placement import Placement
from autopar.runtime.dropout import attention_with_dropout, seeded_dropout

__all__ = ["ROW_IDS", "draws_randomly", "row_ids_spec", "seed_dropout"]

ROW_IDS = "row_ids"
_DROPOUT = torch.ops.aten.dropout.default
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def row_ids_spec(batch: sympy.Symbol) -> InputSpec:
    """The input that numbers the rows of a batch."""
    return InputSpec(ROW_IDS, (batch,), torch.int64, 0, None)


def draws_randomly(graph: fx.Graph) -> bool:
    """True if the graph has dropout to seed."""
    return any(_probability(n) > 0 for n in graph.nodes if n.op == "call_function")


def seed_dropout(graph_module: fx.GraphModule, traced: TracedModel, seed: int) -> fx.GraphModule:
    """Rewrite `graph_module` in place and return it."""
    graph = graph_module.graph
    drawing = [n for n in graph.nodes if n.op == "call_function" and _probability(n) > 0]
    if not drawing:
        return graph_module
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last_input):
        rows = graph.placeholder(ROW_IDS)
    rows.meta = {"shape": (traced.batch,), "dtype": torch.int64, "grad": False, "path": "", "segment": 0}
    for node in drawing:
        if node.meta["shape"][0] != traced.batch:
            raise PassError(
                "dropout of a tensor whose first dim is not the batch", where=f"seed_dropout: {node.meta['key']}"
            )
        key = zlib.crc32(f"{seed} {node.meta['key']}".encode())
        _seed_one(node, rows, key)
        node.meta.pop("wants", None)
    graph_module.recompile()
    return graph_module


def _probability(node: fx.Node) -> float:
    if node.target is _DROPOUT:
        return float(node.args[1]) if node.args[2] else 0.0  # type: ignore[arg-type]
    if node.target is _ATTENTION:
        return float(_argument(node, 4, "dropout_p", 0.0))
    return 0.0


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _cuts(node: fx.Node) -> list[tuple[str, str, bool]]:
    """How the result is cut, outermost axis first."""
    cuts = []
    for axis, entry in (("cp", "placement_cp"), ("tp", "placement")):
        placement: Placement | None = node.meta.get(entry)
        if placement is not None and placement.is_shard:
            cuts.append((axis, str(placement), axis == "cp" and bool(node.meta.get("zigzag"))))
    return cuts


def _seed_one(node: fx.Node, rows: fx.Node, key: int) -> None:
    cuts = _cuts(node)
    if node.target is _DROPOUT:
        x, p, _ = node.args
        node.target, node.args = seeded_dropout, (x, rows, p)
        node.kwargs = {"training": True, "key": key, "cuts": cuts}
        return
    mask, causal = _argument(node, 3, "attn_mask", None), bool(_argument(node, 5, "is_causal", False))
    kept = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    options = {"p": _probability(node), "is_causal": causal, "training": True, "key": key, "cuts": cuts, **kept}
    node.target, node.args = attention_with_dropout, (*node.args[:3], rows, *((mask,) if mask is not None else ()))
    node.kwargs = options
