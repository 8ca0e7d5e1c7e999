"""Stages on groups of unequal devices: one price table whose rows are each stage's on its own group.

Every stage s lies in one group g(s), so its times, tails and bytes are what that group's `SettingPrice` says. Only the
sends differ: inside a group they go over its links, from group to group over the link between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.pipeline_ilp import PipelineSolution
from autopar.cost_model.pipeline_problem import PipelineProblem, StagePrice
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.stage_table import Floats, StageTable
from autopar.cost_model.step_price import StepPrice
from autopar.mesh import Degrees
from autopar.specs import ClusterSpec

__all__ = ["MixedPrice", "MixedTable"]


class MixedTable(StageTable):
    """`tables[g]` prices every stage as if it lay in group g; row s is taken from `tables[owner[s]]`."""

    def __init__(self, tables: Sequence[StageTable], owner: Sequence[int]) -> None:
        first = tables[0]
        most = max(table.problem.memory_bytes for table in tables)
        self.problem = replace(first.problem, memory_bytes=most)
        self.runs, self.counts = first.runs, first.counts
        self._tables, self._owner = tables, owner
        self._merge()

    def _merge(self) -> None:
        rows = list(enumerate(self._owner))
        self.times = np.stack([self._tables[g].times[s] for s, g in rows])
        self.exact = np.stack([self._tables[g].exact[s] for s, g in rows])
        self.put_off_s = np.stack([self._tables[g].put_off_s[s] for s, g in rows])

    def tails_where(self, wanted: npt.NDArray[np.bool_]) -> Floats:
        rows = []
        for s, g in enumerate(self._owner):
            own = np.zeros_like(wanted)
            own[s] = wanted[s]
            rows.append(self._tables[g].tails_where(own)[s])
        return np.stack(rows)

    def settle(self, number: int) -> None:
        for g in set(self._owner):
            self._tables[g].settle(number)
        self._merge()

    def price(self, stage: int, number: int) -> StagePrice | None:
        return self._tables[self._owner[stage]].price(stage, number)


class MixedPrice:
    """One setting whose stage s runs on group `owner[s]`; `prices[g]` is the setting on group g's devices."""

    def __init__(self, prices: Sequence[SettingPrice], views: Sequence[ClusterSpec], owner: Sequence[int]) -> None:
        self.prices, self.owner = prices, owner
        self.setting, self.m = prices[0].setting, prices[0].m
        self.slowdown = max(price.step.slowdown for price in prices)
        self.overhead_s = max(price.step.overhead_s for price in prices)
        self._inside = [_inside_group(p, v, owner.count(g)) for g, (p, v) in enumerate(zip(prices, views, strict=True))]
        self.sends_s = self._waits(StepPrice.send_s)

    def receives_s(self) -> Floats:
        """Of each stage, seconds of a micro-batch that a chunk waits for others in, if nothing hides them."""
        return np.array(self._waits(StepPrice.receives_s))

    def _waits(self, seconds: Callable[[StepPrice, float], float]) -> list[float]:
        """By stage, receives of one micro-batch: activations from the stage before, gradients from the one behind.
        Where a stage has one neighbour only, both are priced over the way to it, as for equal devices."""
        border = self.prices[0].blocks.border_bytes
        ways = [(seconds(inside, border), seconds(p.step, border))
                for inside, p in zip(self._inside, self.prices, strict=True)]  # fmt: skip
        found, last = [], len(self.owner) - 1
        for stage, group in enumerate(self.owner):
            sides = (stage - 1 if stage > 0 else 1), (stage + 1 if stage < last else last - 1)
            found.append(sum(ways[group][self.owner[side] != group] / 2 for side in sides))
        return found

    def table(self, segment: int) -> MixedTable:
        return MixedTable([StageTable(self._problem(g, segment)) for g in range(len(self.prices))], self.owner)

    def _problem(self, group: int, segment: int) -> PipelineProblem:
        price = self.prices[group]
        problem = price.problem(segment)
        stages = tuple(
            replace(cost, time_s=cost.time_s - price.send_s + self.sends_s[s]) if self.owner[s] == group else cost
            for s, cost in enumerate(problem.stages)
        )
        return replace(problem, stages=stages)

    def with_overhead(self, busy_s: float) -> float:
        return busy_s * self.slowdown + self.overhead_s

    def without_overhead(self, step_s: float) -> float:
        return (step_s - self.overhead_s) / self.slowdown

    def time_parts(self, solution: PipelineSolution) -> dict[str, float]:
        """Step time by part, read off the slowest stage; what the others make it wait is bubble."""
        stages = [
            (self.prices[g], s, stage) for s, (g, stage) in enumerate(zip(self.owner, solution.stages, strict=True))
        ]
        parts = []
        for price, s, stage in stages:
            named = price.stage_parts(s, stage, solution.segment)
            parts.append({**named, "pp": named["pp"] - price.send_s + self.sends_s[s]})
        tails = [price.tail_parts(s, stage.counts) for price, s, stage in stages]
        weights = [price.weights_s(s, stage.counts) for price, s, stage in stages]
        found = self.prices[0].named_step(parts, tails, weights)
        busy = sum(n for name, n in found.items() if name not in ("straggler", "overhead"))
        return {**found, "straggler": busy * (self.slowdown - 1), "overhead": self.overhead_s}

    def memory(self, solution: PipelineSolution) -> tuple[dict[str, int], ...]:
        problems = [price.problem(solution.segment) for price in self.prices]
        ranks = [self.prices[g].stage_bytes(s, stage, problems[g])
                 for s, (g, stage) in enumerate(zip(self.owner, solution.stages, strict=True))]  # fmt: skip
        return tuple(ranks * self.setting.virtual_stages)


def _inside_group(price: SettingPrice, view: ClusterSpec, stages: int) -> StepPrice:
    """`price.step` where both neighbours are stages of the same group, of which there are so many."""
    d, step = price.setting.degrees, copy(price.step)
    step.pp_group = group_cost(view, Degrees(pp=stages, dp=d.dp, cp=d.cp, tp=d.tp), "pp")
    return step
