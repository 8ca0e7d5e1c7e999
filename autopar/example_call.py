"""The user's example as a call that can be exported: fake tensors of its shapes, batch and sequence left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.binding import call_arguments, check_rows, forward_parameters
from autopar.errors import SpecError

__all__ = ["example_arguments", "fake_call", "rebuilder"]


def example_arguments(model: nn.Module, example: Any) -> dict[str, Any]:
    """The example as arguments of `model.forward` by name."""
    if isinstance(example, Mapping) or hasattr(example, "keys"):
        return {str(k): example[k] for k in example.keys()}  # noqa: SIM118  BatchEncoding is no Mapping
    positional = example if isinstance(example, Sequence) and not isinstance(example, str) else [example]
    return call_arguments(forward_parameters(model), positional, {})


def fake_call(example: Mapping[str, torch.Tensor], mode: FakeTensorMode) -> tuple[list[torch.Tensor], list[Any]]:
    """Fake tensors of the example's shapes and which of their dims are dynamic.

    The batch hint is a small number that no other dim of the example equals: export compares hints when it decides
    whether two sizes are the same, and an accidental equality would tie the batch to another dim.
    """
    tensors = list(example.values())
    if not tensors:
        raise SpecError("the example holds no tensor", where="example", try_='pass {"input_ids": ..., "labels": ...}')
    check_rows(example, "example")
    seq = next((t.shape[1] for t in tensors if t.dim() >= 2), None)
    taken = {size for t in tensors for size in t.shape[1:]}
    batch = next(n for n in (6, 10, 14, 22, 26, 34) if n not in taken)
    auto = torch.export.Dim.AUTO
    fakes, dims = [], []
    with mode, torch.device("cpu"):
        for t in tensors:
            shape = [batch, *t.shape[1:]] if t.dim() else []
            fakes.append(torch.zeros(shape, dtype=t.dtype, requires_grad=t.requires_grad))
            dynamic = {0: auto} if t.dim() else {}
            dims.append(dynamic | ({1: auto} if t.dim() >= 2 and t.shape[1] == seq else {}))
    return fakes, dims


def rebuilder(arguments: dict[str, Any]) -> Callable[[list[torch.Tensor]], dict[str, Any]]:
    """The inverse of taking the tensors out of `arguments`."""
    leaves, spec = pytree.tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: list[torch.Tensor]) -> dict[str, Any]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        rebuilt: dict[str, Any] = pytree.tree_unflatten(values, spec)
        return rebuilt

    return rebuild
