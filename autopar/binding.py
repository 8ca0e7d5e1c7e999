"""How a user's call maps to the graph's named tensor inputs, and the graph's flat outputs back to the user's type.

A call is flattened once at capture: tensors become graph inputs, everything else (None, numbers, strings) is part of
the captured program and has to be the same at every call, which `CallSignature.bind` checks.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import SpecError, nearest

__all__ = [
    "CallSignature",
    "as_call",
    "call_arguments",
    "flat_names",
    "forward_defaults",
    "forward_parameters",
    "forward_rest",
    "forward_takes",
    "graph_names",
    "invoke",
    "register_dataclasses",
]


@dataclass(frozen=True)
class CallSignature:
    """Leaves of the captured call by name: `tensors` in graph order, and the frozen `constants`.

    `defaults` are forward's own: what was captured for arguments that were not given. `rest` is the name of its
    `*args`, if it has any.
    """

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    constants: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rest: str | None = None

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Graph inputs by name for one call, whatever order or form the arguments have.

        Raises SpecError if a captured tensor is missing, an unknown one is given, or a constant has changed.
        """
        leaves = flat_names(call_arguments(self.parameters, args, kwargs, self.rest))
        self._check_constants(leaves)
        have = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor)}
        missing = [name for name in self.tensors if name not in have]
        extra = [name for name in have if name not in self.tensors]
        if missing or extra:
            raise SpecError(
                f"the model was captured with tensors {', '.join(self.tensors)}"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; not captured: {', '.join(extra)}" if extra else ""),
                where="batch",
                try_="pass the same inputs, or parallelize with an example that has these",
            )
        return {given: have[name] for name, given in graph_names(self.tensors).items()}

    def _check_constants(self, leaves: Mapping[str, Any]) -> None:
        """Raise SpecError unless every value that is no tensor is the captured one, given or by default."""
        captured_names = {leaf.split(".")[0] for leaf in (*self.constants, *self.tensors)}
        known = {n: v for n, v in self.defaults.items() if n not in captured_names} | dict(self.constants)
        for name, value in leaves.items():
            if name not in known and value is not None and not isinstance(value, torch.Tensor):
                root = name.split(".")[0]
                if root in self.tensors:
                    given = f"a {type(value).__module__}.{type(value).__name__}" if name == root else "a collection"
                    raise SpecError(
                        f"argument {root!r} is {given}, captured as a tensor",
                        where="batch",
                        try_=f"torch.as_tensor({root})",
                    )
                raise SpecError(
                    f"argument {name!r} was not there when the model was captured",
                    where="batch",
                    try_=nearest(name, [*self.tensors, *known]),
                )
        for name, captured in known.items():
            if any(leaf.startswith(f"{name}.") for leaf in leaves):
                continue  # a container of tensors in place of a default: compared below, leaf by leaf
            given = leaves.get(name, self.defaults.get(name, _MISSING))
            if given is captured or (captured is None and isinstance(given, torch.Tensor)):
                continue  # a tensor that was not there is told with the other tensors
            if type(given) is not type(captured) or given != captured:
                raise SpecError(
                    f"argument {name!r} was captured as {captured!r} and is now {_short(given)}",
                    where="batch",
                    try_="parallelize again with an example that has the new value",
                )


class _Missing:
    def __repr__(self) -> str:
        return "not given"


_MISSING = _Missing()


_RESERVED = ("row_ids", "self")  # an input that passes add (autopar.runtime.batches); what calls of modules take


def graph_names(leaves: Sequence[str]) -> dict[str, str]:
    """Names of the graph's inputs for the tensors of a call: `packed.ids` is `packed_ids`, or `packed_ids_1` where
    another leaf has that name."""
    names: dict[str, str] = {}
    taken = {*_RESERVED, *(leaf for leaf in leaves if leaf.isidentifier())}
    for leaf in leaves:
        plain = re.sub(r"\W", "_", leaf)
        plain = f"_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain
        free = (f"{plain}_{i}" if i else plain for i in itertools.count())
        names[leaf] = leaf if plain == leaf and leaf not in _RESERVED else next(n for n in free if n not in taken)
        taken.add(names[leaf])
    return names


def as_call(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """A batch as positional and keyword arguments: a mapping of arguments, a sequence of positional ones, or the one
    argument."""
    if hasattr(batch, "keys"):  # a Mapping, or a tokenizer's BatchEncoding, which is none
        return (), {str(key): batch[key] for key in batch.keys()}  # noqa: SIM118
    return (batch if isinstance(batch, list | tuple) else (batch,)), {}


def call_arguments(
    parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], rest: str | None = None
) -> dict[str, Any]:
    """Positional and keyword arguments as one mapping by parameter name; positional ones beyond the parameters are a
    tuple under the name `rest`."""
    named = dict(zip(parameters, args, strict=False))
    if len(args) > len(parameters):
        if rest is None:
            raise SpecError(f"{len(args)} positional arguments for {len(parameters)} parameters", where="batch")
        named[rest] = tuple(args[len(parameters) :])
    clash = named.keys() & kwargs.keys()
    if clash:
        raise SpecError(f"argument given twice: {', '.join(sorted(clash))}", where="batch")
    return {**named, **kwargs}


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def forward_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of `model.forward` in order, without `*args` and `**kwargs`; up to `*args`, if it has
    any: positions after that are in there."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in _BY_POSITION]
    if forward_rest(model) is not None:
        return tuple(positional)
    return (*positional, *(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY))


def forward_rest(model: nn.Module) -> str | None:
    """The name of the `*args` of `model.forward`, if it has any."""
    parameters = inspect.signature(model.forward).parameters.values()
    return next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)


def forward_takes(model: nn.Module, name: str) -> bool:
    """Whether `model.forward` names this argument."""
    parameter = inspect.signature(model.forward).parameters.get(name)
    return parameter is not None and parameter.kind is not inspect.Parameter.VAR_KEYWORD


def invoke(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Call `model` with arguments by name: by position where its forward, or nn.Module, takes no names."""
    parameters = inspect.signature(model.forward).parameters
    rest = forward_rest(model) or ""
    nameless = {n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY or n in ("self", rest)}
    order = list(parameters)
    last = max((i for i, n in enumerate(order) if n in nameless and n in arguments), default=-1)
    positional = [n for n in order[: last + 1] if n in arguments and n != rest]
    by_name = {n: v for n, v in arguments.items() if n not in positional and n != rest}
    return model(*(arguments[n] for n in positional), *arguments.get(rest, ()), **by_name)


def forward_defaults(model: nn.Module) -> dict[str, Any]:
    """Defaults of the parameters of `model.forward`."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def flat_names(tree: Any) -> dict[str, Any]:
    """Leaves of nested mappings, sequences and dataclasses as {"ids": ..., "extra.0": ..., "batch.mask": ...}.

    None leaves are kept: that an optional argument was absent is part of what was captured.
    """
    register_dataclasses(tree)
    leaves, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {".".join(_key(k) for k in path): leaf for path, leaf in leaves}


def register_dataclasses(tree: Any) -> None:
    """Make plain dataclasses in `tree` transparent to pytree (and so to torch.export), once per class."""
    for leaf in pytree.tree_leaves(tree):
        cls = type(leaf)
        if dataclasses.is_dataclass(leaf) and cls not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(cls)
            register_dataclasses(leaf)


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise AssertionError(f"unknown pytree key {key!r}")


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
