"""Peak bytes of one rank's stage under a plan, every storage followed: what a dry run of the plan finds.

The graph of the stage is laid out over tp as `cost_model.propagation` says, conversions of placement are ops of their
own, layers are cut into what is kept and what runs again (`autopar.recomputation`), and the whole is run on storages
(`cost_model.liveness`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.cost_model.autograd_ops import AutogradOp, Gradient, Key, Size, lower
from autopar.cost_model.liveness import Footprint, Piece, footprint
from autopar.cost_model.op_facts import numel
from autopar.cost_model.propagation import Propagation, propagate
from autopar.graph_walks import stage_of_segments
from autopar.ir import TracedModel
from autopar.placement import REPLICATE, Placement
from autopar.plan import Plan
from autopar.recomputation import attention_cores, kept_products, recomputed_together

__all__ = ["stage_footprint"]

_GLUE = -1


def stage_footprint(traced: TracedModel, plan: Plan, stage: int = 0, *, gradients_exist: bool = True) -> Footprint:
    """Of one micro-batch on a rank of `stage`, beside parameters, their gradients, inputs and what was received.

    traced: prepared, with the summed loss as its only output. Raises PlanMismatchError if the plan does not fit.
    """
    return _Stage(traced, plan, stage).footprint(gradients_exist)


class _Stage:
    def __init__(self, traced: TracedModel, plan: Plan, stage: int) -> None:
        self.traced, self.plan = traced, plan
        self.tp = plan.degrees.tp
        self.layout: Propagation | None = propagate(traced, plan) if self.tp > 1 else None
        home = stage_of_segments(traced.segments, plan)
        graph = traced.graph_module.graph
        self.nodes: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_function" and home[node.meta["segment"]] == stage:
                self.nodes[node.meta["segment"]].append(node)
        self.parameters = frozenset(n for n in graph.nodes if n.op == "get_attr")
        self.bytes = self._global_bytes(graph)
        self.layers = [s for s in traced.layers if home[s.index] == stage]

    def footprint(self, gradients_exist: bool) -> Footprint:
        return footprint(self._pieces(), parameters=self.parameters, gradients_exist=gradients_exist)

    def _global_bytes(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """Evaluated once a distinct shape: a large model has few."""
        sizes = {self.traced.batch: self.plan.micro_batch, self.traced.seq: self.plan.seq_len // self.plan.degrees.cp}
        known: dict[object, float] = {}
        found = {}
        for node in graph.nodes:
            shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
            if dtype is None:
                continue
            if shape not in known:
                known[shape] = float(numel(shape).subs(sizes))
            found[node] = known[shape] * dtype.itemsize
        return found

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _pieces(self) -> list[Piece]:
        layer_of = {s.index: s for s in self.layers}
        together = {s.index: group for group in recomputed_together(self.traced.segments, self.plan) for s in group}
        pieces: list[Piece] = []
        done: set[int] = set()
        for index in sorted(self.nodes):
            if index in done:
                continue
            if index not in layer_of:
                pieces.append(Piece(self._ops(self.nodes[index]), _GLUE))
            elif index in together:
                group = [s.index for s in together[index] if s.index in self.nodes]
                done |= set(group)
                pieces.append(Piece(self._ops([n for i in group for n in self.nodes[i]]), index, True))
            else:
                pieces += self._layer(index, self.plan.checkpoint_mode(layer_of[index].path))
        return pieces

    def _layer(self, index: int, mode: str) -> list[Piece]:
        nodes = self.nodes[index]
        ops = self._ops(nodes)
        if mode == "selective-ops":
            kept, unread = kept_products(nodes)
            return [Piece(ops, index, True, frozenset(kept), frozenset(unread))]
        if mode != "selective":
            return [Piece(ops, index)]
        core = {node: i for i, nodes_ in enumerate(attention_cores(nodes)) for node in nodes_}
        runs: list[tuple[int, list[AutogradOp]]] = []
        for op in ops:
            here = core.get(op.node, _GLUE)
            if not runs or runs[-1][0] != here:
                runs.append((here, []))
            runs[-1][1].append(op)
        return [Piece(run, index, number != _GLUE) for number, run in runs]

    # --- ops at local sizes -------------------------------------------------------------------------------------------

    def _ops(self, nodes: Sequence[fx.Node]) -> list[AutogradOp]:
        if self.layout is None:
            return lower(nodes, self.bytes.__getitem__)
        return list(self._laid_out(nodes, self.layout))

    def _laid_out(self, nodes: Sequence[fx.Node], layout: Propagation) -> Iterator[AutogradOp]:
        """Ops with the conversions of their inputs before them; readers that want the same share one."""
        made: dict[tuple[fx.Node, Placement, int], Key] = {}
        for node in nodes:
            wanted = self._wanted(node, layout)
            renamed: dict[Key, Key] = {}
            for source, want in wanted.items():
                have, segment = layout.seen_by(source, node), node.meta["segment"]
                outside = source.op == "call_function" and source.meta["segment"] != segment
                base: Key = (source, "leaving") if outside and self._changes_outside(source, layout) else source
                unchanged = have == want or (have.is_replicated and want.is_replicated and not source.meta["grad"])
                if not unchanged and source not in self.parameters:  # those are summed once a step
                    key = (source, want, segment)
                    if key not in made:
                        made[key] = (source, f"as {want}", segment)
                        yield self._conversion(source, base, have, want, made[key])
                    base = made[key]
                renamed[source] = base
            for op in lower([node], self._size(layout, wanted)):
                yield _with_inputs(op, renamed)
            if self._changes_outside(node, layout):
                yield self._conversion(node, node, layout.placement[node], layout.leaving[node], (node, "leaving"))

    @staticmethod
    def _changes_outside(node: fx.Node, layout: Propagation) -> bool:
        return node in layout.leaving and layout.leaving[node] != layout.placement[node]

    def _wanted(self, node: fx.Node, layout: Propagation) -> dict[fx.Node, Placement]:
        if node not in layout.strategy:
            return {}
        pairs = zip(node.all_input_nodes, layout.strategy[node].inputs, strict=True)
        return {source: want for source, want in pairs if want is not None}

    def _size(self, layout: Propagation, wanted: Mapping[fx.Node, Placement]) -> Size:
        def size(node: fx.Node) -> float:
            return self._local(node, wanted.get(node, layout.placement.get(node, REPLICATE)))

        return size

    def _local(self, node: fx.Node, placement: Placement) -> float:
        return self.bytes[node] / (self.tp if placement.is_shard else 1)

    def _conversion(self, source: fx.Node, base: Key, have: Placement, want: Placement, key: Key) -> AutogradOp:
        moves = not (have.is_replicated and want.is_replicated)
        gradient = Gradient(self._local(source, have)) if source.meta.get("grad") else None
        return AutogradOp(inputs=(base,), output=key, nbytes=self._local(source, want), view=not moves,
                          gradients=(gradient,), node=source)  # fmt: skip


def _with_inputs(op: AutogradOp, renamed: Mapping[Key, Key]) -> AutogradOp:
    if not renamed:
        return op
    return replace(
        op, inputs=tuple(renamed.get(v, v) for v in op.inputs), saves=tuple(renamed.get(v, v) for v in op.saves)
    )
