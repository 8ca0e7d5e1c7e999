"""What every op of a graph executes: flops, bytes and matrix shapes as formulas, and its kernels at local shapes.

Formulas are sympy expressions in (batch, seq), gathered per distinct layer class and lambdified once. Local shapes
follow from the strategy: a sharded tensor holds 1/tp of its elements, and an op with any sharded operand does 1/tp of
its flops (every strategy shards one letter of the op, or none), off the matrix dim that the letter names.

Bytes are those of an eager run: every op is a kernel of its own that reads its inputs and writes its output. What a
fusing stack saves of that is a property of the machine (`autopar.cost_model.machine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.kernels import ATTENTION as ATTENTION_KIND
from autopar.cost_model.kernels import MATMUL, MEMORY, PRODUCT, Kernel
from autopar.cost_model.machine import Machine
from autopar.cost_model.op_facts import ATTENTION, MATMULS, ElementSizes, contracted, is_view, matmul_flops, numel
from autopar.placement import Placement

__all__ = ["ComputePrices", "Machine", "OpCost", "OpSizes", "local_kernels", "op_cost"]

FLASH_BACKWARD = 2.5
"""Flash attention's backward does five matmuls where its forward does two."""

_RMS_NORM_PASSES = 9
"""Reads and writes of the hidden-sized tensor by the eager chain to, pow, mean, mul, to, mul, in element sizes."""

_RMS_NORM_LAUNCHES, _CROSS_ENTROPY_LAUNCHES = (6, 14), (2, 2)
"""Kernels forward and backward of the chains behind one node, as torch dispatches them in fp32."""

_CROSS_ENTROPY_FP32_PASSES = 3
"""Cast, log-softmax and pick: each walks an fp32 copy of the logits."""


@dataclass(frozen=True)
class OpCost:
    """Symbolic cost of one op at global shapes. Bytes are kept per input and for the output, so that each can be
    divided by its own placement. `useful_flops` counts towards MFU (half an attention matrix when causal).

    dims     matmul: m, n, k, count; attention: queries, keys, head_dim, batch x heads (see `kernels.Kernel`)
    product  both operands of the matmul are activations
    share    part of the attention matrix that a kernel which skips masked blocks works on
    launches kernels forward and backward
    """

    kind: str
    forward_flops: sympy.Expr
    backward_flops: sympy.Expr
    useful_flops: sympy.Expr
    input_bytes: tuple[sympy.Expr, ...]
    output_bytes: sympy.Expr
    backward_input_weights: tuple[float, ...]
    backward_output_weight: float
    dims: tuple[sympy.Expr, ...] = ()
    product: bool = False
    share: float = 1.0
    launches: tuple[int, int] = (1, 1)


def op_cost(node: fx.Node, sizes: ElementSizes) -> OpCost:
    """The cost formula of a call_function node; a view costs nothing."""
    zero = sympy.Integer(0)
    inputs = node.all_input_nodes
    if is_view(node):
        return OpCost("view", zero, zero, zero, (zero,) * len(inputs), zero, (0.0,) * len(inputs), 0.0)
    in_bytes = tuple(numel(n.meta.get("shape")) * sizes.of(n.meta.get("dtype")) for n in inputs)
    out_bytes = numel(node.meta.get("shape")) * sizes.of(node.meta.get("dtype"))
    grads = [bool(n.meta.get("grad")) for n in inputs]
    backward = 1.0 if node.meta.get("grad") else 0.0
    name = op_name(node)
    if name in MATMULS:
        flops = matmul_flops(node)
        weights = tuple(2.0 * g for g in grads)  # one operand read, one gradient written
        gradients = sum(g for g, n in zip(grads, inputs, strict=True) if len(n.meta.get("shape") or ()) >= 2)
        operands = [n for n in inputs if len(n.meta.get("shape") or ()) >= 2]
        product = all(n.op != "get_attr" for n in operands)
        return OpCost("matmul", flops, gradients * flops, flops, in_bytes, out_bytes, weights, backward,
                      _matmul_dims(node), product)  # fmt: skip
    if name in ATTENTION:
        flops, useful = _attention_flops(node)
        return OpCost("attention", flops, FLASH_BACKWARD * flops * backward, useful, in_bytes, out_bytes,
                      tuple(2.0 * g for g in grads), 2.0 * backward, _attention_dims(node), True,
                      0.5 if _is_causal(node) else 1.0)  # fmt: skip
    if name == "embedding":  # rows are gathered, the table is not walked; backward scatters them
        in_bytes = tuple(zero for _ in in_bytes)
        return OpCost("memory", zero, zero, zero, in_bytes, 2 * out_bytes, (0.0,) * len(inputs), 1.5 * backward)
    if "cross_entropy" in name:
        wide = numel(inputs[0].meta["shape"]) * 4 * _CROSS_ENTROPY_FP32_PASSES
        return OpCost("memory", zero, zero, zero, (in_bytes[0] + wide, *in_bytes[1:]), out_bytes,
                      (backward, *(0.0 for _ in in_bytes[1:])), 0.0, launches=_CROSS_ENTROPY_LAUNCHES)  # fmt: skip
    if name == "rms_norm":
        rows = (_RMS_NORM_PASSES * in_bytes[0], *in_bytes[1:])
        return OpCost("memory", zero, zero, zero, rows, out_bytes, (2.0 * backward, *(0.0 for _ in in_bytes[1:])),
                      backward, launches=_RMS_NORM_LAUNCHES)  # fmt: skip
    reads = tuple((2.0 if name not in ("add", "sub") else 0.0) * g for g in grads)
    return OpCost("memory", zero, zero, zero, in_bytes, out_bytes, reads, backward * (name not in ("add", "sub")))


def _attention_flops(node: fx.Node) -> tuple[sympy.Expr, sympy.Expr]:
    """Forward flops of scaled dot-product attention (executed, useful): causal kernels skip half the matrix."""
    query, key, value = (node.args[i].meta["shape"] for i in range(3))  # type: ignore[union-attr]
    matrix = sympy.Mul(*(sympy.sympify(d) for d in query[:-1])) * sympy.sympify(key[-2])
    flops = 2 * matrix * (sympy.sympify(query[-1]) + sympy.sympify(value[-1]))
    executed = flops / 2 if _is_causal(node) else flops
    return executed, executed


def _is_causal(node: fx.Node) -> bool:
    return bool(node.kwargs.get("is_causal", len(node.args) > 5 and node.args[5]))


def _matmul_dims(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """(m, n, k, count) of a matrix multiplication at global shapes."""
    shape = [sympy.sympify(d) for d in node.meta["shape"]]
    second = [n for n in node.all_input_nodes if len(n.meta.get("shape") or ()) >= 2][-1]
    batched = op_name(node) in ("bmm", "baddbmm", "matmul") and len(second.meta["shape"]) > 2
    count = sympy.Mul(*shape[:-2]) if batched else sympy.Integer(1)
    rows = shape[-2] if batched else sympy.Mul(*shape[:-1])
    return rows, shape[-1], contracted(node), count


def _attention_dims(node: fx.Node) -> tuple[sympy.Expr, ...]:
    query, key = (node.args[i].meta["shape"] for i in range(2))  # type: ignore[union-attr]
    sizes = (sympy.sympify(d) for d in (query[-2], key[-2], query[-1]))
    return (*sizes, sympy.Mul(*(sympy.sympify(d) for d in query[:-2])))


@dataclass(frozen=True)
class OpSizes:
    """An OpCost evaluated at one (batch, seq): plain floats, still at global shapes."""

    kind: str
    forward_flops: float
    backward_flops: float
    useful_flops: float
    input_bytes: tuple[float, ...]
    output_bytes: float
    backward_input_weights: tuple[float, ...]
    backward_output_weight: float
    dims: tuple[float, ...] = ()
    gradients: tuple[bool, ...] = ()
    product: bool = False
    share: float = 1.0
    output_dims: int = 0
    launches: tuple[int, int] = (1, 1)


class ComputePrices:
    """Cost formulas of some nodes (one layer class), lambdified once; `at` evaluates them all."""

    def __init__(self, nodes: Sequence[fx.Node], sizes: ElementSizes, batch: sympy.Symbol, seq: sympy.Symbol) -> None:
        self.nodes = tuple(nodes)
        self.costs = tuple(op_cost(node, sizes) for node in nodes)
        rows = [[c.forward_flops, c.backward_flops, c.useful_flops, c.output_bytes, *c.dims, *c.input_bytes]
                for c in self.costs]  # fmt: skip
        distinct = list(dict.fromkeys(e for row in rows for e in row))
        position = {expression: i for i, expression in enumerate(distinct)}
        self._rows = [[position[e] for e in row] for row in rows]
        self._evaluate = sympy.lambdify((batch, seq), distinct, modules="math")

    def at(self, batch: int, seq: int) -> dict[fx.Node, OpSizes]:
        """Sizes of every node at `batch` local sequences of `seq` local tokens."""
        values = [float(v) for v in self._evaluate(batch, seq)]
        result = {}
        for node, cost, row in zip(self.nodes, self.costs, self._rows, strict=True):
            forward, backward, useful, out, *rest = (values[i] for i in row)
            dims, ins = rest[: len(cost.dims)], rest[len(cost.dims) :]
            operands = [n for n in node.all_input_nodes if len(n.meta.get("shape") or ()) >= 2]
            result[node] = OpSizes(cost.kind, forward, backward, useful, tuple(ins), out,
                                   cost.backward_input_weights, cost.backward_output_weight, tuple(dims),
                                   tuple(bool(n.meta.get("grad")) for n in operands), cost.product, cost.share,
                                   len(node.meta["shape"]) if cost.dims else 0, cost.launches)  # fmt: skip
        return result


def local_kernels(op: OpSizes, inputs: Sequence[Placement | None], output: Placement, tp: int) -> tuple[Kernel, ...]:
    """Forward and backward kernels of one op on one rank under a strategy."""
    if op.kind == "view":
        return ()
    parts = [tp if p is not None and p.is_shard else 1 for p in inputs]
    out_part = tp if output.is_shard else 1
    forward_bytes = op.output_bytes / out_part + sum(b / n for b, n in zip(op.input_bytes, parts, strict=True))
    backward_bytes = op.backward_output_weight * op.output_bytes / out_part + sum(
        w * b / n for w, b, n in zip(op.backward_input_weights, op.input_bytes, parts, strict=True)
    )
    if op.kind == "memory":
        forward_launches, backward_launches = op.launches
        kernel = Kernel(MEMORY, moved_bytes=forward_bytes, launches=forward_launches)
        if not backward_bytes:
            return (kernel,)
        return kernel, Kernel(MEMORY, moved_bytes=backward_bytes, backward=1, launches=backward_launches)
    m, n, k, count = _local_dims(op, inputs, output, tp)
    if op.kind == "attention":
        forward = Kernel(ATTENTION_KIND, m, n, k, count, forward_bytes, 0, op.share)
        backward = (Kernel(ATTENTION_KIND, m, n, k, count, backward_bytes, 1, op.share),)
        return (forward, *(backward if op.backward_flops else ()))
    kind = PRODUCT if op.product else MATMUL
    found = [Kernel(kind, m, n, k, count, forward_bytes)]
    if op.gradients and op.gradients[0] and op.backward_flops:
        found.append(Kernel(kind, m, k, n, count, forward_bytes, 1))
    if len(op.gradients) > 1 and op.gradients[-1] and op.backward_flops:
        found.append(Kernel(kind, n, k, m, count, forward_bytes, 2))
    return tuple(found)


def _local_dims(
    op: OpSizes, inputs: Sequence[Placement | None], output: Placement, tp: int
) -> tuple[float, float, float, float]:
    """The strategy shards one letter: an output dim, or the contracted one. Attention is cut by head or by query."""
    m, n, k, count = op.dims
    if not any(p is not None and p.is_shard for p in (*inputs, output)):
        return m, n, k, count
    if op.kind == "attention":
        return (m, n, k, count / tp) if output.dim < op.output_dims - 2 else (m / tp, n, k, count)
    if not output.is_shard:
        return m, n, k / tp, count
    if output.dim == op.output_dims - 1:
        return m, n / tp, k, count
    return (m, n, k, count / tp) if count > 1 and output.dim < op.output_dims - 2 else (m / tp, n, k, count)
