"""What each pipeline rank does, in order: the schedules that torch.distributed.pipelining executes, as data.

An action is a forward, a whole backward, or one half of a backward (input gradient, weight gradient) of one stage and
one micro-batch. Stages go round the ranks: stage s lies on rank s mod p, and rank r holds stages r, r + p, ...

gpipe         all forwards, then all backwards
1f1b          p - r forwards, then a backward and a forward in turn; fewer micro-batches than ranks run as gpipe
interleaved   v stages a rank, rounds of micro-batches walk through them depth first (Narayanan et al. 2021)
zero-bubble   ZB1P: backward split in two; the weight half is put off by as many micro-batches as the rank's index
              (Qi et al. 2024)
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.errors import SpecError

__all__ = ["BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FORWARD", "Action", "rank_orders"]

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"


class Action(NamedTuple):
    """`kind` is FORWARD, BACKWARD, BACKWARD_INPUT or BACKWARD_WEIGHT; `stage` is global. Prints like torch's: 3F12."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def rank_orders(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> tuple[list[Action], ...]:
    """The actions of every rank, in the order it executes them.

    Raises SpecError for virtual stages in a schedule that has none, or micro-batches that make no equal rounds.
    """
    if schedule in ("gpipe", "1f1b"):
        if virtual_stages != 1:
            raise SpecError(f"{schedule} runs one stage a rank", where="virtual_stages", try_="schedule interleaved")
        eager = schedule == "1f1b" and micro_batches >= ranks
        make = _one_f_one_b if eager else _gpipe
        return tuple(make(rank, ranks, micro_batches) for rank in range(ranks))
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise SpecError(
            f"{micro_batches} micro-batches do not fall into {rounds} equal rounds over {ranks} ranks",
            where="micro_batch",
            try_=f"a multiple of {ranks} micro-batches",
        )
    split = schedule == "zero-bubble"
    return tuple(
        _Looped(rank, ranks, micro_batches, virtual_stages, micro_batches // rounds, split).order()
        for rank in range(ranks)
    )


def _gpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    return [Action(kind, rank, i) for kind in (FORWARD, BACKWARD) for i in range(micro_batches)]


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    warmup = min(micro_batches, ranks - rank)
    order = [Action(FORWARD, rank, i) for i in range(warmup)]
    for i in range(micro_batches):
        order.append(Action(BACKWARD, rank, i))
        if warmup + i < micro_batches:
            order.append(Action(FORWARD, rank, warmup + i))
    return order


class _Looped:
    """The order of one rank under interleaved 1F1B or ZB1P, built step by step."""

    def __init__(
        self, rank: int, ranks: int, micro_batches: int, local_stages: int, per_round: int, split: bool
    ) -> None:
        self._rank, self._ranks, self._local_stages, self._per_round = rank, ranks, local_stages, per_round
        self._split = split
        self._steps = local_stages * micro_batches
        distance = ranks - 1 - rank
        warmup = (local_stages - 1) * per_round + (1 if split else 2) * distance
        self._warmup = min(warmup, self._steps)
        self._done: dict[tuple[str, int], int] = {}
        self._order: list[Action] = []

    def order(self) -> list[Action]:
        for step in range(self._warmup):
            self._append(FORWARD, self._forward_stage(step))
        for backward in range(self._steps):
            step = self._warmup + backward
            if step < self._steps:
                self._append(FORWARD, self._forward_stage(step))
            self._append(BACKWARD_INPUT if self._split else BACKWARD, self._backward_stage(backward))
            if self._split and backward >= self._rank:
                self._append(BACKWARD_WEIGHT, self._backward_stage(backward - self._rank))
        if self._split:
            for backward in range(max(0, self._steps - self._rank), self._steps):
                self._append(BACKWARD_WEIGHT, self._backward_stage(backward))
        return self._order

    def _append(self, kind: str, stage: int) -> None:
        micro_batch = self._done.get((kind, stage), 0)
        self._done[kind, stage] = micro_batch + 1
        self._order.append(Action(kind, stage, micro_batch))

    def _forward_stage(self, step: int) -> int:
        return (step // self._per_round) % self._local_stages * self._ranks + self._rank

    def _backward_stage(self, backward: int) -> int:
        local = self._local_stages - 1 - (backward // self._per_round) % self._local_stages
        return local * self._ranks + self._rank
