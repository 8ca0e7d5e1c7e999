"""Prices of a captured model's blocks for (tp, sequence sharding, micro-batch): block ILPs solved once, then re-used.

Layout re-use over micro-batches (a micro-batch of 1 over cp 2 is half a one): for a fixed layout the cost is affine in
the tokens of a rank, so the least cost is concave in them, and a layout that is optimal at two sizes is optimal between
them. Sizes between two that agree are therefore not solved. (A roofline kink of a weight-bound matmul is not affine; it
moves an op's price, not which letter it shards.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from fractions import Fraction
from functools import cached_property

import torch
from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.attention_bytes import AttentionBytes, least_moved
from autopar.cost_model.batch_free import batch_free_s
from autopar.cost_model.block_layout import BlockWork, block_work, price_work, replicated
from autopar.cost_model.block_measures import BlockFormulas, BlockMeasures
from autopar.cost_model.block_prices import BlockPrices, LayerPrice, Layout, SolverCounts
from autopar.cost_model.block_problem import Block, NodeStrategy, solve_layout
from autopar.cost_model.comm_cost import GroupCost
from autopar.cost_model.compute import Machine
from autopar.cost_model.memory import LayerBytes
from autopar.cost_model.op_facts import ElementSizes
from autopar.cost_model.pinned_layers import pinned_parameters
from autopar.cost_model.run_layout import Unit
from autopar.cost_model.run_price import attention_over_context
from autopar.cost_model.sharding_rules import LOSSES
from autopar.cost_model.solver import SolverPolicy
from autopar.cost_model.strategy_table import attention_over_sequence, strategy_table
from autopar.errors import InfeasiblePlanError
from autopar.graph_walks import repeated_for_attention
from autopar.ir import Segment, TracedModel
from autopar.mesh import Degrees
from autopar.placement import Placement, Shard

__all__ = ["ModelPrices"]

_SDPA = "scaled_dot_product_attention"

_STRIDE = 16
"""How far beyond a size that is asked for the next layout is solved."""


class ModelPrices:
    """Blocks of `traced` and their prices on one cluster; `group_of(tp)` is the cost of a tp group."""

    def __init__(
        self, traced: TracedModel, machine: Machine, activation: torch.dtype, seq_len: int,
        module_pins: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.traced, self.machine, self.seq_len = traced, machine, seq_len
        self.policy = SolverPolicy()
        captured = max(traced.parameters.values(), key=lambda p: p.numel).dtype
        self._sizes = sizes = ElementSizes(captured, activation)
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
        self._pins = pinned_parameters(traced, module_pins)
        self._tables: dict[int, Mapping[fx.Node, Sequence[NodeStrategy]]] = {}
        self._measures: dict[tuple[str, int, int], BlockMeasures] = {}
        self._layouts: dict[tuple[str, int, bool], dict[Fraction, Layout]] = defaultdict(dict)
        self._batch_free_s: dict[int, float] = {}
        self._borders: dict[tuple[int, int], float] = {}
        self._prices: dict[tuple[int, int, bool, int], BlockPrices] = {}

    def on_machine(self, machine: Machine) -> ModelPrices:
        """The same blocks on other devices, in the layouts that are or will be found here: a plan has one layout."""
        other = copy(self)
        other.machine, other._prices, other._batch_free_s = machine, {}, {}
        return other

    def under(self, policy: SolverPolicy) -> ModelPrices:
        """The same prices, of which what is not known yet is found by `policy`."""
        other = copy(self)
        other.policy = policy
        return other

    def in_layout(self, layout: Layout, degrees: Degrees, sequence_sharding: bool, micro_batch: int) -> ModelPrices:
        """The same blocks where the layout of one partition is given, not found."""
        other, size = copy(self), Fraction(micro_batch, degrees.cp)
        other._prices, other._layouts = {}, defaultdict(dict)
        for block in (self.glue, *self.blocks.values()):
            own = {node: layout[node] for node in block.nodes if node in layout}
            other._layouts[block.name, degrees.tp, sequence_sharding][size] = own
        return other

    def strategies(self, tp: int) -> Mapping[fx.Node, Sequence[NodeStrategy]]:
        if tp not in self._tables:
            wanted = {n.meta["segment"] for block in (*self.blocks.values(), self.glue) for n in block.nodes}
            table = strategy_table(self.traced, tp, self.seq_len, segments=wanted)
            self._tables[tp] = {n: [(s.inputs, s.output) for s in rows] for n, rows in table.items()}
        return self._tables[tp]

    def tp_is_legal(self, tp: int) -> bool:
        """True if every attention can shard its heads and every layer class (without layers: the model) has a weight to
        shard."""
        if tp == 1:
            return True
        table = self.strategies(tp)
        for block in self.blocks.values() or (self.glue,):
            attentions = [n for n in block.nodes if op_name(n) == _SDPA]
            if not all(any(out.is_shard and out.dim == 1 for _, out in table[n]) for n in attentions):
                return False
            weights = [n for n in block.nodes if n.op == "get_attr" and len(n.meta["shape"]) >= 2]
            if not any(out.is_shard for n in weights for _, out in table[n]):
                return False
        return True

    def exchanges(self, cp: int, tp: int) -> tuple[str, ...]:
        """Kinds of attention over a sequence cut over cp that run: none if some attention needs all keys on a rank (a
        mask, dropout) or an op cannot be cut; all-to-all needs heads for every rank."""
        if not self._cuts_keys:
            return ()
        spread = all(h % tp == 0 and h // tp % cp == 0 for h in self._head_counts)
        return ("ring", "all-gather", "all-to-all") if spread else ("ring", "all-gather")

    @cached_property
    def _cuts_keys(self) -> bool:
        """True if every attention has a kernel that goes round the ranks for its keys."""
        found = [attention_over_sequence(n) for n in self._attentions()]
        return bool(found) and all(options and options[0].inputs[1] == Shard(2) for options in found)

    @cached_property
    def attention_bytes(self) -> list[tuple[int, float, float]]:
        """(layers, keys and values, queries) of every attention of a layer class: least bytes of one sequence."""
        found = []
        for c, block in self.blocks.items():
            measures = self.measures(c, 1)
            attentions = (node for node in block.nodes if op_name(node) == _SDPA)
            found += [(self.repeats[c], *least_moved(node, measures)) for node in attentions]
        return found

    @cached_property
    def _head_counts(self) -> set[int]:
        """Numbers of query heads and of key heads."""
        return {h for node in self._attentions() for h in (_heads_of(node, 0), _heads_of(node, 1))}

    def _attentions(self) -> list[fx.Node]:
        return [n for block in (*self.blocks.values(), self.glue) for n in block.nodes if op_name(n) == _SDPA]

    def heads(self) -> tuple[int, ...]:
        """Numbers of attention heads that occur in the layers."""
        return tuple(sorted({_heads_of(n, 0) for n in self._attentions()}))

    def measures(self, name: str, micro_batch: int, cp: int = 1) -> BlockMeasures:
        key = (name, micro_batch, cp)
        if key not in self._measures:
            self._measures[key] = self._formulas[name].at(micro_batch, self.seq_len // cp)
        return self._measures[key]

    def single_rank_seconds(self, micro_batch: int) -> tuple[float, float]:
        """(seconds, kernel launches in seconds) of forward and backward of the whole model on one rank: the analytic
        lower bound of any layout over tp ranks is (seconds - launches) / tp + launches."""
        parts = [(self.repeats.get(name, 1), *of) for name, of in self.single_rank_parts(micro_batch).items()]
        return sum(n * seconds for n, seconds, _ in parts), sum(n * launches for n, _, launches in parts)

    def single_rank_parts(self, micro_batch: int) -> dict[str, tuple[float, float]]:
        """(seconds, launches) as above of a layer of each class, "prologue" and "epilogue"."""
        price = self.single_rank(micro_batch)
        units = {c: layer.unit for c, layer in price.layers.items()}
        units |= {"prologue": price.prologue, "epilogue": price.epilogue}
        return {
            name: (unit.price.forward_s + unit.price.backward_s, self._launches_s(unit)) for name, unit in units.items()
        }

    def _launches_s(self, unit: Unit) -> float:
        return sum(float(self.machine.launches_s(part).sum()) for part in (unit.work.forward, unit.work.backward))

    def single_rank(self, micro_batch: int) -> BlockPrices:
        """Prices without any sharding."""
        return self.at(1, 1, False, micro_batch, GroupCost(1, float("inf"), 0.0))

    @cached_property
    def repeats(self) -> Mapping[str, int]:
        """Layers of each class."""
        return Counter(segment.class_id for segment in self.traced.layers)

    def batch_free_s(self, cp: int) -> float:
        """At least the seconds a micro-batch spends on tensors that have no batch dim, such as positions, over cp."""
        if cp not in self._batch_free_s:
            blocks = (*self.blocks.values(), self.glue)
            self._batch_free_s[cp] = sum(
                self.repeats.get(b.name, 1)
                * batch_free_s(self.traced.batch, self.measures(b.name, 1, cp), self.machine)
                for b in blocks
            )
        return self._batch_free_s[cp]

    def at(self, tp: int, cp: int, sequence_sharding: bool, micro_batch: int, group: GroupCost) -> BlockPrices:
        """Prices; `group` is the tp group. Raises InfeasiblePlanError if a pinned placement fits no strategy."""
        key = (tp, cp, sequence_sharding, micro_batch)
        if key not in self._prices:
            self._prices[key] = self._price(tp, cp, sequence_sharding, micro_batch, group)
        return self._prices[key]

    def _price(self, tp: int, cp: int, sp: bool, micro_batch: int, group: GroupCost) -> BlockPrices:
        layout: Layout = {}
        for block in (self.glue, *self.blocks.values()):
            fixed = {n: s[1] for n, s in layout.items() if n.op == "get_attr"} | self._pins
            layout |= self._layout(block, tp, cp, sp, micro_batch, group, fixed)

        def work(name: str, nodes: Sequence[fx.Node]) -> BlockWork:
            measures = self.measures(name, micro_batch, cp)
            found = block_work(self.traced, nodes, layout, measures, tp=tp, sequence_sharding=sp)
            return attention_over_context(found, cp)

        def unit(done: BlockWork, held: Mapping[str, float], **attention: float) -> Unit:
            trained = {name: n for name, n in held.items() if self.traced.parameters[name].requires_grad}
            whole = sum(held.values())
            return Unit(done, price_work(done, self.machine, group), whole, frozen=whole - sum(trained.values()),
                        sizes=trained, **attention)  # fmt: skip

        border = self.border_bytes(micro_batch, cp) / (tp if sp else 1)
        layers = {}
        for c, block in self.blocks.items():
            done, reads = (
                work(c, block.nodes),
                AttentionBytes.of(block.nodes, layout, self.measures(c, micro_batch, cp), tp),
            )
            held = self._local_parameters(block.nodes, layout, tp)
            layers[c] = LayerPrice(
                unit(done, held, key_value_bytes=reads.key_values, query_bytes=reads.queries),
                LayerBytes(done.saved_bytes, done.working_bytes, border, reads.core_alone, reads.core, reads.products),
                reads.queries > 0,
            )
        first, last = (self._local_parameters(nodes, layout, tp) for nodes in (self.prologue, self.epilogue))
        tied = {name: n for name, n in last.items() if name in first}
        return BlockPrices(
            layers, unit(work("glue", self.prologue), first), unit(work("glue", self.epilogue), last),
            sum(tied.values()), sum(n for name, n in tied.items() if not self.traced.parameters[name].requires_grad),
            border, self._logits(layout, micro_batch, cp, tp), layout,
        )  # fmt: skip

    def _local_parameters(self, nodes: Sequence[fx.Node], layout: Layout, tp: int) -> dict[str, float]:
        """Elements on one rank of the parameters that `nodes` read."""
        found = {}
        for node in dict.fromkeys(n for user in nodes for n in (*user.all_input_nodes, user)):
            spec = self.traced.parameters.get(str(node.target)) if node.op == "get_attr" else None
            if spec is not None:
                placed = layout.get(node)
                found[spec.name] = spec.numel / (tp if placed is not None and placed[1].is_shard else 1)
        return found

    def _logits(self, layout: Layout, micro_batch: int, cp: int, tp: int) -> float:
        """Local elements of what the loss reads."""
        measures = self.measures("glue", micro_batch, cp)
        total = 0.0
        for node in self.epilogue:
            if op_name(node) in LOSSES and node in layout and node.all_input_nodes[0] in measures.tensor_bytes:
                source, wants = node.all_input_nodes[0], layout[node][0][0]
                elements = measures.tensor_bytes[source] / self._sizes.of(source.meta["dtype"])
                total = max(total, elements / (tp if wants is not None and wants.is_shard else 1))
        return total

    def border_bytes(self, micro_batch: int, cp: int = 1) -> float:
        """Bytes of what leaves a layer with gradient, the residual stream, whole over tp."""
        if (micro_batch, cp) not in self._borders:
            held = (self._border_bytes(block, micro_batch, cp) for block in self.blocks.values())
            self._borders[micro_batch, cp] = max(held, default=0.0)
        return self._borders[micro_batch, cp]

    def _border_bytes(self, block: Block, micro_batch: int, cp: int) -> float:
        inside, made = set(block.nodes), self.measures(block.name, micro_batch, cp).tensor_bytes
        return sum(
            made[n]
            for n in block.nodes
            if n.op == "call_function" and n.meta.get("grad") and any(u not in inside for u in n.users)
        )

    def _layout(
        self, block: Block, tp: int, cp: int, sp: bool, micro_batch: int, group: GroupCost,
        fixed: Mapping[fx.Node, Placement],
    ) -> Layout:  # fmt: skip
        if tp == 1:
            return replicated(block.nodes)
        known, own = self._layouts[block.name, tp, sp], Fraction(micro_batch, cp)
        if own not in known:
            for size in _probes(own, known, self.seq_len):
                known[size] = self._solve(block, tp, sp, size, group, fixed)
        if own not in known:
            below, above = (pick(s for s in known if (s < own) == less) for pick, less in ((max, True), (min, False)))
            same = known[below] == known[above]
            known[own] = known[below] if same else self._solve(block, tp, sp, own, group, fixed)
        return known[own]

    def _solve(
        self, block: Block, tp: int, sp: bool, size: Fraction, group: GroupCost, fixed: Mapping[fx.Node, Placement]
    ) -> Layout:
        measures = self.measures(block.name, size.numerator, size.denominator)
        found = solve_layout(self.traced, block, self.strategies(tp), measures, fixed,
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


def _probes(size: Fraction, known: Mapping[Fraction, Layout], seq_len: int) -> tuple[Fraction, ...]:
    """What to solve so that solved sizes lie on both sides of `size`, or it is one: beyond the known ones a size far
    out, since the layouts of all between follow if it agrees."""
    if not known:
        return (size,)
    if min(known) < size < max(known):
        return ()
    far = size * _STRIDE if size > max(known) else size / _STRIDE
    return (far if seq_len % far.denominator == 0 else size,)


def _heads_of(attention: fx.Node, argument: int) -> int:
    """Of keys and values as they are sent: before their heads are repeated."""
    source = attention.args[argument]
    assert isinstance(source, fx.Node)
    source = repeated_for_attention(source) or source
    size = source.meta["shape"][1]
    return int(
        size if isinstance(size, int) else size.as_coeff_Mul()[0]
    )  # heads of every row, if rows are in there too


def _positions(traced: TracedModel) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(traced.graph_module.graph.nodes)}
