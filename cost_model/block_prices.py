"""What the blocks of a model cost in one layout, and what finding it took: the answers of `ModelPrices`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.cost_model.block_ilp import BlockSolution
from autopar.cost_model.block_problem import NodeStrategy
from autopar.cost_model.memory import LayerBytes
from autopar.cost_model.pipeline_ilp import PipelineSolution
from autopar.cost_model.run_layout import Unit

__all__ = ["BlockPrices", "LayerPrice", "Layout", "SolverCounts"]

Layout = dict[fx.Node, NodeStrategy]


@dataclass
class SolverCounts:
    """Totals over all ILPs of a search. `block_gap`: the largest relative distance of a block's layout from its bound;
    `solvers` and `notes`: who answered, and why another did not."""

    variables: int = 0
    constraints: int = 0
    largest_variables: int = 0
    solves: int = 0
    solve_s: float = 0.0
    block_gap: float = 0.0
    solvers: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, solution: BlockSolution | PipelineSolution) -> None:
        self.variables += solution.variables
        self.constraints += solution.constraints
        self.largest_variables = max(self.largest_variables, solution.variables)
        self.solves += 1
        self.solve_s += solution.solve_s
        if solution.solver:
            self.solvers[solution.solver] = None
        self.notes |= dict.fromkeys(solution.notes)


@dataclass(frozen=True, eq=False)
class LayerPrice:
    """A layer class: what one rank does, and the bytes it keeps by mode of recomputation. Parameters are local."""

    unit: Unit
    bytes: LayerBytes
    has_attention: bool


@dataclass(frozen=True, eq=False)
class BlockPrices:
    """One model at one (tp, cp, sequence sharding, micro-batch). `border_bytes`: local bytes of the residual stream;
    `logits`: local elements; `layout` covers the first layer of each class and the glue. `tied_parameters` (and
    `tied_frozen`, of them) are counted in both ends: a rank that holds both holds them once."""

    layers: Mapping[str, LayerPrice]
    prologue: Unit
    epilogue: Unit
    tied_parameters: float
    tied_frozen: float
    border_bytes: float
    logits: float
    layout: Layout = field(repr=False, default_factory=dict)
