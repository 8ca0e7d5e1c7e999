"""Find layers that are equal in everything but their weights and their own number.

Two layers are equal if their module trees have the same classes, the same parameters and buffers by shape, type and
tie, and the same other attributes, compared by value. A number that differs (Hugging Face's `layer_idx`) is allowed if
forward does nothing with it: `LayerNumber` stands in for it and notes any use.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

__all__ = ["LayerNumber", "LayerNumberError", "groups_of_equal_layers", "hide_numbers", "state_of"]

_TREE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_SCALARS = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type)


class LayerNumberError(BaseException):
    """Forward looked at a number by which the layers differ. Not an Exception: user code must not swallow it."""


class LayerNumber:
    """In place of an int attribute; any operation on it, conversion included, is noted and raises LayerNumberError."""

    used = False

    def _use(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.used = True
        raise LayerNumberError

    @property
    def __class__(self) -> type:  # isinstance(number, int) holds as before
        return int

    @__class__.setter
    def __class__(self, value: type) -> None:
        self._use()


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow lshift rlshift
    rshift rrshift and rand xor rxor or ror neg pos abs invert lt le eq ne gt ge hash bool int float complex index round
    trunc floor ceil str repr format bytes iter len contains getitem call reduce_ex getattr
"""
for _name in _OPERATORS.split():
    setattr(LayerNumber, f"__{_name}__", LayerNumber._use)


@dataclass(frozen=True)
class _Difference:
    """An int attribute by which otherwise equal layers differ: where it is in the layer."""

    module: str
    attribute: str


Group = tuple[list[tuple[str, nn.Module]], set[_Difference]]


def groups_of_equal_layers(root: nn.Module, smallest: int = 3) -> Iterator[Group]:
    """(layers by path in order, numbers they differ by) for every set of equal members of one module list.

    Lists inside a layer that is itself in a group are left alone; so are layers that share modules.
    """
    uses = Counter(id(m) for _, m in root.named_modules(remove_duplicate=False))
    done: list[str] = []
    for path, parent in root.named_modules():
        inside = any(path == d or path.startswith(f"{d}.") for d in done)
        if inside or not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        for members, numbers in _groups(path, parent):
            alone = all(uses[id(m)] == 1 for _, layer in members for m in layer.modules())
            if len(members) >= smallest and alone and _numbers_are_own(members, numbers):
                done += [name for name, _ in members]
                yield members, numbers


def _groups(path: str, parent: nn.Module) -> list[Group]:
    groups: list[Group] = []
    for name, layer in parent.named_children():
        member = (f"{path}.{name}".lstrip("."), layer)
        if next(layer.children(), None) is None:
            continue
        for members, numbers in groups:
            different = _differences(members[0][1], layer)
            if different is not None:
                members.append(member)
                numbers |= different
                break
        else:
            groups.append(([member], set()))
    return groups


def _numbers_are_own(members: list[tuple[str, nn.Module]], numbers: set[_Difference]) -> bool:
    """True if no two layers have the same number: then it counts them and is no setting that some share."""
    return all(
        len({getattr(layer.get_submodule(d.module), d.attribute) for _, layer in members}) == len(members)
        for d in numbers
    )


def hide_numbers(members: list[tuple[str, nn.Module]], numbers: set[_Difference]) -> list[LayerNumber]:
    """Replace the numbers the layers differ by, in place; the stand-ins say whether they were used."""
    stand_ins = []
    for _, layer in members:
        for difference in numbers:
            stand_ins.append(LayerNumber())
            vars(layer.get_submodule(difference.module))[difference.attribute] = stand_ins[-1]
    return stand_ins


def state_of(layer: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a layer in a fixed order, each once."""
    return list({id(t): t for _, t in _named_state(layer)}.values())


def _named_state(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]


def _differences(a: nn.Module, b: nn.Module) -> set[_Difference] | None:
    """The numbers by which two layers differ; None if they differ in anything else."""
    modules_a, modules_b = dict(a.named_modules()), dict(b.named_modules())
    if modules_a.keys() != modules_b.keys() or not _same_state(a, b):
        return None
    found: set[_Difference] = set()
    compare = _Comparison({id(m): id(modules_b[name]) for name, m in modules_a.items()})
    for path, x in modules_a.items():
        y = modules_b[path]
        if type(x) is not type(y) or vars(x).keys() != vars(y).keys():
            return None
        for key, value in vars(x).items():
            other = vars(y)[key]
            if key in _TREE or compare.same(value, other):
                continue
            if not (type(value) is type(other) is int):
                return None
            found.add(_Difference(path, key))
    return found


def _same_state(a: nn.Module, b: nn.Module) -> bool:
    """Same names, shapes, types and ties of parameters and buffers."""

    def describe(layer: nn.Module) -> list[Any]:
        first: dict[int, int] = {}
        return [
            (n, t.shape, t.dtype, t.requires_grad, t.device, type(t), first.setdefault(id(t), len(first)))
            for n, t in _named_state(layer)
        ]

    return describe(a) == describe(b)


class _Comparison:
    """Equality of plain attributes of two layers, in which a module of one stands for the same module of the other."""

    def __init__(self, partner: Mapping[int, int]) -> None:
        self._partner = partner
        self._assumed: set[tuple[int, int]] = set()  # pairs being compared: objects may refer to each other

    def same(self, a: Any, b: Any) -> bool:
        if a is b or (id(a), id(b)) in self._assumed:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, _SCALARS):
            return bool(a == b)
        self._assumed.add((id(a), id(b)))
        kind = next((test for kind, test in self._KINDS if isinstance(a, kind)), None)
        return kind is not None and kind(self, a, b)

    def _sequences(self, a: Any, b: Any) -> bool:
        return len(a) == len(b) and all(self.same(x, y) for x, y in zip(a, b, strict=True))

    def _mappings(self, a: Any, b: Any) -> bool:
        return list(a) == list(b) and all(self.same(a[k], b[k]) for k in a)

    def _modules(self, a: nn.Module, b: nn.Module) -> bool:
        return self._partner.get(id(a)) == id(b)

    def _methods(self, a: Any, b: Any) -> bool:
        return a.__func__ is b.__func__ and self.same(a.__self__, b.__self__)

    def _partials(self, a: Any, b: Any) -> bool:
        return a.func is b.func and self.same(a.args, b.args) and self.same(a.keywords, b.keywords)

    def _objects(self, a: Any, b: Any) -> bool:
        return hasattr(a, "__dict__") and not callable(a) and self._mappings(vars(a), vars(b))

    _KINDS: tuple[tuple[Any, Callable[[_Comparison, Any, Any], bool]], ...] = (
        (torch.Tensor, lambda self, a, b: False),
        (nn.Module, _modules),
        ((list, tuple), _sequences),
        ((set, frozenset), lambda self, a, b: bool(a == b)),
        (dict, _mappings),
        (types.MethodType, _methods),
        (functools.partial, _partials),
        (object, _objects),
    )
