"""The least memory any plan can live in, whatever its time: what a search lacks, and the objective "memory"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.cost_model.candidates import Partition, Setting
from autopar.cost_model.evaluate import Evaluation, Evaluator

__all__ = ["least_memory"]


def least_memory(
    evaluator: Evaluator, partitions: Sequence[Partition], settings_of: Callable[[Partition], list[Setting]]
) -> Evaluation:
    """The setting whose fullest stage needs least device memory (`needed_bytes`), ties to the simpler one.

    Exact: memory never falls with the micro-batch (with it fewer are in flight, but not fewer sequences) or with the
    chunks of a rank, so of each layout only the smallest of both are looked at; of these, in order of what parameters
    alone take, those whose bound is below the best.
    """
    smallest: dict[object, Partition] = {}
    for p in partitions:
        key = (p.degrees, p.sequence_sharding)
        if key not in smallest or p.micro_batch < smallest[key].micro_batch:
            smallest[key] = p
    waiting = []
    for partition in smallest.values():
        settings = settings_of(partition)
        chunks = min(s.virtual_stages for s in settings)
        waiting += [(evaluator.least_bytes(s), s.order, s) for s in settings if s.virtual_stages == chunks]
    reserved = evaluator.cluster.device.reserved_bytes
    best: Evaluation | None = None
    for bound, _, setting in sorted(waiting, key=lambda item: item[:2]):
        if best is not None and bound + reserved > best.needed_bytes:
            break
        found = evaluator.lacking(setting)
        if best is None or _rank(found) < _rank(best):
            best = found
    assert best is not None, "a search without settings"
    return best


def _rank(found: Evaluation) -> tuple[float, tuple[int, ...]]:
    return math.ceil(found.needed_bytes), found.setting.order
