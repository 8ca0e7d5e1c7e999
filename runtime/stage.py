"""What a rank executes: its part of the graph as modules, on its device, with its slices of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.runtime import collectives
from autopar.runtime.dropout import attention_with_dropout, seeded_dropout
from autopar.runtime.recompute import keep_output

__all__ = ["localize", "set_training"]


def localize(
    graph_module: fx.GraphModule,
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, str],
    device: torch.device,
    wide: Collection[str] = (),
) -> fx.GraphModule:
    """A copy of a stage's graph that runs here, on `device`.

    `tensors` (attribute path -> this rank's parameter or buffer) are put in, axis names bound to process groups (`wide`
    ones sum in fp32), other constants and `device=` arguments moved.
    """
    shared = [*graph_module.parameters(), *graph_module.buffers()]
    memo: dict[int, Any] = {id(t): t for t in shared}  # the weights are replaced below, not copied
    local = copy.deepcopy(graph_module, memo)
    for path, tensor in tensors.items():
        _set_attribute(local, path, tensor)
    collectives.bind(local, groups, wide)
    kept = {id(t) for t in tensors.values()}
    for module in local.modules():
        for name, constant in module.named_buffers(recurse=False):
            if id(constant) not in kept and constant.device != device:
                setattr(module, name, constant.to(device))
        if isinstance(module, fx.GraphModule) and _move_graph(module.graph, device):
            module.recompile()
    return local


def _set_attribute(module: nn.Module, path: str, value: Tensor) -> None:
    prefix, _, name = path.rpartition(".")
    owner = module.get_submodule(prefix)
    delattr(owner, name)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    else:
        owner.register_buffer(name, value)


def _move_graph(graph: fx.Graph, device: torch.device) -> bool:
    changed = False
    for node in graph.nodes:
        arguments = (node.args, node.kwargs)
        moved = fx.node.map_aggregate(arguments, lambda a: device if isinstance(a, torch.device) else a)
        if moved != arguments:
            node.args, node.kwargs = moved
            changed = True
    return changed


def set_training(module: nn.Module, training: bool) -> None:
    """Switch the dropout of every graph under `module` on or off; capture froze it in the state it found."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                _set_dropout(node, training)
            inner.recompile()


_SDPA_DROPOUT = 4  # position of dropout_p in scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)


def _set_dropout(node: fx.Node, training: bool) -> None:
    aten = torch.ops.aten
    if node.target in (aten.dropout.default, aten.native_dropout.default, aten.feature_dropout.default):
        node.args = (*node.args[:2], training)
    elif node.target is seeded_dropout or _is_attention_with_dropout(node):
        node.kwargs = {**node.kwargs, "training": training}
    elif node.target is aten.scaled_dot_product_attention.default and len(node.args) > _SDPA_DROPOUT:
        probability = node.meta.setdefault("train_dropout_p", node.args[_SDPA_DROPOUT])
        args = list(node.args)
        args[_SDPA_DROPOUT] = probability if training else 0.0
        node.args = tuple(args)


def _is_attention_with_dropout(node: fx.Node) -> bool:
    kept = node.target is keep_output and node.args[1] == attention_with_dropout.__name__
    return kept or node.target is attention_with_dropout
