"""The user's example as a call that can be exported: fake tensors of its shapes, batch and sequence left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.binding import call_arguments, forward_parameters, forward_rest, forward_takes
from autopar.errors import SpecError
from autopar.input_dims import input_dims

__all__ = ["cache_notice", "example_arguments", "fake_call", "rebuilder"]


def example_arguments(model: nn.Module, example: Any) -> dict[str, Any]:
    """The example as arguments of `model.forward` by name. Raises SpecError for a key/value cache among them."""
    if isinstance(example, Mapping) or hasattr(example, "keys"):
        arguments = {str(k): example[k] for k in example.keys()}  # noqa: SIM118  BatchEncoding is no Mapping
    else:
        positional = example if isinstance(example, Sequence) and not isinstance(example, str) else [example]
        arguments = call_arguments(forward_parameters(model), positional, {}, forward_rest(model))
    for name, value in arguments.items():
        if (name == "past_key_values" and value is not None) or _is_cache(
            value
        ):  # forward would write fake tensors to it
            raise SpecError(f"{name} is given, and no key/value cache is read or built here", where="batch",
                            try_=f"whole sequences, without {name}")  # fmt: skip
    return arguments


def _is_cache(value: Any) -> bool:
    return any(c.__module__ == "transformers.cache_utils" for c in type(value).__mro__)


def cache_notice(model: nn.Module) -> tuple[str, ...]:
    """What a Hugging Face model does not do here that its config asks for."""
    asked = any(getattr(getattr(module, "config", None), "use_cache", False) for module in model.modules())
    if not asked or not forward_takes(model, "use_cache"):
        return ()
    return ("the config says use_cache: no key/value cache is built here, outputs hold no past_key_values",)


_TENSORS = 'pass {"input_ids": ..., "labels": ...} of tensors; torch.as_tensor makes one of a list or an array'


def fake_call(example: Mapping[str, Tensor], mode: FakeTensorMode) -> tuple[list[Tensor], list[Any]]:
    """Fake tensors of the example's shapes and which of their dims are dynamic.

    The batch hint is a small number that no other dim of the example equals: export compares hints when it decides
    whether two sizes are the same, and an accidental equality would tie the batch to another dim.
    """
    if not example:
        raise SpecError("the example holds no tensor", where="example", try_=_TENSORS)
    known = input_dims(example)
    taken = {size for name, t in example.items() for size in t.shape[known[name].has_rows :]}
    batch = next(n for n in (6, 10, 14, 22, 26, 34, 38, 46, 58, 62) if n not in taken)
    auto = torch.export.Dim.AUTO
    fakes, dims = [], []
    with mode, torch.device("cpu"):
        for name, t in example.items():
            rows = known[name].has_rows
            shape = [batch, *t.shape[1:]] if rows else list(t.shape)
            fakes.append(torch.zeros(shape, dtype=t.dtype, requires_grad=t.requires_grad))
            dims.append(dict.fromkeys((*([0] if rows else []), *known[name].sequence), auto))
    return fakes, dims


def rebuilder(arguments: dict[str, Any]) -> Callable[[list[Tensor]], dict[str, Any]]:
    """The inverse of taking the tensors out of `arguments`."""
    leaves, spec = pytree.tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: list[Tensor]) -> dict[str, Any]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        rebuilt: dict[str, Any] = pytree.tree_unflatten(values, spec)
        return rebuilt

    return rebuild
