"""A stand-in for the user's model that can be captured without touching it or holding its weights twice.

The shell is a copy of the module tree whose parameters are fake tensors (shape and dtype, no storage), whatever device
the originals live on. Buffers stay real, because capture folds constants out of them; those a meta-built model never
computed (rotary inverse frequencies) are rebuilt the way the model's own library builds them, or reported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.binding import invoke, register_dataclasses
from autopar.errors import UnsupportedModelError

__all__ = ["CallShell", "copied", "make_shell"]


class CallShell(nn.Module):
    """Calls `model(**arguments)` and, with `loss_fn`, returns `(loss_fn(outputs, batch), outputs)`.

    Its one argument is the flat list of tensors of the call, which makes every user signature look alike to
    torch.export; `rebuild` puts them back where they belong. With a loss function the batch may hold entries that only
    the loss reads; those `model.forward` does not name are kept from it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None,
        accepted: frozenset[str],
        rebuild: Callable[[list[torch.Tensor]], dict[str, Any]],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.accepted = accepted
        self.rebuild = rebuild

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        arguments = self.rebuild(tensors)
        if self.loss_fn is None:
            outputs = invoke(self.model, arguments)
            register_dataclasses(outputs)
            return outputs
        outputs = invoke(self.model, {k: v for k, v in arguments.items() if k in self.accepted})
        register_dataclasses(outputs)
        return {"loss": self.loss_fn(outputs, arguments), "outputs": outputs}


def make_shell(
    model: nn.Module, mode: FakeTensorMode, parameter_dtype: torch.dtype | None = None
) -> tuple[nn.Module, list[str]]:
    """A copy of `model` with fake CPU parameters of `mode`, and the names of buffers whose values are unknown.

    `parameter_dtype` replaces that of fp32 parameters; buffers keep theirs (rotary tables lose too much in 16 bits).

    The user's modules, parameters, buffers and config are not modified. Tied parameters stay tied.
    """
    memo: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            wanted = parameter_dtype if parameter.dtype == torch.float32 else None
            fake = torch.empty(parameter.shape, dtype=wanted or parameter.dtype, device="cpu")
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    shell = copied(model, memo)
    _switch_off_cache(shell)
    with torch.device("cpu"):  # the caller may still be inside the meta device it built the model on
        return shell, _rebuild_meta_buffers(shell)


def copied(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy that shares what cannot be copied: locks, open files, generators, tensors with a history.

    memo: copies to take as they are, by id of the original, as of `copy.deepcopy`.
    Raises UnsupportedModelError for an attribute that holds such a thing where it cannot be told apart.
    """
    memo = memo or {}
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # noqa: BLE001 - whatever the objects of a user raise when they are copied
        shared: dict[int, Any] = {}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    where = f"{path}.{name}".lstrip(".")
                    _share_uncopied(value, memo, shared, where)
        return copy.deepcopy(model, {**memo, **shared})


def _share_uncopied(value: Any, memo: Mapping[int, Any], shared: dict[int, Any], where: str) -> None:
    """Add to `shared` the innermost objects of `value` that cannot be copied."""
    if isinstance(value, nn.Module) or id(value) in shared:
        return  # its own attributes are looked at
    if isinstance(value, list | tuple | set | frozenset | dict):
        for part in value.values() if isinstance(value, dict) else value:
            _share_uncopied(part, memo, shared, where)
        return
    try:
        copy.deepcopy(value, {**memo, **shared})
    except Exception as error:  # as above
        if any(isinstance(part, nn.Module) for part in getattr(value, "__dict__", {}).values()):
            raise UnsupportedModelError(
                f"cannot be copied for the capture: {type(error).__name__}: {error}",
                where=where,
                try_="keep it outside of the module, or give it a __deepcopy__",
            ) from error
        shared[id(value)] = value


def _switch_off_cache(shell: nn.Module) -> None:
    """A key/value cache object in the outputs is what makes torch.export fail on most Hugging Face decoders."""
    for module in shell.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False


def _rebuild_meta_buffers(shell: nn.Module) -> list[str]:
    """Give every meta buffer real storage; recompute it where the library knows how, else report its name."""
    unknown: list[str] = []
    for path, module in shell.named_modules():
        missing = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in missing:
            old = module._buffers[name]
            assert old is not None
            module._buffers[name] = torch.full(old.shape, _POISON[old.dtype.is_floating_point], device="cpu").to(
                old.dtype
            )
        if missing and not _reinitialise(shell, module):
            unknown += [f"{path}.{name}".lstrip(".") for name in missing]
        else:
            unknown += [f"{path}.{name}".lstrip(".") for name in missing if _poisoned(module._buffers[name])]
    return unknown


# What an untouched buffer holds: recognisable afterwards, so that a rebuild that skipped it is noticed.
_POISON: dict[bool, float] = {True: float("nan"), False: 113}


def _poisoned(buffer: torch.Tensor | None) -> bool:
    if buffer is None or buffer.numel() == 0:
        return False
    if buffer.dtype.is_floating_point:
        return bool(torch.isnan(buffer).any())
    return buffer.dtype != torch.bool and bool((buffer == _POISON[False]).all())


def _reinitialise(shell: nn.Module, module: nn.Module) -> bool:
    """Run the initialiser Hugging Face models carry for modules that own no parameters but compute buffers."""
    owner: Any = next((m for m in shell.modules() if hasattr(m, "_init_weights")), None)
    if owner is None:
        return False
    own_parameters = dict(module._parameters)
    try:
        module._parameters.clear()
        with torch.no_grad():
            owner._init_weights(module)
    except (AttributeError, KeyError, TypeError, RuntimeError):
        return False  # reported as unknown by the caller
    finally:
        module._parameters.update(own_parameters)
    return True
