"""Best-first search over partitions and settings: each waits under its lower bound, the least is looked at next.

    partition, analytic bound   compute at 1/(tp cp) of one rank, nothing else
    partition, in proportion    from prices of blocks that are known already
    partition, blocks           exact block prices
    setting                     stages of equal time, least tail
    setting, sharp              and the memory of every stage (settings that differ in schedule and chunks at once)
    setting, solved             the pipeline problem, cut off at the incumbent

The search ends when the least bound is above the incumbent, which is then optimal over the whole space. Alternatives
are the best of other layouts (degrees and sequence sharding), nearest first by bound, within a budget.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.cost_model.candidates import Partition, Setting, SettingGroup
from autopar.cost_model.evaluate import Evaluation, Evaluator

__all__ = ["BranchAndBound", "Counts", "rank"]

ALTERNATIVES = 5
_ALTERNATIVE_LOOKS = 60
"""Settings solved for the alternatives, at most: the report needs near ones, not proofs."""

_SAME = 1 + 1e-9
"""Steps that agree to nine digits are ties."""

_ANALYTIC, _PROPORTIONAL, _BLOCKS, _SETTING = range(4)

Layout = tuple[Any, bool]


@dataclass
class Counts:
    """What the search did: partitions priced, settings bounded and solved, how many of them fit nowhere."""

    expanded: int = 0
    bounded: int = 0
    solved: int = 0
    too_big: int = 0


@dataclass(order=True)
class _Node:
    bound_s: float
    order: tuple[int, ...]
    kind: int
    item: Any = field(compare=False)


@dataclass
class _Waiting:
    """Settings of a partition, (bound, group, run), the least bound last; `sharp`: groups whose bounds see memory."""

    groups: list[SettingGroup]
    settings: list[tuple[float, int, int]]
    sharp: set[int] = field(default_factory=set)

    def next(self) -> Setting:
        _, group, run = self.settings[-1]
        return self.groups[group].setting(run)


def rank(e: Evaluation) -> tuple[Any, ...]:
    """Faster first; equal to nine digits goes to fewer axes (see `Setting.order`)."""
    return (float(f"{e.step_s:.9e}"), e.setting.order)


class BranchAndBound:
    """One run over the partitions. `groups_of` lists the settings of one; after `run`, no setting that was not solved
    is faster than `proven_s`."""

    def __init__(
        self,
        evaluator: Evaluator,
        bounds: dict[Partition, float],
        groups_of: Callable[[Partition], list[SettingGroup]],
        deadline: float = np.inf,
    ) -> None:
        self._evaluator, self._groups_of, self._deadline = evaluator, groups_of, deadline
        self._queue = [_Node(bound, p.order, _ANALYTIC, p) for p, bound in bounds.items()]
        heapq.heapify(self._queue)
        self.best_of_layout: dict[Layout, Evaluation] = {}
        self.counts = Counts()
        self.timed_out = False
        self.proven_s = np.inf

    def run(self) -> Evaluation | None:
        """The optimal setting, proven by the pipeline ILP; None if none fits in memory. After `timed_out`, the best
        found."""
        best: Evaluation | None = None
        while self._queue and not (best is not None and self._is_late()):
            if best is not None and self._queue[0].bound_s > best.step_s * _SAME:
                break
            found = self._look(heapq.heappop(self._queue), np.inf if best is None else best.step_s * _SAME)
            if found is not None and (best is None or rank(found) < rank(best)):
                best = found
        self.proven_s = self._queue[0].bound_s if self._queue else np.inf
        return None if best is None else self._evaluator.proven(best)

    def alternatives(self, best: Evaluation) -> list[Evaluation]:
        """The nearest other layouts that fit, fastest first."""
        own, looks = _layout(best.setting.partition), self.counts.solved + _ALTERNATIVE_LOOKS
        while self._queue and self.counts.solved < looks and not self._is_late():
            node = heapq.heappop(self._queue)
            layout = _layout(node.item if node.kind != _SETTING else node.item.groups[0].partition)
            known = self.best_of_layout.get(layout)
            others = sorted(e.step_s for k, e in self.best_of_layout.items() if k != own)
            if len(others) >= ALTERNATIVES and others[ALTERNATIVES - 1] <= node.bound_s:
                break
            if layout != own and (known is None or node.bound_s < known.step_s):
                self._look(node, np.inf if known is None else known.step_s)
        rest = sorted((e for k, e in self.best_of_layout.items() if k != own), key=rank)
        return [self._evaluator.detailed(e) for e in rest[:ALTERNATIVES]]

    def _is_late(self) -> bool:
        self.timed_out = self.timed_out or time.perf_counter() > self._deadline
        return self.timed_out

    def _look(self, node: _Node, cutoff_s: float) -> Evaluation | None:
        """Sharpen a partition's bound, bring in its settings, or solve a setting."""
        if node.kind == _SETTING:
            return self._next_of(node.item, cutoff_s)
        partition: Partition = node.item
        evaluator = self._evaluator
        for kind, sharper_s in ((_PROPORTIONAL, evaluator.rough_bound_s), (_BLOCKS, evaluator.block_bound_s)):
            if node.kind < kind and (bound_s := sharper_s(partition)) > node.bound_s:
                heapq.heappush(self._queue, _Node(bound_s, node.order, kind, partition))
                return None
        self.counts.expanded += 1
        groups = self._groups_of(partition)
        self.counts.bounded += sum(len(group.runs) for group in groups)
        settings = [entry for g in range(len(groups)) for entry in self._bounded(groups, g, node.bound_s)]
        self._wait(_Waiting(groups, settings))
        return None

    def _next_of(self, waiting: _Waiting, cutoff_s: float) -> Evaluation | None:
        """Solve a partition's next setting, or sharpen the bounds of its group where that has not been done."""
        _, group, _ = waiting.settings[-1]
        if group in waiting.sharp:
            setting = waiting.next()
            waiting.settings.pop()
            self._wait(waiting)
            return self._solve(setting, cutoff_s)
        others = [entry for entry in waiting.settings if entry[1] != group]
        sharper = self._bounded(waiting.groups, group, waiting.settings[-1][0], sharp=True)
        self.counts.too_big += len(waiting.settings) - len(others) - len(sharper)
        waiting.settings = others + sharper
        waiting.sharp.add(group)
        self._wait(waiting)
        return None

    def _bounded(
        self, groups: list[SettingGroup], index: int, least_s: float, *, sharp: bool = False
    ) -> list[tuple[float, int, int]]:
        """Settings of a group that may fit, with bounds of at least `least_s`."""
        bounds = self._evaluator.bounds_s(groups[index], sharp=sharp)
        return [(max(least_s, bound_s), index, run) for run, bound_s in enumerate(bounds.tolist()) if bound_s < np.inf]

    def _wait(self, waiting: _Waiting) -> None:
        """A partition's settings queue as one, under the bound of the first."""
        if waiting.settings:
            waiting.settings.sort(reverse=True)
            heapq.heappush(self._queue, _Node(waiting.settings[-1][0], waiting.next().order, _SETTING, waiting))

    def _solve(self, setting: Setting, cutoff_s: float) -> Evaluation | None:
        self.counts.solved += 1
        found = self._evaluator.evaluate(setting, cutoff_s)
        if found.pipeline is None:
            if not np.isfinite(found.bound_s):
                self.counts.too_big += 1
            return None
        layout = _layout(setting.partition)
        if layout not in self.best_of_layout or rank(found) < rank(self.best_of_layout[layout]):
            self.best_of_layout[layout] = found
        return found


def _layout(partition: Partition) -> Layout:
    return (partition.degrees, partition.sequence_sharding)
