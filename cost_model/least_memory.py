"""The least memory any plan can live in, whatever its time: what a search lacks, and the objective "memory"."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence

from autopar.cost_model.candidates import Partition, Setting
from autopar.cost_model.evaluate import Evaluation, Evaluator

__all__ = ["least_memory"]


def least_memory(
    evaluator: Evaluator, partitions: Sequence[Partition], settings_of: Callable[[Partition], list[Setting]],
    deadline_s: float = math.inf,
) -> tuple[Evaluation, float]:  # fmt: skip
    """(the setting whose fullest stage needs least device memory, `needed_bytes`, ties to the simpler one; bytes that
    none needs less than, which is as much unless the deadline of `time.perf_counter` ended the search).

    Exact: memory never falls with the micro-batch (with it fewer are in flight, but not fewer sequences) or with the
    chunks of a rank, so of each layout only the smallest of both are looked at; of these, in order of what parameters
    alone take, those whose bound is below the best.
    """
    waiting: list[tuple[float, tuple[int, ...], Partition | Setting]] = [
        (evaluator.least_bytes_of(p), p.order, p) for p in _smallest(partitions)
    ]
    heapq.heapify(waiting)
    reserved = evaluator.cluster.device.reserved_bytes
    best: Evaluation | None = None
    while waiting and (best is None or waiting[0][0] + reserved <= best.needed_bytes):
        if best is not None and time.perf_counter() > deadline_s:
            return best, waiting[0][0] + reserved
        _, _, item = heapq.heappop(waiting)
        if isinstance(item, Partition):
            settings = settings_of(item)
            chunks = min(s.virtual_stages for s in settings)
            for s in settings:
                if s.virtual_stages == chunks:
                    heapq.heappush(waiting, (evaluator.least_bytes(s), s.order, s))
        else:
            found = evaluator.lacking(item)
            if best is None or _rank(found) < _rank(best):
                best = found
    assert best is not None, "a search without settings"
    return best, best.needed_bytes


def _smallest(partitions: Sequence[Partition]) -> list[Partition]:
    """Of each layout the one with the smallest micro-batch."""
    smallest: dict[object, Partition] = {}
    for p in partitions:
        key = (p.degrees, p.sequence_sharding)
        if key not in smallest or p.micro_batch < smallest[key].micro_batch:
            smallest[key] = p
    return list(smallest.values())


def _rank(found: Evaluation) -> tuple[float, tuple[int, ...]]:
    return math.ceil(found.needed_bytes), found.setting.order
