"""Seconds of compute per op: `max(flops / (peak * eff), bytes / (bandwidth * eff)) + launch`, forward and backward.

Formulas are sympy expressions in (batch, seq), gathered per distinct layer class and lambdified once. Local shapes
follow from the strategy: a sharded tensor holds 1/tp of its elements, and an op with any sharded operand does 1/tp of
its flops (every strategy shards one letter of the op, or none).

Fusion assumption: under `[stack] elementwise = "eager"` every op is a kernel of its own that reads its inputs and
writes its output. Under any other value (compiled, fused, transformer-engine) elementwise traffic is FUSED_TRAFFIC of
that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.op_facts import ATTENTION, MATMULS, ElementSizes, is_view, matmul_flops, numel
from autopar.placement import Placement
from autopar.specs import DeviceSpec, StackSpec

__all__ = ["ComputePrices", "Machine", "OpCost", "OpSizes", "op_cost"]

FUSED_TRAFFIC = 1.5 / 2.4
"""Elementwise traffic of fused stacks over eager ones, both fitted on published runs as multiples of the ideal."""

FLASH_BACKWARD = 2.5
"""Flash attention's backward does five matmuls where its forward does two."""

_RMS_NORM_PASSES = 9
"""Reads and writes of the hidden-sized tensor by the eager chain to, pow, mean, mul, to, mul, in element sizes."""

_CROSS_ENTROPY_FP32_PASSES = 3
"""Cast, log-softmax and pick: each walks an fp32 copy of the logits."""


@dataclass(frozen=True)
class OpCost:
    """Symbolic cost of one op at global shapes. Bytes are kept per input and for the output, so that each can be
    divided by its own placement. `useful_flops` counts towards MFU (half an attention matrix when causal)."""

    kind: str
    forward_flops: sympy.Expr
    backward_flops: sympy.Expr
    useful_flops: sympy.Expr
    input_bytes: tuple[sympy.Expr, ...]
    output_bytes: sympy.Expr
    backward_input_weights: tuple[float, ...]
    backward_output_weight: float


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
        return OpCost("matmul", flops, gradients * flops, flops, in_bytes, out_bytes, weights, backward)
    if name in ATTENTION:
        flops, useful = _attention_flops(node)
        return OpCost("attention", flops, FLASH_BACKWARD * flops * backward, useful, in_bytes, out_bytes,
                      tuple(2.0 * g for g in grads), 2.0 * backward)  # fmt: skip
    if name == "embedding":  # rows are gathered, the table is not walked; backward scatters them
        in_bytes = tuple(zero for _ in in_bytes)
        return OpCost("memory", zero, zero, zero, in_bytes, 2 * out_bytes, (0.0,) * len(inputs), 1.5 * backward)
    if "cross_entropy" in name:
        wide = numel(inputs[0].meta["shape"]) * 4 * _CROSS_ENTROPY_FP32_PASSES
        return OpCost("memory", zero, zero, zero, (in_bytes[0] + wide, *in_bytes[1:]), out_bytes,
                      (backward, *(0.0 for _ in in_bytes[1:])), 0.0)  # fmt: skip
    if name == "rms_norm":
        rows = (_RMS_NORM_PASSES * in_bytes[0], *in_bytes[1:])
        return OpCost("memory", zero, zero, zero, rows, out_bytes, (2.0 * backward, 0.0), backward)
    reads = tuple((2.0 if name not in ("add", "sub") else 0.0) * g for g in grads)
    return OpCost("memory", zero, zero, zero, in_bytes, out_bytes, reads, backward * (name not in ("add", "sub")))


def _attention_flops(node: fx.Node) -> tuple[sympy.Expr, sympy.Expr]:
    """Forward flops of scaled dot-product attention (executed, useful): causal kernels skip half the matrix."""
    query, key, value = (node.args[i].meta["shape"] for i in range(3))  # type: ignore[union-attr]
    matrix = sympy.Mul(*(sympy.sympify(d) for d in query[:-1])) * sympy.sympify(key[-2])
    flops = 2 * matrix * (sympy.sympify(query[-1]) + sympy.sympify(value[-1]))
    causal = bool(node.kwargs.get("is_causal", len(node.args) > 5 and node.args[5]))
    executed = flops / 2 if causal else flops
    return executed, executed


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


class ComputePrices:
    """Cost formulas of some nodes (one layer class), lambdified once; `at` evaluates them all."""

    def __init__(self, nodes: Sequence[fx.Node], sizes: ElementSizes, batch: sympy.Symbol, seq: sympy.Symbol) -> None:
        self.nodes = tuple(nodes)
        self.costs = tuple(op_cost(node, sizes) for node in nodes)
        rows = [[c.forward_flops, c.backward_flops, c.useful_flops, c.output_bytes, *c.input_bytes] for c in self.costs]
        distinct = list(dict.fromkeys(e for row in rows for e in row))
        position = {expression: i for i, expression in enumerate(distinct)}
        self._rows = [[position[e] for e in row] for row in rows]
        self._evaluate = sympy.lambdify((batch, seq), distinct, modules="math")

    def at(self, batch: int, seq: int) -> dict[fx.Node, OpSizes]:
        """Sizes of every node at `batch` local sequences of `seq` local tokens."""
        values = [float(v) for v in self._evaluate(batch, seq)]
        result = {}
        for node, cost, row in zip(self.nodes, self.costs, self._rows, strict=True):
            forward, backward, useful, out, *ins = (values[i] for i in row)
            result[node] = OpSizes(cost.kind, forward, backward, useful, tuple(ins), out,
                                   cost.backward_input_weights, cost.backward_output_weight)  # fmt: skip
        return result


@dataclass(frozen=True)
class Machine:
    """What turns sizes into seconds: effective rates of one device in one precision."""

    matmul_flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    elementwise_traffic: float

    @staticmethod
    def of(device: DeviceSpec, stack: StackSpec, dtype: str) -> Machine:
        """`dtype` is the name of the compute dtype. Raises KeyError if the device has no peak for it."""
        peak = device.flops[dtype] * device.power_derate
        return Machine(
            matmul_flops_per_s=peak * device.matmul_efficiency,
            attention_flops_per_s=peak * device.attention_efficiency,
            bytes_per_s=device.memory_bandwidth * device.memory_efficiency,
            launch_s=device.launch_s,
            elementwise_traffic=1.0 if stack.elementwise == "eager" else FUSED_TRAFFIC,
        )

    def seconds(
        self, op: OpSizes, inputs: Sequence[Placement | None], output: Placement, tp: int
    ) -> tuple[float, float]:
        """(forward, backward) of one op under a strategy."""
        if op.kind == "view":
            return 0.0, 0.0
        parts = [tp if p is not None and p.is_shard else 1 for p in inputs]
        out_part = tp if output.is_shard else 1
        share = max([out_part, *parts])
        forward_bytes = op.output_bytes / out_part + sum(b / n for b, n in zip(op.input_bytes, parts, strict=True))
        backward_bytes = op.backward_output_weight * op.output_bytes / out_part + sum(
            w * b / n for w, b, n in zip(op.backward_input_weights, op.input_bytes, parts, strict=True)
        )
        forward = self._one(op.kind, op.forward_flops / share, forward_bytes)
        if backward_bytes == 0 and op.backward_flops == 0:
            return forward, 0.0
        return forward, self._one(op.kind, op.backward_flops / share, backward_bytes)

    def _one(self, kind: str, flops: float, moved_bytes: float) -> float:
        if kind == "memory":
            return moved_bytes * self.elementwise_traffic / self.bytes_per_s + self.launch_s
        rate = self.attention_flops_per_s if kind == "attention" else self.matmul_flops_per_s
        return max(flops / rate, moved_bytes / self.bytes_per_s) + self.launch_s
