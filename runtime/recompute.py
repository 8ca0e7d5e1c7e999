"""Layers that run again in backward, whole or but for some outputs that were kept.

In a second run only one thing is wanted: the tensors that autograd keeps, in their order; torch's checkpoint hands them
to the graph of the first run. So an op whose output was kept takes part in autograd as ever, but need not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.runtime.attention import context_attention
from autopar.runtime.collectives import convert
from autopar.runtime.dropout import attention_with_dropout
from autopar.runtime.tape import ATTENTION_KERNELS, PRODUCT_KERNELS, Tape

__all__ = ["OWN_OPS", "CheckpointedBlock", "keep_output"]


class CheckpointedBlock(nn.Module):
    """Runs a block and keeps only its inputs for backward, which runs the block again.

    taped: the block's first input is a tape, on which its `keep_output` nodes keep their outputs.
    The random state is restored for the second run, so dropout drops the same elements; collectives inside the block
    are repeated, by every rank alike.
    """

    def __init__(self, block: nn.Module, *, taped: bool = False) -> None:
        super().__init__()
        self.block, self.taped = block, taped

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.block(None, *args) if self.taped else self.block(*args)
        if not self.taped:
            return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=True)
        return checkpoint(self._run, Tape(), *args, use_reentrant=False, preserve_rng_state=True)

    def _run(self, tape: Tape, *args: Any) -> Any:
        tape.rewind()
        return self.block(tape, *args)


def keep_output(tape: Tape | None, name: Any, *args: Any, unread: bool = False, **kwargs: Any) -> Any:
    """The op called `name` (an ATen overload, or one of OWN_OPS) of the rest of the arguments.

    Its output is kept on `tape` and not computed again when the block runs a second time.

    unread: what reads the output keeps nothing of it, so that a second run needs no value. No tape: a plain call.
    Attention that ends in no fused kernel (with dropout on a CPU) keeps nothing and computes again.
    """
    op: Callable[..., Any] = OWN_OPS.get(name, name)
    if tape is None:
        return op(*args, **kwargs)
    attends = op in _ATTENTION
    kept = tape.next(ATTENTION_KERNELS if attends else PRODUCT_KERNELS, unread=unread)
    if op is context_attention:
        return op(*args, kept=kept, **kwargs)
    if op is convert:  # it keeps nothing for backward, so a second run needs the value alone
        result = kept.once(lambda: op(*args, **kwargs))
        return result.requires_grad_(args[0].requires_grad) if kept.replaying else result
    with kept:
        return op(*args, **kwargs)


OWN_OPS: Mapping[Any, Callable[..., Any]] = {
    f.__name__: f for f in (convert, context_attention, attention_with_dropout)
}
"""A graph's code can hold an ATen op as an argument, but no function: those go by name."""

_ATTENTION = (torch.ops.aten.scaled_dot_product_attention.default, attention_with_dropout, context_attention)
