"""Weights of a model that was built on the meta device: initialised module by module, the same under every plan.

Each module that owns parameters is initialised alone, on the CPU, by the model's own initialiser, from a random state
of its own: a hash of the seed and the module's path. So a weight does not depend on which rank asks for it, on the
layout, or on what else is initialised, and no rank ever holds more than one module's whole weights beside its shards.

What `__init__` writes into a weight after that initialiser has run is gone on the meta device. Torch counts the writes
to a tensor, there too, so that such a weight is found and refused instead of trained from another start.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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

    def refuse_lost(self) -> None:
        """Raise AutoparError for the first weight that was written more often while the model was built than its
        module's initialiser does. (Writes through `.data`, and to modules that were copied, are not counted.)"""
        for path, module in self._model.named_modules():
            meta = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
            if not meta:
                continue
            lone = _alone(module, "meta")
            with torch.no_grad():
                for initialise in _initialisers(self._model, lone):
                    initialise()
            for name, parameter in meta.items():
                known = lone._parameters[name]
                if known is not None and parameter._version > known._version:
                    raise AutoparError(
                        f"{name} was set again after {type(module).__name__}'s own initialiser while the model was "
                        "built on the meta device, where values are lost",
                        where=path or "model",
                        try_="set it in a method _init_weights(module) of the model, or build the model on the CPU",
                    )

    def _initialised(self, path: str) -> dict[str, Tensor]:
        module = _alone(self._model.get_submodule(path), "cpu")
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


def _alone(module: nn.Module, device: str) -> nn.Module:
    """A copy of one module without its children; parameters are NaN on `device`, so that what nobody sets is seen."""
    memo: dict[int, nn.Parameter] = {}
    for p in module.parameters(recurse=False):
        empty = torch.full(p.shape, float("nan"), dtype=p.dtype, device=device)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    lone = copy.copy(module)
    lone.__dict__ = copy.copy(module.__dict__)
    lone._modules = {}
    lone._parameters = {name: memo[id(p)] if p is not None else None for name, p in module._parameters.items()}
    return lone


def _initialisers(model: Any, module: Any) -> list[Callable[[], Any]]:
    """The module's own reset_parameters and the model's initialiser (as Hugging Face models have one)."""
    own = [module.reset_parameters] if hasattr(module, "reset_parameters") else []
    return [*own, partial(model._init_weights, module)] if hasattr(model, "_init_weights") else own


def _initialise(model: Any, module: Any) -> None:
    """As construction does it: reset_parameters, then the model's initialiser; that alone where it sets everything."""
    initialisers = _initialisers(model, module)
    if initialisers:
        initialisers[-1]()
    if len(initialisers) > 1 and any(bool(torch.isnan(p).any()) for p in module.parameters(recurse=False)):
        for initialise in initialisers:
            initialise()
