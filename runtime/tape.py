"""What a recomputed layer keeps of its first run, so that the second need not compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["ATTENTION_KERNELS", "PRODUCT_KERNELS", "KeptOutput", "Tape"]


def _kernels(*names: str) -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(getattr(aten, name).default for name in names if hasattr(aten, name))


PRODUCT_KERNELS = _kernels("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
ATTENTION_KERNELS = _kernels(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


class Tape:
    """The outputs that one run of a block keeps, in order; later runs of the block read them from the start."""

    def __init__(self) -> None:
        self._outputs: list[KeptOutput] = []
        self._runs = self._position = 0

    def rewind(self) -> None:
        """A run begins. The first one records."""
        self._runs += 1
        self._position = 0

    def next(self, kernels: frozenset[Any], *, unread: bool) -> KeptOutput:
        """The place of the next output."""
        if self._runs == 1:
            self._outputs.append(KeptOutput(kernels, unread))
        output = self._outputs[self._position]
        self._position += 1
        output.replay(self._runs > 1)
        return output


class KeptOutput(TorchDispatchMode):
    """The output of one op: the results of the kernels that make it, which do not run a second time.

    As a mode it meets `kernels` below autograd, which goes on as ever; `once` does the same for what is written in
    Python. unread: nobody reads the value again; it is replaced by NaN in its shape, without memory, so that a reader
    that does so by mistake shows.
    """

    def __init__(self, kernels: frozenset[Any], unread: bool) -> None:
        super().__init__()
        self._kernels, self._unread, self.replaying = kernels, unread, False
        self._results: list[Any] = []
        self._position = 0

    def replay(self, replaying: bool) -> None:
        self.replaying, self._position = replaying, 0

    def once(self, compute: Callable[[], Any]) -> Any:
        """`compute()` in the first run, its results, detached, in later ones."""
        if not self.replaying:
            results = compute()
            self._results.append(tree_map_only(Tensor, self._kept, results))
            return results
        self._position += 1
        return tree_map_only(Tensor, Tensor.detach, self._results[self._position - 1])

    def _kept(self, x: Tensor) -> Tensor:
        return x.new_full((), float("nan")).expand(x.shape) if self._unread else x.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = lambda: func(*args, **(kwargs or {}))  # noqa: E731
        return self.once(call) if func in self._kernels else call()
