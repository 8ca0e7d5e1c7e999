"""Calling what the user wrote: `py:package.module:factory`, and the example it returns.

Whatever goes wrong in there is the user's error, told in one sentence with its type, text, file and line.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.binding import flat_names
from autopar.errors import SpecError, UnsupportedModelError, nearest
from autopar.input_dims import InputDims, input_dims

__all__ = ["call_example", "call_factory", "error_text", "load_factory", "users_place", "with_rows"]

_NOT_THE_USERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}", "<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def error_text(error: BaseException) -> str:
    """Type, first line and innermost place outside torch and autopar: `ValueError: no such size (net.py:12)`."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    text = (str(error).strip().splitlines() or [""])[0][:200]
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = users_place(error)
    return f"{text} ({place})" if place else text


def users_place(error: BaseException) -> str:
    """`file:line` of the innermost frame outside torch and autopar; "" if there is none."""
    frames = [(f.filename, str(f.lineno)) for f in traceback.extract_tb(error.__traceback__)]
    # An error of another process comes with its traceback as text.
    frames += _FRAME.findall(str(error.__cause__)) if error.__cause__ is not None else []
    return next((f"{file}:{line}" for file, line in reversed(frames) if not file.startswith(_NOT_THE_USERS)), "")


def load_factory(name: str, path: str) -> Callable[[], Any]:
    """The callable `module:attribute` names, looked up in the current directory too. Raises SpecError."""
    module_name, colon, attribute = path.partition(":")
    if not (colon and attribute and all(part.isidentifier() for part in module_name.split("."))):
        raise SpecError("not of the form py:package.module:factory", where=name)
    # `python -m` looks in the current directory, a console script does not; a user expects no difference.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code: any error may come out
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise SpecError(
                f"no module {module_name!r} on the path or in the current directory",
                where=name,
                try_="run from the folder that holds it",
            ) from error
        raise SpecError(f"importing {module_name} raised {error_text(error)}", where=name) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        functions = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise SpecError(
            f"{module_name} has no callable {attribute!r}", where=name, try_=nearest(attribute, functions or ["-"])
        )
    return factory  # type: ignore[no-any-return]


def call_factory(factory: Callable[[], Any], name: str, device: str) -> tuple[nn.Module, Any]:
    """What the factory makes on `device`: the module and its example, None without one.

    Raises SpecError if it fails or returns something else, UnsupportedModelError if it does not run on meta.
    """
    needed = _required_arguments(factory, 0)
    if needed:
        raise SpecError(f"the factory needs arguments: {needed}", where=name, try_="a function without arguments")
    try:
        with torch.device(device):
            made = factory()
    except (Exception, SystemExit) as error:  # the user's code: any error may come out
        if device == "meta" and (isinstance(error, NotImplementedError) or "meta tensor" in str(error).lower()):
            raise UnsupportedModelError(
                f"the factory does not run on the meta device: {error_text(error)}",
                where=name,
                try_="no reading of tensor values while the module is built",
            ) from error
        raise SpecError(f"the factory raised {error_text(error)}", where=name) from error
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        kind = module.__name__ + " itself" if isinstance(module, type) else type(module).__name__
        raise SpecError(f"the factory returned {kind}, not an nn.Module or (nn.Module, example)", where=name)
    return module, example


def call_example(example: Callable[..., Any], batch: int, seq: int, name: str) -> dict[str, Any]:
    """The inputs a user's `example(batch, seq)` makes. Raises SpecError if it fails or returns no dict."""
    if _required_arguments(example, 2) is not None:
        raise SpecError("the example function does not take (batch, seq)", where=name, try_="def example(batch, seq)")
    try:
        made = example(batch, seq)
    except (Exception, SystemExit) as error:  # the user's code: any error may come out
        raise SpecError(f"example({batch}, {seq}) raised {error_text(error)}", where=name) from error
    return _inputs(made, f"example({batch}, {seq}) returned {type(made).__name__}, not a dict of inputs", name)


def with_rows(given: Any, batch: int | None, seq: int | None, name: str) -> dict[str, Any]:
    """A fixed example with `batch` rows, its own repeated or cut; None leaves a size as it is.

    Tensors made on meta become ones, legal as an id and as a mask: only shapes of those mean anything.
    """
    inputs = _inputs(given, "the example is neither a dict of inputs nor a function (batch, seq) -> dict", name)
    tensors = {leaf: t for leaf, t in flat_names(inputs).items() if isinstance(t, Tensor)}
    known = input_dims(tensors)
    sized = iter([_sized(leaf, t, known[leaf], batch, seq, name) for leaf, t in tensors.items()])
    return {
        key: pytree.tree_map(lambda leaf: next(sized) if isinstance(leaf, Tensor) else leaf, value)
        for key, value in inputs.items()
    }


def _sized(leaf: str, given: Tensor, dims: InputDims, batch: int | None, seq: int | None, name: str) -> Tensor:
    tensor = torch.ones_like(given, device="cpu") if given.is_meta else given
    length = next((int(tensor.shape[d]) for d in dims.sequence), seq)
    if seq not in (None, length):
        raise SpecError(
            f"the example's {leaf!r} has sequence length {length}, {seq} is asked for",
            where=name,
            try_="return an example(batch, seq) function from the factory",
        )
    if batch is None or not dims.has_rows:
        return tensor
    if not tensor.shape[0]:
        raise SpecError(f"the example's {leaf!r} has no rows", where=name)
    return tensor[torch.arange(batch, device="cpu") % tensor.shape[0]]


def _inputs(made: Any, otherwise: str, name: str) -> dict[str, Any]:
    if not (isinstance(made, Mapping) or hasattr(made, "keys")) or isinstance(made, type):
        raise SpecError(otherwise, where=name)
    return {str(key): made[key] for key in made.keys()}  # noqa: SIM118  BatchEncoding is no Mapping


def _required_arguments(function: Callable[..., Any], given: int) -> str | None:
    """None if `function` can be called with `given` positional arguments, else the names it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin does not say
        return None
    try:
        signature.bind(*range(given))
    except TypeError:
        empty = inspect.Parameter.empty
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return ", ".join(p.name for p in signature.parameters.values() if p.default is empty and p.kind not in variadic)
    return None
