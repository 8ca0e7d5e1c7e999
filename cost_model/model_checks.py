"""What a captured model must have to be planned, asked in the order of causes: a loss, weights to train, layers."""

from __future__ import annotations

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.errors import SpecError, UnsupportedModelError
from autopar.graph_walks import joined_apart, outputs_of
from autopar.ir import TracedModel
from autopar.placement import parse_placement
from autopar.plan import Plan, match_path
from autopar.specs import Pins

__all__ = ["check_model", "check_pinned_dims", "is_one_chain", "pins_without_effect", "shares_inside"]


def check_model(traced: TracedModel, seq_len: int) -> None:
    """Raises UnsupportedModelError (no loss, nothing to train, no layers) or SpecError (a sequence it cannot take)."""
    _check_loss(traced)
    if not any(spec.requires_grad for spec in traced.parameters.values()):
        what = "every parameter is frozen" if traced.parameters else "it has no parameters"
        raise UnsupportedModelError(
            f"nothing to train: {what}", where="model", try_="requires_grad_(True) on what shall be trained"
        )
    if not traced.layers:
        raise UnsupportedModelError(
            "no layers were found. A layer is a part of forward that multiplies by a weight matrix",
            where="model",
            try_="torch's DistributedDataParallel, which needs no plan",
        )
    _check_positions(traced, seq_len)


def check_pinned_dims(traced: TracedModel, pins: Pins) -> None:
    """Raises SpecError if a pin shards a dim that a weight it names does not have."""
    for pattern, text in pins.modules.items():
        placement = parse_placement(text)
        for name, spec in traced.parameters.items():
            whole = match_path(pattern, name)
            if not placement.is_shard or not (
                whole or (len(spec.shape) >= 2 and match_path(pattern, name.rpartition(".")[0]))
            ):
                continue
            if placement.dim >= len(spec.shape):
                dims = ", ".join(f"shard({d})" for d in range(len(spec.shape)))
                raise SpecError(
                    f"{name} of shape {tuple(spec.shape)} has no dim {placement.dim}",
                    where=f"pin {pattern}={text}",
                    try_=f"one of {dims}" if dims else "replicate",
                )


def is_one_chain(traced: TracedModel) -> bool:
    """Whether all weights behind the first layer meet what it gives before one another: not those of a decoder that
    reads an encoder by the way."""
    first = min((s.index for s in traced.layers), default=0)
    nodes = list(traced.graph_module.graph.nodes)
    given = {n for n in nodes if n.op == "call_function" and n.meta["segment"] <= first and n.meta["grad"]}
    return joined_apart((n for n in nodes if n not in given), given) is None


def shares_inside(traced: TracedModel) -> bool:
    """Whether a parameter is read in several places, one of them between the first layer and the last."""
    inside = [s.index for s in traced.layers]
    first, last = min(inside, default=0), max(inside, default=0)
    for node in traced.graph_module.graph.nodes:
        if node.op == "get_attr" and str(node.target) in traced.parameters:
            places = {user.meta["segment"] for user in node.users}
            ends = len({min(max(place, first), last) for place in places}) > 1
            if ends and any(first < place < last for place in places):
                return True
    return False


def pins_without_effect(pins: Pins, plan: Plan) -> list[str]:
    """A notice for each pin that the other choices of the plan leave nothing to decide."""
    notices, tp, pp = [], plan.degrees.tp, plan.degrees.pp
    if pins.context_parallel is not None and plan.degrees.cp == 1:
        notices.append(f"the pin context_parallel={pins.context_parallel} has no effect: cp is 1, no sequence is cut")
    if pins.zero_group not in (None, 0) and plan.zero == 0:
        notices.append(f"the pin zero_group={pins.zero_group} has no effect: zero is 0, nothing is sharded")
    if (pins.checkpoint_segment or 1) > 1 and "full" not in plan.checkpoint.values():
        notices.append(
            f"the pin checkpoint_segment={pins.checkpoint_segment} has no effect: no layer is recomputed whole"
        )
    if pins.schedule is not None and pp == 1:
        notices.append(f"the pin schedule={pins.schedule} has no effect: pp is 1, there is nothing to schedule")
    if pins.modules and tp == 1:
        names = ", ".join(pins.modules)
        notices.append(f"the pinned placement of {names} has no effect: tp is 1, every weight is whole")
    return notices


def _check_loss(traced: TracedModel) -> None:
    if traced.loss is not None:
        return
    found = []
    leaves = outputs_of(traced.graph_module.graph)
    for name, leaf in zip(traced.outputs, leaves, strict=False):
        if isinstance(leaf, fx.Node) and leaf.meta.get("shape") is not None:
            found.append(f"{name or 'output'} of shape ({', '.join(map(str, leaf.meta['shape']))})")
    raise UnsupportedModelError(
        f"forward returns no loss, a floating-point scalar: it returns {'; '.join(found[:4]) or 'no tensor'}",
        where="model",
        try_="return the mean loss from forward, and pass the labels in the example, or give loss_fn",
    )


def _check_positions(traced: TracedModel, seq_len: int) -> None:
    """A table looked up at 0, 1, 2, ... needs a row for each token; torch would fail on the first batch."""
    for node in traced.graph_module.graph.nodes:
        if node.op != "call_function" or op_name(node) != "embedding" or len(node.args) < 2:
            continue
        table, index = node.args[0], node.args[1]
        if not isinstance(table, fx.Node) or not isinstance(index, fx.Node) or table.op != "get_attr":
            continue
        rows = table.meta["shape"][0]
        if isinstance(rows, int) and rows < seq_len and _counts_tokens(index, traced):
            raise SpecError(
                f"the position table {table.target} has {rows} rows, the sequence {seq_len} tokens",
                where="seq_len",
                try_=f"at most {rows}, or a longer table",
            )


def _counts_tokens(node: fx.Node, traced: TracedModel) -> bool:
    """True for arange over the sequence, reshaped or not: as many different values as there are tokens."""
    while node.op == "call_function" and op_name(node) in ("unsqueeze", "view", "expand", "_to_copy", "to", "reshape"):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    if node.op != "call_function" or op_name(node) not in ("arange", "arange_start_step"):
        return False
    return bool(node.meta.get("dtype") == torch.int64 and node.meta.get("shape") == (traced.seq,))
