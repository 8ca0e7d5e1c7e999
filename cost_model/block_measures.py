"""Symbolic sizes of one block, lambdified once and evaluated at any (batch, seq)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from autopar.cost_model.activations import KeptTensor, kept_tensors
from autopar.cost_model.compute import ComputePrices, OpSizes
from autopar.cost_model.op_facts import ElementSizes, numel
from autopar.ir import TracedModel

__all__ = ["BlockFormulas", "BlockMeasures"]


@dataclass(frozen=True)
class BlockMeasures:
    """A block at one (batch, seq): op sizes, global bytes of every tensor it makes or takes, elements of kept tensors.
    `tokens` is batch x seq."""

    sizes: Mapping[fx.Node, OpSizes]
    tensor_bytes: Mapping[fx.Node, float]
    kept: Sequence[KeptTensor]
    kept_elements: Mapping[KeptTensor, float]
    tokens: float


class BlockFormulas:
    """Formulas of the nodes of a block (call_function, get_attr and placeholder nodes)."""

    def __init__(
        self, traced: TracedModel, nodes: Sequence[fx.Node], sizes: ElementSizes, *, fused: bool = False
    ) -> None:
        symbols = (traced.batch, traced.seq)
        ops = [n for n in nodes if n.op == "call_function"]
        self._ops = ComputePrices([n for n in ops if n.meta.get("dtype") is not None], sizes, *symbols)
        self._kept = kept_tensors(ops, sizes, fused=fused)
        tensors = dict.fromkeys(n for op in nodes for n in (*op.all_input_nodes, op) if n.meta.get("dtype") is not None)
        self._tensors = list(tensors)
        bytes_ = [numel(n.meta["shape"]) * sizes.of(n.meta["dtype"]) for n in self._tensors]
        elements = [kept.elements for kept in self._kept]
        distinct = list(dict.fromkeys([*bytes_, *elements]))
        position = {expression: i for i, expression in enumerate(distinct)}
        self._byte_rows = [position[e] for e in bytes_]
        self._kept_rows = [position[e] for e in elements]
        self._evaluate = sympy.lambdify(symbols, distinct, modules="math")

    def at(self, batch: int, seq: int) -> BlockMeasures:
        """`batch` local sequences of `seq` local tokens."""
        values = [float(v) for v in self._evaluate(batch, seq)]
        return BlockMeasures(
            self._ops.at(batch, seq),
            {n: values[i] for n, i in zip(self._tensors, self._byte_rows, strict=True)},
            self._kept,
            {kept: values[i] for kept, i in zip(self._kept, self._kept_rows, strict=True)},
            float(batch * seq),
        )
