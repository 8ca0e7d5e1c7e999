"""Analytic lower bound of a step: every op of the model at 1/(tp cp) of its single-rank time (launches are not
divided), the pipeline's slowest stage at least the mean stage, its bubble and receives under the best number of chunks,
no other communication, no recompute, no tail.
"""

from __future__ import annotations

import math

from autopar.cost_model.candidates import Partition

__all__ = ["least_busy_s", "least_whole_s"]


def least_whole_s(partition: Partition, seconds: float, launches: float) -> float:
    """Seconds that a micro-batch takes at least through the whole model; `seconds` and `launches` are of a single rank
    (see `ModelPrices.single_rank_seconds`)."""
    d = partition.degrees
    return (seconds - launches) / (d.tp * d.cp) + launches


def least_busy_s(partition: Partition, whole_s: float, chunks: int, sends_s: tuple[float, float]) -> float:
    """Seconds of a step (its straggler factor and overhead aside) that no setting of a partition can beat: passes of
    the micro-batches through stages of equal time, the bubble, and receives.

    whole_s: of a micro-batch through the whole model; chunks: most chunks a rank may hold, 0 if a schedule without a
    bubble runs; sends_s: receives of a micro-batch by a stage that holds one chunk, and by each of several. The more
    chunks, the shorter the bubble and the more receives: a sum convex in them, so two are enough to look at.
    """
    pp, m = partition.degrees.pp, partition.micro_batches
    plain_s, each_s = sends_s
    if pp == 1:
        return m * whole_s
    if chunks == 0 or math.isinf(whole_s):
        return m * (whole_s / pp + min(sends_s))

    def with_chunks(v: int, send_s: float) -> float:
        return (m + (pp - 1) / v) * whole_s / pp + (m * v + pp - 1) * send_s

    best = math.sqrt((pp - 1) / pp * whole_s / (m * each_s)) if each_s > 0 else chunks
    low = min(chunks, int(best))
    several = {max(2, low), min(chunks, max(2, low + 1))} if chunks > 1 else set()
    return min([with_chunks(1, plain_s), *(with_chunks(v, each_s) for v in several)])
