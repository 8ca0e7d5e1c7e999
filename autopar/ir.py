"""The captured model: a torch.fx graph of ATen ops with symbolic shapes, and what is known about it.

Contract of the graph (`TracedModel.graph_module`), on which search and passes rely:

- placeholders are the user's tensor inputs, by name; parameters, buffers and lifted constants are `get_attr` nodes
  whose target is the original dotted name (a tied parameter is one node under its canonical name);
- every op is a `call_function` of an ATen overload, of one of another library, of a function in
  `autopar.runtime.functional`, or of an `autopar.opaque_functions.OpaqueFunction`;
- every node has in `meta`:
    shape    tuple of int or sympy.Expr in `TracedModel.batch` and `.seq` (global, never local), None for non-tensors;
             a tuple of such tuples for an op with several outputs
    dtype    torch.dtype of a tensor (of the first output)
    grad     True if gradient flows through its output
    path     innermost module path that executed it ("" for the root)
    segment  index into `TracedModel.segments`
    key      `path::op#ordinal`, unique; how a plan names the op (call_function only)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from autopar.binding import CallSignature
from autopar.placement import Placement

__all__ = [
    "Dim",
    "InputSpec",
    "ParameterShard",
    "ParameterSpec",
    "Segment",
    "Shape",
    "StageGraph",
    "TracedModel",
]

Dim: TypeAlias = "int | sympy.Expr"
Shape: TypeAlias = "tuple[Dim, ...]"


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter or buffer as the user's model holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class InputSpec:
    """A tensor input of the graph. `batch_dim` / `seq_dim` are the dims that carry them, None if the input has none."""

    name: str
    shape: Shape
    dtype: torch.dtype
    batch_dim: int | None
    seq_dim: int | None


@dataclass(frozen=True)
class Segment:
    """A contiguous run of the graph: one repeated layer, or the glue before, between and after the layers.

    `kind` is "layer" or "glue"; layers with equal `class_id` have the same structure and so the same prices and
    strategies. `parameters` are canonical names used inside. Execution order is the order of `TracedModel.segments`.
    """

    index: int
    kind: str
    path: str
    class_id: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class TracedModel:
    """A captured model. See the module docstring for what its graph promises.

    signature    how the user's call maps to `inputs`
    outputs      names of the graph's outputs in order ("loss", "logits", ...); `out_spec` rebuilds the user's type
    loss         index of the scalar loss among the outputs, or None
    ties         alias -> canonical name for parameters that are one tensor under several names
    seq_range    sequence lengths the graph is valid for (None: no upper end); branches in the model's code narrow it
    unknown_buffers  buffers of a meta-built model whose values could not be recomputed: fine to plan, not to train
    repeated_layers  paths of layers that were not run, but filled in from an equal one
    capture_s    seconds spent capturing, imports excluded
    notices      what capture had to assume or could not keep, one sentence each, for the report
    """

    graph_module: fx.GraphModule
    batch: sympy.Symbol
    seq: sympy.Symbol
    inputs: tuple[InputSpec, ...]
    signature: CallSignature
    outputs: tuple[str, ...]
    out_spec: Any
    loss: int | None
    segments: tuple[Segment, ...]
    parameters: Mapping[str, ParameterSpec]
    buffers: Mapping[str, ParameterSpec]
    ties: Mapping[str, str]
    fingerprint: str
    seq_range: tuple[int, int | None] = (1, None)
    capture_s: float = 0.0
    unknown_buffers: tuple[str, ...] = ()
    repeated_layers: tuple[str, ...] = ()
    notices: tuple[str, ...] = field(default_factory=tuple)

    @cached_property
    def layers(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.kind == "layer")

    def nodes_of(self, segment: Segment) -> Iterator[fx.Node]:
        """The call_function nodes of a segment, in execution order."""
        return (
            n for n in self.graph_module.graph.nodes if n.op == "call_function" and n.meta["segment"] == segment.index
        )

    def nodes_by_segment(self) -> list[list[fx.Node]]:
        """`nodes_of` every segment, in one walk over the graph."""
        nodes: list[list[fx.Node]] = [[] for _ in self.segments]
        for node in self.graph_module.graph.nodes:
            if node.op == "call_function":
                nodes[node.meta["segment"]].append(node)
        return nodes

    @property
    def parameter_count(self) -> int:
        """Unique parameters (a tied one counts once)."""
        return sum(p.numel for p in self.parameters.values())


@dataclass(frozen=True)
class ParameterShard:
    """What one rank holds of a parameter: the slice of the global tensor that `placement` gives it over tp.

    `grad_partial`: axes over which it is replicated, but each rank sees only a summand of its gradient (a norm under
    sequence sharding, a per-head norm; over cp every weight): sum over these axes once a step.
    """

    name: str
    placement: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    grad_partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageGraph:
    """One pipeline stage after all passes, the same for every dp and tp position.

    Placeholders of `graph_module` are `receives` (boundary tensors, positional, in order), then `inputs` (model inputs,
    by keyword). It returns a tuple: `sends` in order, or on the last stage `outputs`. `parameters` and `buffers` are
    keyed by attribute path in `graph_module`, whose tensors still are the user's global ones. `unapplied`: overlaps of
    the plan that could not be had, as (layer, name, reason), of all stages.
    """

    index: int
    graph_module: fx.GraphModule
    receives: tuple[str, ...]
    inputs: tuple[str, ...]
    sends: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, ParameterShard]
    buffers: Mapping[str, str]
    unapplied: tuple[tuple[str, str, str], ...] = ()
