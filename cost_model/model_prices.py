"""Prices of a captured model's blocks for (tp, sequence sharding, micro-batch): block ILPs solved once, then re-used.

Layout re-use over micro-batches: for a fixed layout the cost is affine in the micro-batch, so the least cost is
concave in it, and a layout that is optimal at two sizes is optimal between them. A second size is therefore solved at
the far end of the range, and sizes between two that agree are not solved. (A roofline kink of a weight-bound matmul is
not affine; it moves an op's price, not which letter it shards.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.block_ilp import BlockSolution
from autopar.cost_model.block_layout import LayoutPrice, price_layout, replicated
from autopar.cost_model.block_measures import BlockFormulas, BlockMeasures
from autopar.cost_model.block_problem import Block, NodeStrategy, solve_layout
from autopar.cost_model.comm_cost import GroupCost
from autopar.cost_model.compute import Machine
from autopar.cost_model.op_facts import ElementSizes
from autopar.cost_model.pipeline_ilp import PipelineSolution
from autopar.cost_model.solver import SolverPolicy
from autopar.cost_model.strategy_table import strategy_table
from autopar.errors import InfeasiblePlanError
from autopar.ir import Segment, TracedModel
from autopar.placement import Placement, parse_placement
from autopar.plan import match_path

__all__ = ["BlockPrices", "ModelPrices", "SolverCounts"]

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


@dataclass(frozen=True)
class BlockPrices:
    """One model at one (tp, sequence sharding, micro-batch). `border_bytes`: local bytes of the residual stream;
    `layout` covers the first layer of each class and the glue."""

    layers: Mapping[str, LayoutPrice]
    prologue: LayoutPrice
    epilogue: LayoutPrice
    border_bytes: float
    layout: Layout = field(repr=False, default_factory=dict)


class ModelPrices:
    """Blocks of `traced` and their prices on one cluster; `group_of(tp)` is the cost of a tp group."""

    def __init__(
        self, traced: TracedModel, machine: Machine, activation: torch.dtype, seq_len: int,
        module_pins: Mapping[str, str], policy: SolverPolicy | None = None,
    ) -> None:  # fmt: skip
        self.traced, self.machine, self.seq_len = traced, machine, seq_len
        self.policy = policy or SolverPolicy()
        captured = max(traced.parameters.values(), key=lambda p: p.numel).dtype
        sizes = ElementSizes(captured, activation)
        self.counts = SolverCounts()
        self.classes: dict[str, Segment] = {}
        for segment in traced.layers:
            self.classes.setdefault(segment.class_id, segment)
        by_segment: dict[int, list[fx.Node]] = defaultdict(list)
        for node in traced.graph_module.graph.nodes:
            if node.op != "output":
                by_segment[node.meta["segment"]].append(node)
        self.blocks = {c: Block(c, tuple(by_segment[s.index])) for c, s in self.classes.items()}
        last = traced.layers[-1].index if traced.layers else -1
        glue = [n for s in traced.segments if s.kind == "glue" for n in by_segment[s.index]]
        self.glue = Block("glue", tuple(sorted(glue, key=_positions(traced).__getitem__)))
        self.prologue = tuple(n for n in self.glue.nodes if n.meta["segment"] < last)
        self.epilogue = tuple(n for n in self.glue.nodes if n.meta["segment"] >= last)
        self._formulas = {
            block.name: BlockFormulas(traced, block.nodes, sizes) for block in (*self.blocks.values(), self.glue)
        }
        self._pins = _pinned_parameters(traced, module_pins)
        self._tables: dict[int, Mapping[fx.Node, Sequence[NodeStrategy]]] = {}
        self._measures: dict[tuple[str, int], BlockMeasures] = {}
        self._layouts: dict[tuple[str, int, bool], dict[int, Layout]] = defaultdict(dict)
        self._prices: dict[tuple[int, bool, int], BlockPrices] = {}

    def strategies(self, tp: int) -> Mapping[fx.Node, Sequence[NodeStrategy]]:
        if tp not in self._tables:
            table = strategy_table(self.traced, tp, self.seq_len)
            self._tables[tp] = {n: [(s.inputs, s.output) for s in rows] for n, rows in table.items()}
        return self._tables[tp]

    def tp_is_legal(self, tp: int) -> bool:
        """True if every attention can shard its heads and every layer class has a weight to shard."""
        if tp == 1:
            return True
        table = self.strategies(tp)
        for block in self.blocks.values():
            attentions = [n for n in block.nodes if op_name(n) == "scaled_dot_product_attention"]
            if not all(any(out.is_shard and out.dim == 1 for _, out in table[n]) for n in attentions):
                return False
            weights = [n for n in block.nodes if n.op == "get_attr" and len(n.meta["shape"]) >= 2]
            if not any(out.is_shard for n in weights for _, out in table[n]):
                return False
        return bool(self.blocks)

    def heads(self) -> tuple[int, ...]:
        """Numbers of attention heads that occur in the layers."""
        nodes = (n for block in self.blocks.values() for n in block.nodes)
        attentions = (n for n in nodes if op_name(n) == "scaled_dot_product_attention")
        return tuple(sorted({int(n.args[0].meta["shape"][1]) for n in attentions if isinstance(n.args[0], fx.Node)}))

    def measures(self, name: str, micro_batch: int) -> BlockMeasures:
        key = (name, micro_batch)
        if key not in self._measures:
            self._measures[key] = self._formulas[name].at(micro_batch, self.seq_len)
        return self._measures[key]

    def single_rank_seconds(self, micro_batch: int) -> tuple[float, float]:
        """(seconds, kernel launches in seconds) of forward and backward of the whole model on one rank: the analytic
        lower bound of any layout over tp ranks is (seconds - launches) / tp + launches."""
        price = self.single_rank(micro_batch)
        repeats = self.repeats()
        total = sum(repeats[c] * (p.forward_s + p.backward_s) for c, p in price.layers.items())
        total += sum(p.forward_s + p.backward_s for p in (price.prologue, price.epilogue))
        launches = 0.0
        for block in (*self.blocks.values(), self.glue):
            kernels = sum(op.kind != "view" for op in self.measures(block.name, micro_batch).sizes.values())
            launches += repeats.get(block.name, 1) * kernels * 2 * self.machine.launch_s
        return total, min(launches, total)

    def single_rank(self, micro_batch: int) -> BlockPrices:
        """Prices without any sharding."""
        return self.at(1, False, micro_batch, GroupCost(1, float("inf"), 0.0))

    def repeats(self) -> dict[str, int]:
        """Layers of each class."""
        counts: dict[str, int] = defaultdict(int)
        for segment in self.traced.layers:
            counts[segment.class_id] += 1
        return counts

    def at(
        self, tp: int, sequence_sharding: bool, micro_batch: int, group: GroupCost,
        micro_batches: tuple[int, ...] = (),
    ) -> BlockPrices:  # fmt: skip
        """Prices; `micro_batches` are all sizes the search may ask for (ascending), for layout re-use.

        Raises InfeasiblePlanError if a pinned placement fits no strategy.
        """
        key = (tp, sequence_sharding, micro_batch)
        if key not in self._prices:
            self._prices[key] = self._price(tp, sequence_sharding, micro_batch, group, micro_batches or (micro_batch,))
        return self._prices[key]

    def priced_sizes(self, tp: int, sequence_sharding: bool) -> list[int]:
        """Micro-batches whose prices are known."""
        return [size for degree, sharding, size in self._prices if (degree, sharding) == (tp, sequence_sharding)]

    def _price(self, tp: int, sp: bool, micro_batch: int, group: GroupCost, sizes: tuple[int, ...]) -> BlockPrices:
        layout: Layout = {}
        for block in (self.glue, *self.blocks.values()):
            fixed = {n: s[1] for n, s in layout.items() if n.op == "get_attr"} | self._pins
            layout |= self._layout(block, tp, sp, micro_batch, group, sizes, fixed)

        def price(name: str, nodes: Sequence[fx.Node]) -> LayoutPrice:
            return price_layout(self.traced, nodes, layout, self.measures(name, micro_batch), machine=self.machine,
                                group=group, sequence_sharding=sp)  # fmt: skip

        layers = {c: price(c, block.nodes) for c, block in self.blocks.items()}
        return BlockPrices(layers, price("glue", self.prologue), price("glue", self.epilogue),
                           self.border_bytes(micro_batch) / (tp if sp else 1), layout)  # fmt: skip

    def border_bytes(self, micro_batch: int) -> float:
        """Bytes of what leaves a layer with gradient, the residual stream, whole."""
        return max((self._border_bytes(block, micro_batch) for block in self.blocks.values()), default=0.0)

    def _border_bytes(self, block: Block, micro_batch: int) -> float:
        inside, made = set(block.nodes), self.measures(block.name, micro_batch).tensor_bytes
        return sum(
            made[n]
            for n in block.nodes
            if n.op == "call_function" and n.meta.get("grad") and any(u not in inside for u in n.users)
        )

    def _layout(
        self, block: Block, tp: int, sp: bool, micro_batch: int, group: GroupCost, sizes: tuple[int, ...],
        fixed: Mapping[fx.Node, Placement],
    ) -> Layout:  # fmt: skip
        if tp == 1:
            return replicated(block.nodes)
        known = self._layouts[block.name, tp, sp]
        if micro_batch not in known:
            ends = _around(micro_batch, sizes, known)
            for size in ends:
                if size not in known:
                    known[size] = self._solve(block, tp, sp, size, group, fixed)
            if micro_batch not in known and known[ends[0]] == known[ends[-1]]:
                known[micro_batch] = known[ends[0]]
            elif micro_batch not in known:
                known[micro_batch] = self._solve(block, tp, sp, micro_batch, group, fixed)
        return known[micro_batch]

    def _solve(
        self, block: Block, tp: int, sp: bool, micro_batch: int, group: GroupCost, fixed: Mapping[fx.Node, Placement]
    ) -> Layout:
        found = solve_layout(self.traced, block, self.strategies(tp), self.measures(block.name, micro_batch), fixed,
                             machine=self.machine, group=group, sequence_sharding=sp, policy=self.policy)  # fmt: skip
        if found is None:
            pins = ", ".join(sorted({str(n.target) for n in self._pins if n in set(block.nodes)}))
            raise InfeasiblePlanError(
                f"no sharding over tp={tp} connects" + (f" with the pinned placement of {pins}" if pins else ""),
                where=self.classes[block.name].path if block.name in self.classes else "prologue and epilogue",
                try_="free the pin" if pins else "tp=1",
            )
        layout, solution = found
        self.counts.add(solution)
        self.counts.block_gap = max(self.counts.block_gap, solution.cost_us / max(solution.bound_us, 1e-9) - 1)
        return layout


def _around(micro_batch: int, sizes: tuple[int, ...], known: Mapping[int, Layout]) -> tuple[int, ...]:
    """Sizes whose layouts decide `micro_batch`: itself at first, then the nearest solved ones at both sides, or the end
    of the range where there is none yet."""
    if not known:
        return (micro_batch,)
    below = [s for s in known if s < micro_batch] or [min(*sizes, micro_batch)]
    above = [s for s in known if s > micro_batch] or [max(*sizes, micro_batch)]
    return tuple(dict.fromkeys((max(below), min(above))))


def _positions(traced: TracedModel) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(traced.graph_module.graph.nodes)}


def _pinned_parameters(traced: TracedModel, pins: Mapping[str, str]) -> dict[fx.Node, Placement]:
    """Placements that module pins set: a pattern names a parameter, or a module and then its weights of 2 dims."""
    fixed: dict[fx.Node, Placement] = {}
    for pattern, text in pins.items():
        hit = False
        for node in traced.graph_module.graph.nodes:
            if node.op != "get_attr" or str(node.target) not in traced.parameters:
                continue
            name = str(node.target)
            whole = match_path(pattern, name)
            if whole or (len(node.meta["shape"]) >= 2 and match_path(pattern, name.rpartition(".")[0])):
                fixed[node], hit = parse_placement(text), True
        if not hit:
            raise InfeasiblePlanError(
                "the pin names no parameter and no module with a weight", where=f"pin {pattern}={text}",
                try_="a pattern such as model.layers.*.mlp.down_proj",
            )  # fmt: skip
    return fixed
