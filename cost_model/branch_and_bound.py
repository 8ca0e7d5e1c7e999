"""Best-first search over partitions and settings: each waits under its lower bound, the least is looked at next.

    partition, analytic bound   compute at 1/(tp cp) of one rank, nothing else
    partition, in proportion    from prices of blocks that are known already
    partition, blocks           exact block prices
    setting                     stages of equal time, least tail
    setting, sharp              and the memory of every stage (settings that differ in schedule and chunks at once)
    setting, alone              and at every moment of a step, in whole layers
    setting, solved             the pipeline problem, cut off at the incumbent

The search ends when the least bound is above the incumbent, which is then optimal over the whole space. Alternatives
are the best of other layouts (degrees and sequence sharding), nearest first by bound, within a budget.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from autopar.cost_model.candidates import Partition, Setting, SettingGroup
from autopar.cost_model.evaluate import Evaluation
from autopar.cost_model.stage_table import Floats

__all__ = ["BranchAndBound", "Counts", "Pricing", "rank"]

ALTERNATIVES = 5
_ALTERNATIVE_LOOKS = 60
"""Settings solved for the alternatives, at most: the report needs near ones, not proofs."""

NEAR = 0.95
"""Alternatives are as fast as the best of their layout, and the last of them as any layout left out, but for this."""

_SAME = 1 + 1e-9
"""Steps that agree to nine digits are ties."""

_ANALYTIC, _PROPORTIONAL, _BLOCKS, _SETTING = range(4)

Layout = tuple[Any, bool]


class Pricing(Protocol):
    """What the search asks, of equal devices (`Evaluator`) or of unequal groups (`MixedEvaluator`)."""

    def rough_bound_s(self, partition: Partition) -> float: ...
    def block_bound_s(self, partition: Partition) -> float: ...
    def bounds_s(self, group: SettingGroup, *, sharp: bool = False) -> Floats: ...
    def least_s(self, setting: Setting, cutoff_s: float = np.inf) -> float: ...
    def evaluate(self, setting: Setting, cutoff_s: float = np.inf) -> Evaluation: ...
    def proven(self, found: Evaluation) -> Evaluation: ...
    def detailed(self, found: Evaluation) -> Evaluation: ...


@dataclass
class Counts:
    """What the search did: partitions priced, settings bounded and solved, how many of them fit nowhere."""

    expanded: int = 0
    bounded: int = 0
    solved: int = 0
    too_big: int = 0


@dataclass(order=True)
class _Node:
    """`key_s` is its turn: the bound, or more."""

    key_s: float
    order: tuple[int, ...]
    kind: int
    item: Any = field(compare=False)
    bound_s: float = field(compare=False)

    @property
    def partition(self) -> Partition:
        found: Partition = self.item if self.kind != _SETTING else self.item.groups[0].partition
        return found

    @property
    def is_sharpest(self) -> bool:
        """True if nothing is left but to solve it."""
        return self.kind == _SETTING and self.item.is_sharpest


@dataclass
class _Waiting:
    """Settings of a partition: bounds of the runs of each group, inf where one is done or does not fit; `sharp`: groups
    whose bounds see memory; `alone`: (group, run) of those that were bounded by themselves."""

    groups: list[SettingGroup]
    bounds: list[Floats]
    sharp: set[int] = field(default_factory=set)
    alone: set[tuple[int, int]] = field(default_factory=set)

    def next(self) -> tuple[float, int]:
        """The least bound, and the group it is of."""
        heads = [float(bounds.min()) for bounds in self.bounds]
        group = heads.index(min(heads))
        return heads[group], group

    @property
    def is_sharpest(self) -> bool:
        """True if what `setting` gives was bounded by itself."""
        group = self.next()[1]
        return (group, self._run(group)) in self.alone

    def _run(self, group: int) -> int:
        """The run of a group with the least bound."""
        return int(self.bounds[group].argmin())

    def setting(self, group: int) -> Setting:
        return self.groups[group].setting(self._run(group))

    def replace(self, group: int, bound_s: float) -> None:
        """The bound of what `setting` gives."""
        self.bounds[group][self._run(group)] = bound_s

    def sharpen(self, group: int, least_s: Callable[[Setting], float]) -> float | None:
        """Bounds what `setting` gives by itself, unless that has been done."""
        run = self._run(group)
        if (group, run) in self.alone:
            return None
        self.alone.add((group, run))
        bound_s = max(float(self.bounds[group][run]), least_s(self.setting(group)))
        self.bounds[group][run] = bound_s
        return bound_s


def rank(e: Evaluation) -> tuple[Any, ...]:
    """Faster first; equal to nine digits goes to fewer axes (see `Setting.order`)."""
    return (float(f"{e.step_s:.9e}"), e.setting.order)


class BranchAndBound:
    """One run over the partitions. `groups_of` lists the settings of one; after `run`, no setting that was not solved
    is faster than `proven_s`."""

    def __init__(
        self,
        evaluator: Pricing,
        bounds: dict[Partition, float],
        groups_of: Callable[[Partition], list[SettingGroup]],
        deadline: float = np.inf,
    ) -> None:
        self._evaluator, self._groups_of, self._deadline = evaluator, groups_of, deadline
        self._queue = [_Node(bound, p.order, _ANALYTIC, p, bound) for p, bound in bounds.items()]
        heapq.heapify(self._queue)
        self.best_of_layout: dict[Layout, Evaluation] = {}
        self.counts = Counts()
        self.timed_out = False
        self.proven_s = np.inf
        self._doubt = 1.0
        self._cut_off: set[Setting] = set()

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
        """The nearest other layouts that fit, fastest first. Bounds that can be sharpened wait as if longer by what
        `NEAR` allows: few more partitions are opened, and few settings of a layout."""
        own, looks = _layout(best.setting.partition), self.counts.solved + _ALTERNATIVE_LOOKS
        waiting, self._queue, self._doubt = self._queue, [], 1 / NEAR
        for node in waiting:
            self._push(node)
        while self._queue and self.counts.solved < looks and not self._is_late():
            node = heapq.heappop(self._queue)
            layout = _layout(node.partition)
            known = self.best_of_layout.get(layout)
            others = sorted(e.step_s for k, e in self.best_of_layout.items() if k != own)
            cutoff_s = others[ALTERNATIVES - 1] if len(others) >= ALTERNATIVES else np.inf
            if cutoff_s <= node.key_s:
                break
            if layout != own and (known is None or node.bound_s < known.step_s * NEAR):
                self._look(node, cutoff_s if known is None else min(cutoff_s, known.step_s * NEAR))
        rest = sorted((e for k, e in self.best_of_layout.items() if k != own), key=rank)
        return [self._evaluator.detailed(e) for e in rest[:ALTERNATIVES]]

    def _push(self, node: _Node) -> None:
        node.key_s = node.bound_s * (1.0 if node.is_sharpest else self._doubt)
        heapq.heappush(self._queue, node)

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
                if bound_s < np.inf:
                    self._push(_Node(bound_s, node.order, kind, partition, bound_s))
                return None
        self.counts.expanded += 1
        groups = self._groups_of(partition)
        self.counts.bounded += sum(len(group.runs) for group in groups)
        bounds = [np.maximum(self._evaluator.bounds_s(group), node.bound_s) for group in groups]
        self._wait(_Waiting(groups, bounds))
        return None

    def _next_of(self, waiting: _Waiting, cutoff_s: float) -> Evaluation | None:
        """Solve a partition's next setting, or sharpen the bounds of its group where that has not been done."""
        bound_s, group = waiting.next()
        if group in waiting.sharp or len(waiting.groups[group].runs) == 1:
            alone_s = waiting.sharpen(group, lambda setting: self._evaluator.least_s(setting, cutoff_s))
            if alone_s is not None:
                self.counts.too_big += int(alone_s == np.inf)
                self._wait(waiting)
                return None
            found, left_s = self._solve(waiting.setting(group), cutoff_s)
            waiting.replace(group, left_s)
            self._wait(waiting)
            return found
        sharper = np.maximum(self._evaluator.bounds_s(waiting.groups[group], sharp=True), bound_s)
        self.counts.too_big += int(np.isfinite(waiting.bounds[group]).sum() - np.isfinite(sharper).sum())
        waiting.bounds[group] = sharper
        waiting.sharp.add(group)
        self._wait(waiting)
        return None

    def _wait(self, waiting: _Waiting) -> None:
        """A partition's settings queue as one, under the bound of the first."""
        bound_s, group = waiting.next() if waiting.groups else (np.inf, 0)
        if bound_s < np.inf:
            self._push(_Node(bound_s, waiting.groups[group].partition.order, _SETTING, waiting, bound_s))

    def _solve(self, setting: Setting, cutoff_s: float) -> tuple[Evaluation | None, float]:
        """None if it takes longer than the cutoff; and what it takes at least if it has to be solved again."""
        self.counts.solved += setting not in self._cut_off
        found = self._evaluator.evaluate(setting, cutoff_s)
        if found.pipeline is None:
            if not np.isfinite(found.bound_s):
                self.counts.too_big += 1
            self._cut_off.add(setting)
            return None, max(found.bound_s, float(np.nextafter(cutoff_s, np.inf)))
        layout = _layout(setting.partition)
        if layout not in self.best_of_layout or rank(found) < rank(self.best_of_layout[layout]):
            self.best_of_layout[layout] = found
        return found, np.inf


def _layout(partition: Partition) -> Layout:
    return (partition.degrees, partition.sequence_sharding)
