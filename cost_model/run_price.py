"""Step time of a training run whose layout is given, by the formula of `step_price`: equal layers, one mode of
recomputation, stages as frameworks cut them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_model.block_layout import BlockWork, price_work
from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.constant_table import GenerationConstants
from autopar.cost_model.kernels import Kernels
from autopar.cost_model.machine import Machine
from autopar.cost_model.memory import mixed_recipe
from autopar.cost_model.run_layout import RunLayout, StackTraits, Unit
from autopar.cost_model.step_price import StepPrice, add_parts, exposed_reduction_s
from autopar.specs import ClusterSpec

__all__ = [
    "RunLayout",
    "RunWork",
    "StackTraits",
    "attention_over_context",
    "exposed_reduction_s",
    "price_run",
    "stage_layers",
]


@dataclass(frozen=True)
class RunWork:
    """What one layer and both ends do at local shapes, and what they hold. Parameters are local to a tp rank.

    key_value_bytes, query_bytes  one rank's keys and values, and queries, of a micro-batch in a layer
    logits, head_input, stream    elements on one rank; `stream` is the residual stream, whole
    weight_shapes, head_weight    elements of the weight matrices of a layer and of the head
    scores                        elements of the score matrices of a layer's attention
    attention_core_bytes          what selective recomputation of the attention core does not keep
    op_kept_bytes, product_bytes  what op-level recomputation keeps: attention and every second product, or all
    """

    layer: BlockWork
    prologue: BlockWork
    epilogue: BlockWork
    layer_parameters: float
    prologue_parameters: float
    epilogue_parameters: float
    border_bytes: float
    key_value_bytes: float
    query_bytes: float
    logits: float = 0.0
    head_input: float = 0.0
    stream: float = 0.0
    weight_shapes: tuple[float, ...] = ()
    attention_core_bytes: float = 0.0
    op_kept_bytes: float = 0.0
    product_bytes: float = 0.0
    scores: float = 0.0
    head_weight: float = 0.0


def stage_layers(layers: int, pp: int, virtual: int) -> tuple[int, ...]:
    """Layers of each stage: even; or with embedding and head counted as a layer each, if only that comes out even; else
    the remainder goes one each to the first stages."""
    if layers % (pp * virtual) and pp > 2 and (layers + 2) % (pp * virtual) == 0:
        each = (layers + 2) // pp
        return (each - 1, *(each for _ in range(pp - 2)), each - 1)
    return tuple(layers // pp + (s < layers % pp) for s in range(pp))


def price_run(
    work: RunWork, layout: RunLayout, cluster: ClusterSpec, traits: StackTraits, machine: Machine,
    constants: GenerationConstants,
) -> dict[str, float]:  # fmt: skip
    """Seconds of one step by part, "total" among them."""
    parts = _Run(work, layout, cluster, traits, machine, constants).parts()
    return parts | {"total": sum(parts.values())}


class _Run:
    """Units and stages of a run of equal layers."""

    def __init__(
        self, work: RunWork, layout: RunLayout, cluster: ClusterSpec, traits: StackTraits, machine: Machine,
        constants: GenerationConstants,
    ) -> None:  # fmt: skip
        self.work, self.layout, d = work, layout, layout.degrees
        recipe = mixed_recipe(traits.gradient_bytes)
        self.price = StepPrice(layout, cluster, traits, machine, constants, recipe)
        tp, plain = group_cost(cluster, d, "tp"), machine.in_16_bits()
        self.layer = Unit(work.layer, price_work(work.layer, machine, tp), work.layer_parameters, work.key_value_bytes,
                          work.query_bytes)  # fmt: skip
        self.each = self.price.layer(self.layer, layout.recompute)
        self.ends = [
            (0, Unit(work.prologue, price_work(work.prologue, plain, tp), work.prologue_parameters)),
            (d.pp - 1, Unit(work.epilogue, price_work(work.epilogue, plain, tp), work.epilogue_parameters)),
        ]

    def parts(self) -> dict[str, float]:
        counts = stage_layers(self.layout.layers, self.layout.degrees.pp, self.layout.virtual_stages)
        numbered = list(enumerate(counts))
        return self.price.step([self._stage(s, n) for s, n in numbered], [self._tail(s, n) for s, n in numbered],
                               [self._weights_s(s, n) for s, n in numbered])  # fmt: skip

    def _stage(self, stage: int, count: int) -> dict[str, float]:
        ends = [self.price.end(unit) for here, unit in self.ends if here == stage]
        return add_parts((count, self.each), *ends, {"pp": self.price.send_s(self.work.border_bytes)})

    def _tail(self, stage: int, count: int) -> dict[str, float]:
        ends = [unit for here, unit in self.ends if here == stage]
        parameters = count * self.layer.parameters + sum(unit.parameters for unit in ends)
        price = self.layer.price
        step_tp_s = count * price.step_communication_s + sum(unit.price.step_communication_s for unit in ends)
        parts = count + bool(ends) if self.price.traits.fully_sharded else 1
        return self.price.tail(parameters, count * (price.forward_s + price.forward_communication_s),
                               count * (price.backward_s + price.backward_communication_s), step_tp_s,
                               parts)  # fmt: skip

    def _weights_s(self, stage: int, count: int) -> float:
        ends = sum(self.price.weights_s(unit) for here, unit in self.ends if here == stage)
        return count * self.price.weights_s(self.layer) + ends


def attention_over_context(work: BlockWork, cp: int) -> BlockWork:
    """The work of one cp rank: its queries meet the keys of the whole sequence (balanced: causality halves it)."""

    def longer(kernels: Kernels) -> Kernels:
        return Kernels(
            row._replace(n=row.n * cp) if attends else row
            for row, attends in zip(kernels.rows, kernels.is_attention, strict=True)
        )

    return replace(work, forward=longer(work.forward), backward=longer(work.backward)) if cp > 1 else work
