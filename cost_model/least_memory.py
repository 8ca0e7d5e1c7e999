"""The least memory any plan can live in, whatever its time: what a search lacks, and the objective "memory"."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence

from autopar.cost_model.candidates import Partition, Setting
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.moments import bounding_flights

__all__ = ["least_memory"]


def least_memory(
    evaluator: Evaluator, partitions: Sequence[Partition], settings_of: Callable[[Partition], list[Setting]],
    deadline_s: float = math.inf, enough_bytes: float | None = None,
) -> tuple[Evaluation, float]:  # fmt: skip
    """(the setting whose fullest stage needs least device memory, `needed_bytes`, ties to the simpler one; bytes that
    none needs less than, which is as much unless the deadline of `time.perf_counter` ended the search).

    With `enough_bytes` it ends as soon as a setting needs no more than that, or none can: the setting is then one that
    does, if there is one.

    Exact: where as many micro-batches are in flight when all gradients are there as ever, memory never falls with the
    micro-batch (with it fewer are in flight, but not fewer sequences) or with the chunks of a rank, so of these
    settings only the smallest of both are looked at; of all, in order of what parameters alone take, those whose bound
    is below the best.
    """
    waiting: list[tuple[float, tuple[int, ...], Partition | Setting]] = [
        (evaluator.least_bytes_of(p), p.order, p) for p in partitions
    ]
    heapq.heapify(waiting)
    smallest: dict[object, int] = {}
    for p in partitions:
        key = (p.degrees, p.sequence_sharding)
        smallest[key] = min(p.micro_batch, smallest.get(key, p.micro_batch))
    reserved = evaluator.cluster.device.reserved_bytes
    best: Evaluation | None = None
    while waiting and (best is None or waiting[0][0] + reserved <= best.needed_bytes):
        bound = waiting[0][0] + reserved
        if best is not None and (
            time.perf_counter() > deadline_s
            or (enough_bytes is not None and (best.needed_bytes <= enough_bytes or bound > enough_bytes))
        ):
            return best, bound
        _, _, item = heapq.heappop(waiting)
        if isinstance(item, Partition):
            for s in _worth_a_look(
                settings_of(item), item.micro_batch == smallest[item.degrees, item.sequence_sharding]
            ):
                heapq.heappush(waiting, (evaluator.least_bytes(s), s.order, s))
        else:
            found = evaluator.lacking(item)
            if best is None or _rank(found) < _rank(best):
                best = found
    assert best is not None, "a search without settings"
    return best, best.needed_bytes


def _worth_a_look(settings: Sequence[Setting], smallest: bool) -> list[Setting]:
    """Those with fewer in flight when all gradients are there; of the others those with fewest chunks, if their
    micro-batch is the smallest."""
    chunks = min(s.virtual_stages for s in settings)
    return [s for s in settings if _drains(s) or (smallest and s.virtual_stages == chunks)]


def _drains(setting: Setting) -> bool:
    """Whether the first backwards leave less in flight than they found, on some stage."""
    runs, pp = ((setting.schedule, setting.virtual_stages),), setting.degrees.pp
    (first, _), *_, (last, _) = bounding_flights(runs, pp, setting.micro_batches)
    return bool((last < first).any())


def _rank(found: Evaluation) -> tuple[float, tuple[int, ...]]:
    return math.ceil(found.needed_bytes), found.setting.order
