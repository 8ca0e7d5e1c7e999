"""Every collective of a step on one pipeline stage, from the plan: what communication is priced for, to be held against
what a rank really issues.

Read off the placements that the plan implies (`propagate`), without rewriting a graph:

- an argument that does not lie as its op wants costs one conversion a segment and micro-batch, forward and backward
- a recomputed layer repeats its forward conversions up to its last saved tensor, where torch stops, but for those of
  outputs that were kept
- a sum over a sharded vocabulary, attention over a cut sequence, and what crosses stages come on top
- once a step: gradients over dp, of replicated parameters over tp and cp, of tied parameters over their stages; the
  number of tokens and the loss
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import fx

from autopar.blocks import op_name
from autopar.cost_model.propagation import Propagation, propagate
from autopar.cost_model.second_runs import SecondRun, second_runs
from autopar.cost_model.sharded_units import ShardedUnits
from autopar.cost_model.sharding_rules import LOSSES
from autopar.cost_model.tensor_sizes import TensorSizes
from autopar.graph_walks import ancestors, input_only, output_node, repeated_for_attention, stage_of_segments
from autopar.ir import TracedModel
from autopar.placement import CONVERSIONS, REPLICATE, Placement, Shard
from autopar.plan import Plan

__all__ = ["Collectives", "rank_collectives", "step_collectives"]

_LOCAL = frozenset({"none", "slice", "pad", "keep_first"})
ATTENTION = "scaled_dot_product_attention"


Collectives = Mapping[tuple[str, str, str, int], int]
"""(purpose, kind, axis, bytes of the whole tensor) -> times a step. Purposes: "activations" (every micro-batch),
"boundary" (between stages; bytes of one rank), "gradients" (one row a sum, however it is cut into buckets), "control"
(tokens and loss)."""


def step_collectives(traced: TracedModel, plan: Plan, stage: int) -> Collectives:
    """The collectives one rank of `stage` issues in a step.

    traced: prepared, with the summed loss as its only output, as the step runs it (a mean cannot be cut over cp).
    Raises PlanMismatchError if the plan does not fit the model.
    """
    return _Stage(traced, plan, stage, _layouts(traced, plan)).collectives()


def rank_collectives(traced: TracedModel, plan: Plan, stages: Sequence[int]) -> Collectives:
    """Of a rank that runs several stages: gradients are summed together, each parameter's once however many of the
    stages read it, tokens and loss counted once."""
    tally: Counter[tuple[str, str, str, int]] = Counter()
    whole: Counter[tuple[str, str, str]] = Counter()
    layouts = _layouts(traced, plan)
    for i, stage in enumerate(stages):
        of_stage = _Stage(traced, plan, stage, layouts, summed_already=stages[:i]).collectives()
        for (purpose, kind, axis, nbytes), times in of_stage.items():
            if purpose in ("gradients", "parameters"):
                whole[purpose, kind, axis] += nbytes * times
            elif purpose != "control" or stage == stages[-1]:
                tally[purpose, kind, axis, nbytes] += times
    return dict(tally) | {(*key, nbytes): 1 for key, nbytes in whole.items()}


def _layouts(traced: TracedModel, plan: Plan) -> dict[str, Propagation]:
    return {axis: propagate(traced, plan, axis=axis) for axis in ("cp", "tp") if getattr(plan.degrees, axis) > 1}


@dataclass(frozen=True)
class _Conversion:
    """A change of placement of `source`, made for `segment` right before `position` (an index of execution)."""

    source: fx.Node
    have: Placement
    wanted: Placement
    segment: int
    position: int


class _Stage:
    """`summed_already`: stages of the same rank that count the gradients of the parameters they read."""

    def __init__(
        self, traced: TracedModel, plan: Plan, stage: int, layouts: Mapping[str, Propagation],
        summed_already: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.traced, self.plan, self.stage, self.summed_already = traced, plan, stage, frozenset(summed_already)
        self.stages = len(plan.stages)
        self.home = stage_of_segments(traced.segments, plan)
        self.tally: Counter[tuple[str, str, str, int]] = Counter()
        self.sizes = TensorSizes(traced, plan, layouts)
        graph = traced.graph_module.graph
        self.live = ancestors([output_node(graph)])
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.nodes = [n for n in graph.nodes if n.op == "call_function" and n in self.live and self._here(n)]
        self.layouts = layouts

    def collectives(self) -> Collectives:
        again = second_runs(self.traced, self.plan, self.nodes, self.position)
        for axis, layout in self.layouts.items():
            for conversion in self._conversions(layout, axis):
                self._count_conversion(conversion, axis, again)
        for node in self.nodes:
            self._count_loss(node)
            self._count_attention(node, again)
        self._count_boundaries()
        self._count_gradients()
        self._count_control()
        return dict(self.tally)

    # --- every micro-batch --------------------------------------------------------------------------------------------

    def _conversions(self, layout: Propagation, axis: str) -> list[_Conversion]:
        """Distinct ones: readers in one segment that want the same share one."""
        found: dict[tuple[fx.Node, Placement, int], _Conversion] = {}
        for source, have, wanted, segment, reader in self._edges(layout):
            once = axis in self._partial_axes(source, layout, axis)
            if _differs(source, have, wanted) and not once:
                key = (source, wanted, segment)
                found.setdefault(key, _Conversion(source, have, wanted, segment, self.position[reader]))
        return list(found.values())

    def _edges(self, layout: Propagation) -> Iterator[tuple[fx.Node, Placement, Placement, int, fx.Node]]:
        """(tensor, how it lies, how it is wanted, segment, reader): arguments, what leaves a segment, the output."""
        for node in self.nodes:
            if node not in layout.strategy:
                continue
            segment = node.meta["segment"]
            for source, wanted in zip(node.all_input_nodes, layout.strategy[node].inputs, strict=True):
                if wanted is not None:
                    yield source, layout.seen_by(source, node), wanted, segment, node
            if node in layout.leaving and self._read_outside(node):
                yield node, layout.placement[node], layout.leaving[node], segment, node
            for user in node.users:
                if user.op == "output":  # the loss, which may still be a sum over the ranks
                    yield node, layout.placement[node], REPLICATE, segment, user

    def _read_outside(self, node: fx.Node) -> bool:
        return any(u.meta.get("segment") != node.meta["segment"] and u in self.live for u in node.users)

    def _count_conversion(self, c: _Conversion, axis: str, again: Mapping[int, SecondRun]) -> None:
        forward, backward = CONVERSIONS[c.have.kind, c.wanted.kind]
        nbytes, m = self.sizes.sent_bytes(c.source, c.have, c.wanted, axis), self.plan.micro_batches
        repeated = c.segment in again and again[c.segment].repeats(c.source, c.position)
        self._add("activations", forward, axis, nbytes, m * (1 + repeated))
        if c.source.meta.get("grad"):
            self._add("activations", backward, axis, nbytes, m)

    def _count_loss(self, node: fx.Node) -> None:
        """Peak, then sum of exponentials and target logit, a number each a token in fp32 at least."""
        layout = self.layouts.get("tp")
        wants = layout.strategy[node].inputs if layout is not None and node in layout.strategy else ()
        if op_name(node) not in LOSSES or not wants or wants[0] is None or not wants[0].is_shard:
            return
        logits = node.all_input_nodes[0]
        tokens = self.sizes.elements(logits) // int(logits.meta["shape"][-1])
        width = max(4, logits.meta["dtype"].itemsize)
        smoothing = node.args[5] if len(node.args) > 5 else node.kwargs.get("label_smoothing", 0.0)
        for rows in (1, 3 if smoothing else 2):
            self._add("activations", "all_reduce", "tp", rows * tokens * width, self.plan.micro_batches)

    def _count_attention(self, node: fx.Node, again: Mapping[int, SecondRun]) -> None:
        """Keys and values of the other cp ranks, as autopar.runtime.attention moves them."""
        cp, layout = self.plan.degrees.cp, self.layouts.get("cp")
        if op_name(node) != ATTENTION or layout is None or layout.strategy[node].inputs[1] != Shard(2):
            return
        query, keys = self.sizes.local_bytes(node.all_input_nodes[0]), self.sizes.local_bytes(self._keys_moved(node))
        m, kind = self.plan.micro_batches, self.plan.context_parallel
        second = again.get(node.meta["segment"])
        whole = second is not None and self.position[node] < second.stop and (kind == "all-to-all" or not second.keeps)
        core = second is not None and second.core
        forward = m * (1 + (whole or core))
        if kind == "ring":
            self._add("activations", "send", "cp", 2 * keys, forward * (cp - 1) + m * (2 * cp - 1))
        elif kind == "all-gather":
            self._add("activations", "all_gather", "cp", 2 * keys * cp, forward + m)
            self._add("activations", "reduce_scatter", "cp", 2 * keys * cp, m)
        else:  # the result's exchange saves no tensor, so a core alone stops before it
            self._add("activations", "all_to_all", "cp", query * cp, 2 * (forward + m) - m * core)
            self._add("activations", "all_to_all", "cp", keys * cp, 2 * (forward + m))

    def _keys_moved(self, attention: fx.Node) -> fx.Node:
        """Keys before their heads are repeated, if those are sharded alike."""
        keys, layout = attention.all_input_nodes[1], self.layouts.get("tp")
        heads = repeated_for_attention(keys)
        if heads is None or (layout is not None and layout.placement[heads] != layout.placement[keys]):
            return keys
        return heads

    def _count_boundaries(self) -> None:
        """Tensors made on this stage or before for a later one, and the gradients that come back."""
        free = input_only(self.traced.graph_module.graph)
        for source in self.traced.graph_module.graph.nodes:
            if source.op != "call_function" or source in free or source not in self.live:
                continue
            made = self.home[source.meta["segment"]]
            last = max((self.home[u.meta["segment"]] for u in source.users if u in self.live and u.op != "output"),
                       default=made)  # fmt: skip
            forth = made <= self.stage < last
            back = made < self.stage <= last and source.meta.get("grad")
            if forth or back:
                times = self.plan.micro_batches * (forth + bool(back))
                self._add("boundary", "send", "pp", self._boundary_bytes(source), times)

    def _boundary_bytes(self, source: fx.Node) -> int:
        layout = self.layouts.get("tp")
        placement = layout.leaving.get(source, REPLICATE) if layout is not None else REPLICATE
        return self.sizes.whole_bytes(source, "tp") // (self.plan.degrees.tp if placement.is_shard else 1)

    # --- once a step --------------------------------------------------------------------------------------------------

    def _count_gradients(self) -> None:
        d, over = self.plan.degrees, dict.fromkeys(("dp and cp", "dp", "cp", "tp"), 0)
        divided = ShardedUnits(self.traced, self.plan)
        readers = self._readers()
        for node in (n for n, stages in readers.items() if self.stage in stages and not stages & self.summed_already):
            spec = self.traced.parameters[str(node.target)]
            summed_over_cp = d.cp == 1 or "cp" in self._partial_axes(node, self.layouts["cp"], "cp")
            if divided.takes(spec, summed_over_cp):
                sharded = self.sizes.stored_elements(node) != spec.numel
                placement = self.layouts["tp"].placement[node] if sharded else REPLICATE
                divided.add(node, spec, placement)
                if not spec.requires_grad:
                    continue
                nbytes = divided.shard_bytes(spec, placement)
                if "tp" in self.layouts and "tp" in self._partial_axes(node, self.layouts["tp"], "tp"):
                    over["tp"] += nbytes
                self._count_tied(readers[node], nbytes)
                continue
            if not spec.requires_grad:
                continue
            nbytes = self.sizes.stored_elements(node) * spec.dtype.itemsize
            partial = [axis for axis, layout in self.layouts.items() if axis in self._partial_axes(node, layout, axis)]
            if d.dp > 1 and "cp" in partial:
                over["dp and cp"] += nbytes  # one sum over both: all of them see different tokens
            else:
                over["dp"] += nbytes if d.dp > 1 else 0
                over["cp"] += nbytes if "cp" in partial else 0
            over["tp"] += nbytes if "tp" in partial else 0
            self._count_tied(readers[node], nbytes)
        for axis, nbytes in over.items():
            self._add("gradients", "all_reduce", axis, nbytes, 1)
        for purpose, kind, axis, nbytes in divided.moved(self.stage):
            if nbytes:
                self.tally[purpose, kind, axis, nbytes] += 1

    def _count_tied(self, stages: Set[int], nbytes: int) -> None:
        """Among the pipeline's ranks that hold it; stages of one rank add up in one tensor."""
        pp = self.plan.degrees.pp
        holders = {stage % pp for stage in stages}
        if len(holders) == pp:
            self._add("gradients", "all_reduce", "pp", nbytes, 1)
        elif len(holders) > 1:
            self._add("gradients", "send", "pp", nbytes * (len(holders) - 1), 1)

    def _count_control(self) -> None:
        """The number of tokens (int64), and the loss from the last stage to all."""
        d, loss = self.plan.degrees, next(n for n in self.live if n.op == "output").all_input_nodes[0]
        wide = max(4, loss.meta["dtype"].itemsize)
        if d.dp > 1:
            self._add("control", "all_reduce", "dp", 8, 1)
            if self.stage == self.stages - 1:
                self._add("control", "all_reduce", "dp", wide, 1)
        if self.stages > 1:
            self._add("control", "broadcast", "pp", wide, 1)

    # --- places -------------------------------------------------------------------------------------------------------

    def _add(self, purpose: str, kind: str, axis: str, nbytes: int, times: int) -> None:
        sizes = [getattr(self.plan.degrees, part) for part in axis.split(" and ")]
        if kind not in _LOCAL and nbytes and times and max(sizes) > 1:
            self.tally[purpose, kind, axis, nbytes] += times

    def _here(self, node: fx.Node) -> bool:
        stage: int = self.home[node.meta["segment"]]
        return stage == self.stage

    def _readers(self) -> dict[fx.Node, set[int]]:
        """get_attr node of a parameter -> stages that read it."""
        found: dict[fx.Node, set[int]] = {}
        for node in self.traced.graph_module.graph.nodes:
            if node.op == "get_attr" and str(node.target) in self.traced.parameters:
                users = (u for u in node.users if u.op == "call_function" and u in self.live)
                found[node] = {self.home[u.meta["segment"]] for u in users}
        return found

    def _partial_axes(self, parameter: fx.Node, layout: Propagation, axis: str) -> tuple[str, ...]:
        """(axis,) if every reader sees only a summand of the gradient of a replicated parameter: summed once a step."""
        if parameter.op != "get_attr" or not parameter.meta.get("grad") or layout.placement.get(parameter) != REPLICATE:
            return ()
        wanted = set()
        for user in parameter.users:
            if user in layout.strategy:
                pairs = zip(user.all_input_nodes, layout.strategy[user].inputs, strict=True)
                wanted |= {w.kind for s, w in pairs if s is parameter and w is not None}
        return (axis,) if wanted == {"R|P"} else ()


def _differs(source: fx.Node, have: Placement, wanted: Placement) -> bool:
    return have != wanted and not (have.is_replicated and wanted.is_replicated and not source.meta["grad"])
