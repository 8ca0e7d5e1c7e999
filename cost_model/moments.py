"""When a rank may hold most in a step: micro-batches in flight and gradients that are there, by schedule.

A chunk's gradients come into being in its first backward, while that gives up what was kept for it: both are never
there at once. A rank of a pipeline does W forwards, then a backward and a forward in turn; backward k (from 0) finds

    min(m v, W + k) - k    chunks in flight, of m micro-batches through v chunks
    ceil(k / r)            chunks with gradients, r micro-batches a round

W   gpipe m; 1F1B min(m, p - s); interleaved min(m v, 2 (p - s - 1) + (v - 1) r + 1); without a pipeline 1;
    zero-bubble min(m, p): what a put-off half of a backward reads is in flight too

so while j chunks have gradients, backward k_0 = 0, k_j = (j - 1) r + 1 finds most in flight. Within a backward bytes
change along with what is done of it, so one of its ends holds most.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Flight", "bounding_flights", "flights", "in_flight"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Flight:
    """`in_flight` micro-batches, in units of all chunks, while the share `gradients` of the chunks has gradients.

    excess: layers more in flight if i of v chunks, the first ones, hold one layer more than the others, by i.
    """

    in_flight: float
    gradients: float
    excess: tuple[float, ...] = (0.0,)


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Micro-batches whose activations a stage holds at its peak, in units of all its chunks.

    Without a pipeline each is done before the next. Interleaving warms up with two more chunks a stage and one round
    of all chunks but one (Megatron-LM's schedule); zero-bubble puts off as many weight gradients as it saves.
    """
    return _warm_up(schedule, stage, stages, micro_batches, virtual_stages) / virtual_stages


def _warm_up(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """W."""
    if stages == 1:
        return 1
    if chunks > 1:
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * _in_round(stages, micro_batches) + 1
        return min(micro_batches * chunks, ahead)
    ahead = {"gpipe": micro_batches, "zero-bubble": stages}.get(schedule, stages - stage)
    return min(micro_batches, ahead)


def _in_round(stages: int, micro_batches: int) -> int:
    """r."""
    return micro_batches // max(1, micro_batches // stages)


@lru_cache(maxsize=1 << 14)
def flights(
    schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1, most: int | None = None
) -> tuple[Flight, ...]:
    """Those at which a stage may hold most, by number of chunks with gradients; the last has all of them. Of more than
    `most` about as many, spread evenly."""
    ahead = _warm_up(schedule, stage, stages, micro_batches, chunks)
    each, total = _in_round(stages, micro_batches), micro_batches * chunks
    starts = [0, *(j * each + 1 for j in range(chunks))]
    held = [max(0, min(total - k, ahead)) for k in starts]
    chosen = [j for j in range(chunks) if held[j] > max(held[j + 1 :])]
    if most is not None:
        chosen = chosen[:: max(1, -(-len(chosen) // most))]
    found, numbers = [], (*chosen, chunks)
    spans = [(starts[j], starts[j + 1] if j < chunks else min(total, starts[j] + each * chunks)) for j in numbers]
    excesses = _excesses(spans, ahead, each, total, chunks) if chunks > 1 else [(0.0,)] * len(spans)
    for j, excess in zip(numbers, excesses, strict=True):
        found.append(Flight(held[j] / chunks, j / chunks, excess))
    return tuple(found)


def _excesses(
    spans: list[tuple[int, int]], ahead: int, each: int, total: int, chunks: int
) -> list[tuple[float, ...]]:  # fmt: skip
    """For each span of backwards: of the first i chunks, what is in flight beyond their share, at most at those
    backwards that find most in flight: one that finds less finds no more of any chunk than one before it."""
    k = np.concatenate([np.arange(*span, dtype=np.float64) for span in spans])[:, None]
    done = np.minimum(ahead + k, total)
    chunk = np.arange(chunks, dtype=np.float64)

    def passed(steps: Floats, place: Floats) -> Floats:
        """Micro-batches that went through the chunk at each place of a round, in so many steps."""
        rounds = steps // (each * chunks)
        through: Floats = rounds * each + np.minimum(np.maximum(steps - (rounds * chunks + place) * each, 0), each)
        return through

    held = passed(done, chunk) - passed(k, chunks - 1 - chunk)
    in_all = held.sum(axis=1)
    beyond = held.cumsum(axis=1) - held - in_all[:, None] * chunk / chunks
    borders = np.cumsum([0, *(high - low for low, high in spans)]).tolist()
    found = []
    for low, high in itertools.pairwise(borders):
        most = in_all[low:high] == in_all[low:high].max()
        found.append(tuple(np.maximum(0.0, beyond[low:high][most].max(axis=0)).tolist()))
    return found


@lru_cache(maxsize=1 << 10)
def bounding_flights(
    runs: tuple[tuple[str, int], ...], stages: int, micro_batches: int
) -> list[tuple[Floats, Floats]]:  # fmt: skip
    """(micro-batches in flight, share of the chunks with gradients), [run, stage], at moments that `flights` lists too,
    under several (schedule, chunks a rank): without gradients, with all of them, and where the number in flight begins
    to fall while gradients come. But for unequal chunks no other moment finds more: between these both change evenly.
    """
    v = np.array([chunks for _, chunks in runs], dtype=np.float64)[:, None]
    each, total = _in_round(stages, micro_batches), micro_batches * v
    after = np.arange(stages, dtype=np.float64)[::-1]
    ahead: Floats = np.minimum(total, 2 * after + (v - 1) * each + 1)
    for row, (schedule, chunks) in enumerate(runs):
        if chunks == 1 or stages == 1:
            ahead[row] = [_warm_up(schedule, s, stages, micro_batches, chunks) for s in range(stages)]
    full = np.clip((total - 1 - ahead) // each + 1, 0, v)  # the last number of chunks at which `ahead` are in flight
    found = []
    for j in (np.zeros(ahead.shape), full, np.minimum(full + 1, v), np.broadcast_to(v, ahead.shape)):
        left = np.where(j > 0, np.maximum(0.0, total - (j - 1) * each - 1), total)
        found.append((np.minimum(left, ahead) / v, j / v))
    return found
