"""What a rank does to memory and network, seen from below: every op that runs passes through here.

Memory is counted by storage, from the op that makes it to the moment the last reference goes, so views cost nothing,
what autograd keeps is in it, and tensors on the meta device are not. A storage belongs to the category that was current
when it was made, until `claim` moves it. Collectives are the ops of torch's c10d namespace, which every backend's calls
go through.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Issued", "Recorder"]

_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}


class Issued(NamedTuple):
    """One collective. `nbytes` are those of the whole tensor: what an all-gather returns, a reduce-scatter takes."""

    kind: str
    group: str
    nbytes: int


class Recorder(TorchDispatchMode):
    """Records while it is entered; enter it inside the fake tensor mode, so that it sees the ops first."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.peak_bytes = 0
        self.issued: list[Issued] = []
        self._total = 0
        self._category = "activations"
        self._held: dict[int, tuple[str, int]] = {}
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> Recorder:
        """FSDP frees what it gathered by resizing storages to nothing, which is no op: the method itself reports it."""
        if self._resize is None:
            resize = self._resize = torch.UntypedStorage.resize_

            def followed(storage: torch.UntypedStorage, *args: Any) -> Any:
                result = resize(storage, *args)
                self._resized(storage)
                return result

            torch.UntypedStorage.resize_ = followed  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if self._resize is not None:
            torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
            self._resize = None

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Storages made inside belong to `name`."""
        before, self._category = self._category, name
        try:
            yield
        finally:
            self._category = before

    def claim(self, tensor: Tensor, category: str) -> None:
        """Count the storage of `tensor` under `category` from now on."""
        storage = _own_storage(tensor)
        known = self._held.get(storage._cdata)
        if known is None:
            self._add(storage, category)
        elif known[0] != category:
            self._held[storage._cdata] = (category, known[1])
            self.now[known[0]] -= known[1]
            self.now[category] += known[1]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "fsdp":
            self._watch((args, kwargs, result))
        if getattr(func, "namespace", "") == "c10d":
            self._record(func, args)
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = _own_storage(leaf)
                if storage._cdata not in self._held:
                    self._add(storage, self._category)
        return result

    def _watch(self, tensors: Any) -> None:
        """What FSDP gathers into."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and self._held.get(_key(leaf), ("activations",))[0] == "activations":
                self.claim(leaf, "communication")

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._held.get(storage._cdata)
        if known is not None:
            self._held[storage._cdata] = (known[0], storage.nbytes())
            self._count(known[0], storage.nbytes() - known[1])

    def _count(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        self._total += nbytes
        if self._total > self.peak_bytes:
            self.peak_bytes, self.peak = self._total, dict(self.now)

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._held[key] = (category, nbytes)
        weakref.finalize(storage, self._drop, key)
        self._count(category, nbytes)

    def _drop(self, key: int) -> None:
        category, nbytes = self._held.pop(key)
        self.now[category] -= nbytes
        self._total -= nbytes

    def _record(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        name = func.__name__.partition(".")[0]
        kind = _KINDS.get(name, name)
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        nbytes = max(t.numel() * t.element_size() for t in tensors)
        if name in ("alltoall_base_", "allgather_", "reduce_scatter_"):
            nbytes *= group.size()  # the tensor is one part of the whole
        self.issued.append(Issued(kind, group.group_name, nbytes))


def _key(tensor: Tensor) -> int:
    key: int = _own_storage(tensor)._cdata
    return key


def _own_storage(tensor: Tensor) -> torch.UntypedStorage:
    """What this rank holds: a DTensor's own storage stands for the global tensor and holds nothing."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
