"""pf-03 (NVIDIA/Megatron-LM#1829, sail-sg/zero-bubble-pipeline-parallelism#21): how micro-batches and virtual stages
change the idle time, from the simulation of the order that torch executes."""

from __future__ import annotations

import pytest

from autopar.cost_model.schedule_sim import StageTime, simulate


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "idle"), [(4, 4, 0.429), (4, 8, 0.273), (4, 16, 0.158), (2, 1, 0.5)]
)
def test_one_stage_a_rank(schedule: str, ranks: int, micro_batches: int, idle: float) -> None:
    timeline = simulate(schedule, [StageTime(1.0, 2.0)] * ranks, micro_batches)
    assert timeline.idle_fraction == pytest.approx(idle, abs=0.0006)


def test_two_chunks_a_rank() -> None:
    timeline = simulate("interleaved", [StageTime(0.5, 1.0)] * 8, 8, virtual_stages=2)
    assert timeline.idle_fraction == pytest.approx(0.158, abs=0.0006)
