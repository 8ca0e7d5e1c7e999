"""Weights of a model that was built on the meta device: initialised module by module, the same under every plan.

Each module that owns parameters is initialised alone, on the CPU, by the model's own initialiser, from a random state
of its own: a hash of the seed and the module's path. So a weight does not depend on which rank asks for it, on the
layout, or on what else is initialised, and no rank ever holds more than one module's whole weights beside its shards.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

__all__ = ["InitialWeights"]


class InitialWeights(Mapping[str, Tensor]):
    """Name -> initial value, computed when asked for; the parameters of the module asked for last are kept.

    Names are those of `model.named_parameters()`. Raises AutoparError for a module that nothing can initialise.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._names = [name for name, _ in model.named_parameters()]
        self._path: str | None = None
        self._values: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        path, _, own = name.rpartition(".")
        if path != self._path:
            self._values, self._path = self._initialised(path), path
        return self._values[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _initialised(self, path: str) -> dict[str, Tensor]:
        module = _alone(self._model.get_submodule(path))
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(zlib.crc32(f"{self._seed} {path}".encode()))
            _initialise(self._model, module)
        unset = [name for name, p in module.named_parameters(recurse=False) if bool(torch.isnan(p).any())]
        if unset:
            raise AutoparError(
                f"nothing initialises {', '.join(unset)} of this {type(module).__name__}",
                where=path or "model",
                try_="give the module a reset_parameters(), or build the model on the CPU",
            )
        return {name: p.detach() for name, p in module.named_parameters(recurse=False)}


def _alone(module: nn.Module) -> nn.Module:
    """A copy of one module without its children; parameters are NaN on the CPU, so that what nobody sets is seen."""
    memo: dict[int, nn.Parameter] = {}
    for p in module.parameters(recurse=False):
        empty = torch.full(p.shape, float("nan"), dtype=p.dtype, device="cpu")
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    lone = copy.copy(module)
    lone.__dict__ = copy.copy(module.__dict__)
    lone._modules = {}
    lone._parameters = {name: memo[id(p)] if p is not None else None for name, p in module._parameters.items()}
    return lone


def _initialise(model: Any, module: Any) -> None:
    """By the model's own initialiser (Hugging Face), else by the module's reset_parameters."""
    if hasattr(model, "_init_weights"):
        model._init_weights(module)
    unset = any(bool(torch.isnan(p).any()) for p in module.parameters(recurse=False))
    if unset and hasattr(module, "reset_parameters"):
        module.reset_parameters()
