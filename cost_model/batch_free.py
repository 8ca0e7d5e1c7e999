"""Seconds that do not grow with the batch (positions, their tables, masks): no function of a rank's tokens alone."""

from __future__ import annotations

import sympy
from torch import fx

from autopar.cost_model.block_layout import replicated
from autopar.cost_model.block_measures import BlockMeasures
from autopar.cost_model.compute import local_kernels
from autopar.cost_model.machine import Machine

__all__ = ["batch_free_s"]

_READS = 3
"""Reads of an op's input at most: forward, and in the backward once and for its gradient."""


def batch_free_s(batch: sympy.Symbol, measures: BlockMeasures, machine: Machine) -> float:
    """At least the seconds a block spends on tensors without a batch dim: ops that make one, reads of one."""
    per_byte_s, total = machine.elementwise_traffic / machine.bytes_per_s, 0.0
    for node, sizes in measures.sizes.items():
        if not _has(batch, node):
            kernels = local_kernels(sizes, *replicated([node])[node], 1)
            total += sum(machine.kernel_s(kernel) for kernel in kernels) + _READS * sizes.output_bytes * per_byte_s
        for source, nbytes in zip(node.all_input_nodes, sizes.input_bytes, strict=False):
            total += 0.0 if _has(batch, source) else _READS * nbytes * per_byte_s
    return total


def _has(batch: sympy.Symbol, node: fx.Node) -> bool:
    """True if a tensor has the symbol in a dim, or is none that a pass makes (a parameter)."""
    shape = node.meta.get("shape") or ()
    dims = [d for part in shape for d in (part if isinstance(part, tuple) else (part,))]
    return node.op == "get_attr" or any(batch in getattr(d, "free_symbols", ()) for d in dims)
