"""One rank of a plan, built and run on tensors without data: its stages, its schedule, its gradient sums.

The graphs are what the passes make; masters and their 16-bit copies, sharding and reduction of gradients are the
runtime's own. The pipeline follows the order torch executes (cost_model/schedule_orders.py) with the receive buffers
of the runtime. Micro-batches are all alike, so as many run as it takes to reach the peak of memory; that those were
alike is checked, and their collectives multiplied. The optimizer's state is there, its step is not part of the peak: a
fused one needs no memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar import passes
from autopar.cost_model.schedule_orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    rank_orders,
)
from autopar.dryrun.fake_world import FakeWorld, fake_process_group
from autopar.dryrun.holdings import Holdings
from autopar.dryrun.recorder import Issued, Recorder
from autopar.dryrun.stage import Chunk
from autopar.errors import AutoparError
from autopar.ir import StageGraph, TracedModel
from autopar.plan import Plan
from autopar.runtime.limits import refuse_unbuilt
from autopar.runtime.stage import localize
from autopar.runtime.tokens import TokenCounter, loss_dtype

__all__ = ["MeasuredRank", "measure_rank"]


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank held and sent in a step. Bytes by category at the peak; `collectives` maps (purpose, kind, axis,
    whole-tensor bytes) to times a step; `receives` and `sends` are the shapes that cross, by stage."""

    rank: int
    stages: tuple[int, ...]
    parameters: int
    peak: Mapping[str, int]
    collectives: Mapping[tuple[str, str, str, int], int]
    micro_batches_run: int
    receives: Mapping[int, tuple[tuple[int, ...], ...]]
    sends: Mapping[int, tuple[tuple[int, ...], ...]]


def measure_rank(
    traced: TracedModel, plan: Plan, stages: tuple[StageGraph, ...], rank: int, optimizer: str = "adamw"
) -> MeasuredRank:
    """Forward and backward of a step's micro-batches on `rank`, after one optimizer step has made its state.

    `stages` are those of `passes.apply`. Raises AutoparError if micro-batches are not alike, SpecError or
    PlanMismatchError for what the runtime refuses too.
    """
    refuse_unbuilt(plan, traced, stages)
    with _world(plan, rank) as world, FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        return _Rank(traced, plan, stages, world, recorder).run(optimizer)


@contextmanager
def _world(plan: Plan, rank: int) -> Iterator[FakeWorld]:
    if plan.degrees.world_size == 1:
        yield FakeWorld(plan.degrees, rank)
        return
    with fake_process_group(rank, plan.degrees.world_size):
        world = FakeWorld(plan.degrees, rank)
        if plan.zero and plan.zero_group and world.data_mesh is not None:
            world.shard_mesh(plan.zero_group)  # made here, outside of the mode in which tensors hold nothing
        yield world


class _Rank:
    def __init__(
        self, traced: TracedModel, plan: Plan, stages: tuple[StageGraph, ...], world: FakeWorld, recorder: Recorder
    ) -> None:
        self.traced, self.plan, self.world, self.recorder = traced, plan, world, recorder
        self.count = len(stages)
        own = stages[world.position["pp"] :: plan.degrees.pp]
        self.holdings = Holdings(traced, plan, own, stages, world, recorder)
        graphs = self.holdings.graphs
        self.chunks = {s.index: Chunk(traced, plan, s, stages, graphs[s.index], world, recorder) for s in own}

    def run(self, optimizer: str) -> MeasuredRank:
        self.holdings.make_optimizer_state(optimizer)
        micro_batches = self.plan.micro_batches
        alike = self._enough(micro_batches)
        with self.recorder.category("inputs"):
            batch = self._batch(self.plan.micro_batch * micro_batches)
        issued: dict[tuple[str, int, int], list[Issued]] = {}
        once = self._issued_by(lambda: self._count_tokens(batch))
        self.holdings.begin(alike)
        for action in self._order(alike):
            step = partial(self._act, action.kind, action.stage, action.micro_batch, batch)
            issued[action.kind, action.stage, action.micro_batch] = self._issued_by(step)
        sums = self._issued_by(self.holdings.finish)
        once += self._issued_by(self._agree_on_loss)
        chunks = self.chunks.values()
        return MeasuredRank(
            rank=self.world.rank,
            stages=tuple(self.chunks),
            parameters=self.holdings.count,
            peak={k: v for k, v in self.recorder.peak.items() if v},
            collectives=self._tally(issued, alike, micro_batches, sums, once),
            micro_batches_run=alike,
            receives={c.stage.index: c.received_shapes for c in chunks},
            sends={c.stage.index: c.sent_shapes for c in chunks},
        )

    def _order(self, micro_batches: int) -> list[Action]:
        pp = self.plan.degrees.pp
        if pp == 1:
            return rank_orders("1f1b", 1, micro_batches)[0]
        return rank_orders(self.plan.schedule, pp, micro_batches, self.plan.virtual_stages)[self.world.position["pp"]]

    def _enough(self, micro_batches: int) -> int:
        """Micro-batches after which nothing new happens: GPipe holds all of them, 1F1B as many as there are stages and
        one more in the steady state. The looped schedules have gradients of all their stages after one round, and hold
        most when the next is there and a third begins. Sharding treats the first and last apart."""
        ranks = self.plan.degrees.pp
        if self._loops:
            return min(micro_batches, 3 * ranks) if micro_batches % ranks == 0 else micro_batches
        if ranks > 1 and (self.plan.schedule == "gpipe" or micro_batches < ranks):
            return micro_batches
        return min(micro_batches, max(ranks, 2 if self.holdings.sharded else 1) + 1)

    @property
    def _loops(self) -> bool:
        """Whether micro-batches go through a rank's stages in rounds of as many as the pipeline has ranks."""
        return self.plan.schedule in ("interleaved", "zero-bubble") and self.plan.degrees.pp > 1

    # --- what it does -------------------------------------------------------------------------------------------------

    def _act(self, kind: str, stage: int, micro_batch: int, batch: Mapping[str, Tensor]) -> None:
        chunk = self.chunks[stage]
        if kind == FORWARD:
            chunk.forward(micro_batch, batch, self.divisors)
        elif kind == BACKWARD:
            chunk.backward(micro_batch)
        elif kind == BACKWARD_INPUT:
            chunk.backward_input(micro_batch)
        else:
            assert kind == BACKWARD_WEIGHT
            chunk.backward_weight(micro_batch)
        self.holdings.name_whole_tensors(stage)

    def _issued_by(self, action: Callable[[], None]) -> list[Issued]:
        before = len(self.recorder.issued)
        action()
        return self.recorder.issued[before:]

    def _batch(self, rows: int) -> dict[str, Tensor]:
        sizes = {self.traced.batch: rows, self.traced.seq: self.plan.seq_len}
        return {
            s.name: torch.zeros([d if isinstance(d, int) else int(d.subs(sizes)) for d in s.shape], dtype=s.dtype)
            for s in self.traced.inputs
        }

    def _count_tokens(self, batch: Mapping[str, Tensor]) -> None:
        counter = passes.token_count(self.traced, self.plan)
        graph = localize(counter, {}, self.world.group_names(), self.world.device)
        self.divisors = TokenCounter(graph, self.world).divisors(batch)

    def _agree_on_loss(self) -> None:
        loss = torch.zeros((), dtype=loss_dtype(self.traced))
        if self.count - 1 in self.chunks:
            losses = torch.stack(self.chunks[self.count - 1].losses)
            loss = self.world.sum(losses.sum(), "dp").to(loss.dtype)
        self.world.broadcast(loss, "pp", self.world.size("pp") - 1)

    # --- what is reported ---------------------------------------------------------------------------------------------

    def _tally(
        self, issued: Mapping[tuple[str, int, int], list[Issued]], alike: int, micro_batches: int, sums: list[Issued],
        once: list[Issued],
    ) -> dict[tuple[str, str, str, int], int]:  # fmt: skip
        """Gradient sums and gathers of parameters are one row an axis: how they are cut is no property of a plan."""
        tally: Counter[tuple[str, str, str, int]] = Counter()
        whole: Counter[tuple[str, str]] = Counter()
        data = self._data_groups()
        together = self.plan.degrees.pp if self._loops else 1
        for kind, stage in dict.fromkeys((kind, stage) for kind, stage, _ in issued):
            runs = [issued[kind, stage, i] for i in range(alike)]
            for c in self._alike([[c for c in run if c.group not in data] for run in runs], f"{kind} of stage {stage}"):
                axis = self.world.axis_of(c.group)
                tally["boundary" if axis == "pp" else "activations", c.kind, axis, c.nbytes] += micro_batches
            for i, run in enumerate(runs):
                # What the micro-batches that are not run do: forward as the last round, backward as the first.
                steady = self.holdings.sharded and (i >= alike - together if kind == FORWARD else i < together)
                for c in run:
                    times = (c.group in data) * (1 + (micro_batches - alike) // together * steady)
                    whole[c.kind, self.world.axis_of(c.group)] += c.nbytes * times
        for c in sums:
            whole[c.kind, self.world.axis_of(c.group)] += c.nbytes
        for (kind, axis), nbytes in whole.items():
            if nbytes:
                tally["parameters" if kind == "all_gather" else "gradients", kind, axis, nbytes] += 1
        for c in once:
            tally["control", c.kind, self.world.axis_of(c.group), c.nbytes] += 1
        return {key: times for key, times in tally.items() if key[1] != "receive"}

    @staticmethod
    def _alike(runs: list[list[Issued]], what: str) -> list[Issued]:
        if any(Counter(run) != Counter(runs[0]) for run in runs):
            raise AutoparError(f"micro-batches issue different collectives ({what})", where="dry run")
        return runs[0]

    def _data_groups(self) -> set[str]:
        """Names of the groups over which parameters and gradients go."""
        mesh = self.world.data_mesh
        groups = [self.world.group("dp"), None if mesh is None else mesh.get_group()]
        return {group.group_name for group in groups if group is not None} | set(self.world.hybrid_groups())
