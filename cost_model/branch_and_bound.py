"""Best-first search over partitions and settings: each waits under its lower bound, the least is looked at next.

    partition, analytic bound   compute at 1/(tp cp) of one rank, nothing else
    partition, in proportion    from prices of blocks that are known already
    setting                     exact block prices, stages of equal time, least tail
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

from autopar.cost_model.candidates import Partition, Setting
from autopar.cost_model.evaluate import Evaluation, Evaluator

__all__ = ["BranchAndBound", "Counts", "rank"]

ALTERNATIVES = 5
_ALTERNATIVE_LOOKS = 60
"""Settings solved for the alternatives, at most: the report needs near ones, not proofs."""

_SAME = 1 + 1e-9
"""Steps that agree to nine digits are ties."""

_ANALYTIC, _PROPORTIONAL, _SETTING = range(3)

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
    """Settings of a partition by bound, the least last."""

    settings: list[tuple[float, Setting]]


def rank(e: Evaluation) -> tuple[Any, ...]:
    """Faster first; equal to nine digits goes to fewer axes (see `Setting.order`)."""
    return (float(f"{e.step_s:.9e}"), e.setting.order)


class BranchAndBound:
    """One run over the partitions. `settings_of` lists the settings of one; after `run`, no setting that was not solved
    is faster than `proven_s`."""

    def __init__(
        self,
        evaluator: Evaluator,
        bounds: dict[Partition, float],
        settings_of: Callable[[Partition], list[Setting]],
        deadline: float = np.inf,
    ) -> None:
        self._evaluator, self._settings_of, self._deadline = evaluator, settings_of, deadline
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
            layout = _layout(node.item if node.kind != _SETTING else node.item.settings[-1][1].partition)
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
            _, setting = node.item.settings.pop()
            self._wait(node.item)
            return self._solve(setting, cutoff_s)
        partition: Partition = node.item
        if node.kind == _ANALYTIC:
            sharper = self._evaluator.rough_bound_s(partition)
            if sharper > node.bound_s:
                heapq.heappush(self._queue, _Node(sharper, node.order, _PROPORTIONAL, partition))
                return None
        self.counts.expanded += 1
        settings = self._settings_of(partition)
        self.counts.bounded += len(settings)
        waiting = _Waiting([])
        for setting, exact_s in zip(settings, self._evaluator.bounds_s(settings), strict=True):
            if np.isfinite(exact_s):
                waiting.settings.append((max(node.bound_s, exact_s), setting))
        waiting.settings.sort(key=lambda entry: entry[0])
        waiting.settings.reverse()
        self._wait(waiting)
        return None

    def _wait(self, waiting: _Waiting) -> None:
        """A partition's settings queue as one, under the bound of the first."""
        if waiting.settings:
            bound_s, setting = waiting.settings[-1]
            heapq.heappush(self._queue, _Node(bound_s, setting.order, _SETTING, waiting))

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
