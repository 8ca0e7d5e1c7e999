"""Simulated schedules: the orders are torch's own, times agree with the closed forms, memory with the memory model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.cost_model.moments import in_flight
from autopar.cost_model.schedule_orders import rank_orders
from autopar.cost_model.schedule_sim import StageTime, closed_form_s, simulate
from autopar.errors import SpecError


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 10, 12, 16, 24])
@pytest.mark.parametrize(
    ("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1)]
)
def test_equal_stages_take_what_the_closed_form_says(
    schedule: str, virtual: int, ranks: int, micro_batches: int
) -> None:
    """Filled rounds, rounds longer than the pipeline (10 over 4), and fewer micro-batches than ranks."""
    stage = StageTime(1.0, 2.0, 0.9)
    timeline = simulate(schedule, [stage] * (ranks * virtual), micro_batches, virtual_stages=virtual)
    assert timeline.step_s == pytest.approx(closed_form_s(schedule, stage, ranks, micro_batches, virtual), rel=0.01)


def _torch_order(schedule: str, rank: int, ranks: int, micro_batches: int, virtual: int) -> list[str]:
    """torch's own order for one rank; it needs no process group and no stage."""
    cls: Any = {
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    }[schedule]
    rounds = max(1, micro_batches // ranks)
    fields = SimpleNamespace(
        pp_group_size=ranks, n_local_stages=virtual, _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    return [str(action) for action in cls._calculate_single_rank_operations(fields, rank) if action is not None]


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 10, 2), (4, 3, 2)]
)
def test_orders_are_those_torch_executes(schedule: str, ranks: int, micro_batches: int, virtual: int) -> None:
    ours = rank_orders(schedule, ranks, micro_batches, virtual)
    for rank in range(ranks):
        assert list(map(str, ours[rank])) == _torch_order(schedule, rank, ranks, micro_batches, virtual)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [2, 4, 9])
def test_micro_batches_in_flight_are_those_the_memory_model_counts(schedule: str, micro_batches: int) -> None:
    timeline = simulate(schedule, [StageTime(1.0, 2.0)] * 4, micro_batches)
    for stage in range(4):
        # With fewer micro-batches than stages torch runs 1F1B as GPipe, which then holds no more: all of them.
        expected = in_flight(schedule if micro_batches >= 4 else "gpipe", stage, 4, micro_batches)
        assert timeline.peak_in_flight(stage) == expected


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    times=st.lists(st.tuples(st.floats(0.1, 2), st.floats(2, 3)), min_size=2, max_size=6),
    micro_batches=st.integers(6, 12),
    send_s=st.floats(0, 0.5),
)
def test_1f1b_takes_no_longer_than_the_sum_form(
    times: list[tuple[float, float]], micro_batches: int, send_s: float
) -> None:
    """(m - 1) slowest + one micro-batch through all stages, a stage's sends counted with its own time. With stages that
    recompute beside others that do not, a backward of 3 forwards beside one of 2, a percent more at most."""
    stages = [StageTime(f, f * ratio) for f, ratio in times]
    whole = [stage.forward_s + stage.backward_s + 2 * send_s for stage in stages]
    step_s = simulate("1f1b", stages, micro_batches, send_s=send_s).step_s
    assert step_s <= 1.01 * ((micro_batches - 1) * max(whole) + sum(whole))
    assert step_s >= micro_batches * (max(whole) - 2 * send_s) - 1e-9


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    schedule=st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]),
    slower=st.lists(st.floats(0.8, 1.25), min_size=12, max_size=12),
    ranks=st.integers(2, 4), rounds=st.integers(1, 4),
)  # fmt: skip
def test_unequal_stages_take_about_what_the_search_takes_them_for(
    schedule: tuple[str, int], slower: list[float], ranks: int, rounds: int
) -> None:
    """(m - 1/v) of the slowest rank and 1/v of all, put-off weight halves outside: not below a schedule without
    chunks, whose stages all keep one ratio of forward to backward; within a fifth of one with them."""
    (name, virtual), m = schedule, ranks * rounds
    split = name == "zero-bubble"
    stages = [StageTime(k, 2 * k, 0.9 * k if split else 0.0) for k in slower[: ranks * virtual]]
    whole = [sum(3 * k for k in slower[r : ranks * virtual : ranks]) for r in range(ranks)]
    put_off = [2 * 0.9 * k if split else 0.0 for k in slower[:ranks]]
    taken = (m - 1 / virtual) * max(whole) + (sum(whole) - sum(put_off)) / virtual + max(put_off)
    step_s = simulate(name, stages, m, virtual_stages=virtual).step_s
    assert step_s >= m * max(whole) * (1 - 1e-9)
    assert step_s <= taken * (1 + 1e-9) if virtual == 1 else abs(step_s / taken - 1) < 0.2


def test_sends_lie_between_the_stages() -> None:
    free, paid = (simulate("gpipe", [StageTime(1.0, 2.0)] * 3, 1, send_s=s).step_s for s in (0.0, 0.5))
    assert (free, paid) == (9.0, 9.0 + 4 * 0.5)
    assert simulate("gpipe", [StageTime(1.0, 2.0)], 3, send_s=0.5).step_s == 9.0


def test_timeline_as_text() -> None:
    text = simulate("1f1b", [StageTime(1.0, 1.0)] * 2, 2).text(12)
    assert text == "rank 0   0011..aa..bb\nrank 1   ..00aa11bb..\n"


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "virtual", "says"),
    [
        ("1f1b", 4, 8, 2, "one stage a rank"),
        ("interleaved", 8, 11, 2, "equal rounds"),
        ("interleaved", 7, 8, 2, "are not 2 a rank"),
    ],
)
def test_impossible_schedules_are_refused(
    schedule: str, stages: int, micro_batches: int, virtual: int, says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        simulate(schedule, [StageTime(1.0, 2.0)] * stages, micro_batches, virtual_stages=virtual)


def test_a_backward_shorter_than_its_weight_half_is_refused() -> None:
    with pytest.raises(SpecError, match="weight_s <= backward_s"):
        StageTime(1.0, 1.0, 2.0)
