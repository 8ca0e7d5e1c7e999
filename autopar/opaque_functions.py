"""Keep a `torch.autograd.Function` of the user's as one node of the graph, with its own backward.

torch.export would record what its forward does and differentiate that: a straight-through estimator would train
nothing. Here forward runs once on fake tensors, unrecorded, for the shapes; the graph gets one op, which calls the
function itself when the graph runs. Nothing is known of what it does: it runs on whole tensors, replicated over tp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture_errors import CustomBackwardError

__all__ = ["OpaqueCalls", "OpaqueFunction"]

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


@torch.library.custom_op(
    "autopar::opaque_function",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] sizes, SymInt[] layout, int[] ranks, str[] dtypes, int call) -> Tensor[]",
)
def _opaque(
    tensors: list[Tensor], sizes: list[int], layout: list[int], ranks: list[int], dtypes: list[str], call: int
) -> list[Tensor]:
    raise AssertionError("an opaque function was not put back")


@_opaque.register_fake
def _(
    tensors: list[Tensor], sizes: list[int], layout: list[int], ranks: list[int], dtypes: list[str], call: int
) -> list[Tensor]:
    """`layout` holds the sizes, then the strides, of one result after the other; `dtypes` their names in torch."""
    made, rest = [], list(layout)
    for rank, dtype in zip(ranks, dtypes, strict=True):
        made.append(torch.empty_strided(rest[:rank], rest[rank : 2 * rank], dtype=getattr(torch, dtype)))
        rest = rest[2 * rank :]
    return made


_opaque.register_autograd(lambda ctx, *gradients: None)


class OpaqueFunction:
    """Target of a node that applies an autograd.Function; two of one class are equal."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = f"custom_{function.__name__}"
        self.__qualname__, self.__module__ = self.__name__, __name__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueFunction) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


@dataclass(frozen=True)
class _Argument:
    """Place of a tensor or size among the arguments of the op."""

    kind: str
    index: int


@dataclass(frozen=True)
class _Call:
    function: OpaqueFunction
    arguments: tuple[Any, ...]
    single: bool


class OpaqueCalls:
    """The calls of one capture."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @contextlib.contextmanager
    def kept_whole(self) -> Iterator[None]:
        """Within: `apply` of an autograd.Function that is not torch's is recorded as one op."""
        base = torch.autograd.Function
        original = base.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction:
                # Its forward takes no gradient, its backward runs it again if one arrives. The plan says what is
                # recomputed.
                function, _, *arguments = args
                learns = any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
                with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                    return function(*arguments)
            if cls.__module__.startswith("torch."):
                return original.__get__(None, cls)(*args, **kwargs)
            if kwargs:
                raise CustomBackwardError(cls.__name__, "is applied with keyword arguments")
            return self._record(cls, original.__get__(None, cls), args)

        base.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            base.apply = original  # type: ignore[method-assign]

    def _record(self, cls: Any, apply: Any, args: tuple[Any, ...]) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
        if not all(isinstance(leaf, (Tensor, torch.SymInt, *_PLAIN)) for leaf in leaves):
            raise CustomBackwardError(cls.__name__, "is applied to an object that is no tensor, number or string")
        versions = [t._version for t in tensors]
        with disable_proxy_modes_tracing():
            results = apply(*args)
        made = [results] if isinstance(results, Tensor) else list(results)
        if not all(isinstance(t, Tensor) for t in made):
            raise CustomBackwardError(cls.__name__, "returns something that is no tensor")
        if [t._version for t in tensors] != versions or any(t is made_t for t in tensors for made_t in made):
            raise CustomBackwardError(cls.__name__, "changes its argument in place")
        place = {id(x): _Argument("tensor", i) for i, x in enumerate(tensors)}
        place |= {id(x): _Argument("size", i) for i, x in enumerate(sizes)}
        arguments = spec.unflatten([place.get(id(leaf), leaf) for leaf in leaves])
        self._calls.append(_Call(OpaqueFunction(cls), arguments, isinstance(results, Tensor)))
        layout = [s for t in made for s in (*t.shape, *t.stride())]
        ranks, dtypes = [t.dim() for t in made], [str(t.dtype).removeprefix("torch.") for t in made]
        recorded = _opaque(tensors, sizes, layout, ranks, dtypes, len(self._calls) - 1)
        return recorded[0] if isinstance(results, Tensor) else tuple(recorded)

    def put_back(self, graph: fx.Graph) -> Sequence[str]:
        """Replace the recorded ops by the functions, in place; names of the functions in the graph."""
        names: dict[str, None] = {}
        for node in list(graph.nodes):
            if node.target is torch.ops.autopar.opaque_function.default:
                names[self._put_back(graph, node)] = None
        return list(names)

    def _put_back(self, graph: fx.Graph, node: fx.Node) -> str:
        tensors, sizes, *_, number = node.args
        call = self._calls[number]  # type: ignore[index]
        places = {"tensor": tensors, "size": sizes}

        def fill(leaf: Any) -> Any:
            return places[leaf.kind][leaf.index] if isinstance(leaf, _Argument) else leaf  # type: ignore[index]

        with graph.inserting_before(node):
            new = graph.call_function(call.function, pytree.tree_map(fill, call.arguments))
        new.meta = dict(node.meta)
        if call.single:
            new.meta["val"] = node.meta["val"][0]
            for user in list(node.users):
                user.replace_all_uses_with(new)
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(new)
        graph.erase_node(node)
        return call.function.function.__name__
