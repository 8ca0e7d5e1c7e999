"""When a rank holds most: the closed forms against the orders that torch executes, action by action."""

from __future__ import annotations

from collections import defaultdict

import pytest

from autopar.cost_model.moments import bounding_flights, flights
from autopar.cost_model.schedule_orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    rank_orders,
)

RUNS = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 6)]


def _held(order: list[Action], ranks: int, chunks: int) -> dict[int, list[list[int]]]:
    """By chunks with gradients, micro-batches in flight of each chunk whenever a backward starts."""
    held, done = [0] * chunks, set()
    found: dict[int, list[list[int]]] = defaultdict(list)
    for action in order:
        chunk = action.stage // ranks
        if action.kind == FORWARD:
            held[chunk] += 1
            continue
        found[len(done)].append(list(held))
        if action.kind != BACKWARD_INPUT:
            assert action.kind in (BACKWARD, BACKWARD_WEIGHT)
            done.add(chunk)
            held[chunk] -= 1
    found[chunks].append(held)  # the end of the step
    return found


@pytest.mark.parametrize(("schedule", "chunks"), RUNS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 1.5, 2, 3, 4])
def test_flights_are_those_of_the_orders(schedule: str, chunks: int, ranks: int, rounds: float) -> None:
    micro_batches = int(ranks * rounds)
    for rank, order in enumerate(rank_orders(schedule, ranks, micro_batches, chunks)):
        held = _held(order, ranks, chunks)
        most = {j: max(map(sum, rows)) for j, rows in held.items()}
        found = flights(schedule, rank, ranks, micro_batches, chunks)
        bounding = [(f[0, rank], g[0, rank]) for f, g in bounding_flights(((schedule, chunks),), ranks, micro_batches)]
        assert [bounding[0][1], bounding[-1][1]] == [0, 1]
        for in_flight, share in bounding:
            assert in_flight * chunks == pytest.approx(most[round(share * chunks)])
        for flight in found:
            j = round(flight.gradients * chunks)
            assert flight.in_flight * chunks == pytest.approx(most[j])
        for j, flown in most.items():  # nothing is missed: another holds as much with as many gradients
            assert any(f.in_flight * chunks >= flown - 1e-9 and f.gradients * chunks >= j - 1e-9 for f in found), j


@pytest.mark.parametrize("chunks", [2, 3, 6])
@pytest.mark.parametrize("micro_batches", [4, 6, 8, 16])
def test_unequal_chunks(chunks: int, micro_batches: int) -> None:
    """Layers in flight where the first i of v chunks hold one more, and all of them at least one."""
    for rank, order in enumerate(rank_orders("interleaved", 4, micro_batches, chunks)):
        held = _held(order, 4, chunks)
        for flight in flights("interleaved", rank, 4, micro_batches, chunks):
            rows = held[round(flight.gradients * chunks)]
            for more, excess in enumerate(flight.excess):
                layers = chunks + more
                most = max(sum(row) + sum(row[:more]) for row in rows)
                assert layers * flight.in_flight + excess == pytest.approx(most)
