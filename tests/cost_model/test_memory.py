"""Micro-batches in flight, precision recipes and per-stage memory."""

from __future__ import annotations

import pytest

from autopar.cost_model.memory import recipe
from autopar.cost_model.moments import in_flight
from autopar.errors import SpecError


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "expected"),
    [("1f1b", 8, [4, 3, 2, 1]), ("1f1b", 2, [2, 2, 2, 1]), ("gpipe", 8, [8, 8, 8, 8])],
)
def test_in_flight(schedule: str, micro_batches: int, expected: list[int]) -> None:
    """Field case pm-03."""
    assert [in_flight(schedule, s, 4, micro_batches) for s in range(4)] == expected


def test_without_pipeline_one_micro_batch_is_held() -> None:
    assert in_flight("gpipe", 0, 1, 8) == 1


@pytest.mark.parametrize(
    ("precision", "optimizer", "gradient_dtype", "total"),
    [
        ("fp32", "adamw", "same", 16), ("fp64", "adamw", "same", 32), ("bf16-mixed", "adamw", "same", 16),
        ("bf16-mixed", "adamw", "fp32", 18), ("bf16", "adamw", "same", 8), ("fp32", "sgd", "same", 8),
    ],
)  # fmt: skip
def test_bytes_per_parameter(precision: str, optimizer: str, gradient_dtype: str, total: int) -> None:
    assert recipe(precision, optimizer, gradient_dtype).total_bytes == total


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(SpecError, match="did you mean 'adamw'"):
        recipe("fp32", "adamww")
