"""Event simulation of a pipeline schedule: every action starts when its rank is free and its inputs have arrived.

    F(s, i)  needs F(s - 1, i), sent over if it ran on another rank
    B(s, i)  needs F(s, i) and B(s + 1, i), sent over likewise (I instead of B where backward is split)
    W(s, i)  needs I(s, i)

A send delays what waits for it and occupies no rank. Closed forms, for equal stages and free sends, of what the
simulation gives exactly (f, b, w seconds of forward, backward and its weight half of one of the p v stages):

    gpipe, 1f1b   (m + p - 1) (f + b)                      idle (p - 1) / (m + p - 1)
    interleaved   (v m + p - 1) (f + b)                    idle (p - 1) / (v m + p - 1)
                  (v p + m - 1) (f + b)                    m < p: a round is not filled
    zero-bubble   m (f + b) + (p - 1) (f + b - 2 w)        v = 1, w <= b / 2
                  (m + p - 1) (f + b - w) + w              m < p

Of unequal stages the search takes (m - 1/v) of the slowest rank and 1/v of all: never below what 1F1B takes; below
what GPipe takes where the slowest forward and the slowest backward are two stages' (4 % seen, where some recompute),
and up to 15 % off where the chunks of an interleaved rank differ by 40 %. The search simulates near ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_model.schedule_orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    rank_orders,
)
from autopar.errors import SpecError

__all__ = ["Event", "StageTime", "Timeline", "closed_form_s", "simulate"]


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch through one stage. `backward_s` is the whole backward, recompute included;
    `weight_s` the part of it that only weight gradients need."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight_s <= self.backward_s or self.forward_s < 0:
            raise SpecError(f"times must satisfy 0 <= weight_s <= backward_s and 0 <= forward_s: {self}", where="stage")

    def of(self, kind: str) -> float:
        """Seconds of an action of that kind."""
        return {
            FORWARD: self.forward_s,
            BACKWARD: self.backward_s,
            BACKWARD_INPUT: self.backward_s - self.weight_s,
            BACKWARD_WEIGHT: self.weight_s,
        }[kind]


@dataclass(frozen=True)
class Event:
    """An action and when it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What each rank did and when, `events[rank]` in order of execution."""

    events: tuple[tuple[Event, ...], ...]

    @property
    def step_s(self) -> float:
        return max((events[-1].end_s for events in self.events if events), default=0.0)

    @property
    def idle_fraction(self) -> float:
        """Share of rank-seconds in which nothing is computed: the bubble."""
        busy_s = sum(e.end_s - e.start_s for events in self.events for e in events)
        return 1.0 - busy_s / (len(self.events) * self.step_s) if self.step_s else 0.0

    def peak_in_flight(self, rank: int) -> int:
        """Most (stage, micro-batch) pairs whose activations a rank holds at once: from the start of the forward to the
        end of the backward, of its weight half where it is split."""
        held = peak = 0
        for event in self.events[rank]:
            held += event.action.kind == FORWARD
            peak = max(peak, held)
            held -= event.action.kind in (BACKWARD, BACKWARD_WEIGHT)
        return peak

    def text(self, width: int = 100) -> str:
        """A line a rank, time from left to right in at most `width` columns. Forwards show the last digit of their
        micro-batch, backwards a letter (a for micro-batch 0), weight gradients `w`, idle time a dot."""
        scale = width / self.step_s if self.step_s else 0.0
        lines = []
        for rank, events in enumerate(self.events):
            cells = ["."] * width
            for event in events:
                first, last = round(event.start_s * scale), max(round(event.end_s * scale), 1)
                cells[first:last] = _symbol(event.action) * (last - first)
            lines.append(f"rank {rank:<3} {''.join(cells)[:width]}")
        return "\n".join(lines) + "\n"


def simulate(
    schedule: str, stages: Sequence[StageTime], micro_batches: int, *, virtual_stages: int = 1, send_s: float = 0.0
) -> Timeline:
    """Run a step. `stages` in model order, ranks times `virtual_stages` of them; `send_s` seconds to the next rank.

    Raises SpecError if stages do not divide into virtual stages or the schedule does not exist for these numbers.
    """
    if len(stages) % virtual_stages:
        raise SpecError(f"{len(stages)} stages are not {virtual_stages} a rank", where="virtual_stages")
    ranks = len(stages) // virtual_stages
    orders = rank_orders(schedule, ranks, micro_batches, virtual_stages)
    end_s: dict[Action, float] = {}
    events: list[list[Event]] = [[] for _ in orders]
    positions, free_s = [0] * ranks, [0.0] * ranks
    waiting = True
    while waiting:
        waiting = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                ready = _ready_s(action, len(stages), ranks, send_s, end_s)
                if ready is None:
                    break
                start = max(free_s[rank], ready)
                free_s[rank] = end_s[action] = start + stages[action.stage].of(action.kind)
                events[rank].append(Event(action, start, end_s[action]))
                positions[rank] += 1
                waiting = True
    unfinished = [str(order[i]) for order, i in zip(orders, positions, strict=True) if i < len(order)]
    assert not unfinished, f"the schedule {schedule} waits for itself at {', '.join(unfinished)}"
    return Timeline(tuple(map(tuple, events)))


def closed_form_s(schedule: str, stage: StageTime, ranks: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Seconds of a step of equal stages with free sends; see the module docstring for its limits."""
    f, b, w, m, v = stage.forward_s, stage.backward_s, stage.weight_s, micro_batches, virtual_stages
    if schedule == "zero-bubble":
        filled = m * v * (f + b) + (ranks - 1) * (f + b - 2 * w)
        return max(filled, (m + ranks - 1) * (f + b - w) + w) if v == 1 else filled
    return (max(v * m + ranks, v * ranks + m) - 1) * (f + b)


def _ready_s(action: Action, stages: int, ranks: int, send_s: float, end_s: dict[Action, float]) -> float | None:
    """When the inputs of an action are there; None if one of them has not been computed yet."""
    kind, stage, i = action
    needs: list[tuple[Action, float]] = []
    if kind == FORWARD and stage > 0:
        needs = [(Action(FORWARD, stage - 1, i), _hop_s(ranks, send_s))]
    elif kind in (BACKWARD, BACKWARD_INPUT):
        needs = [(Action(FORWARD, stage, i), 0.0)]
        if stage + 1 < stages:
            needs.append((Action(kind, stage + 1, i), _hop_s(ranks, send_s)))
    elif kind == BACKWARD_WEIGHT:
        needs = [(Action(BACKWARD_INPUT, stage, i), 0.0)]
    if any(need not in end_s for need, _ in needs):
        return None
    return max((end_s[need] + delay for need, delay in needs), default=0.0)


def _hop_s(ranks: int, send_s: float) -> float:
    return send_s if ranks > 1 else 0.0


def _symbol(action: Action) -> str:
    if action.kind == FORWARD:
        return str(action.micro_batch % 10)
    return "w" if action.kind == BACKWARD_WEIGHT else chr(ord("a") + action.micro_batch % 22)
