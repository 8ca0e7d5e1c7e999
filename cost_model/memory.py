"""Bytes a rank holds: precision recipes of parameters, gradients and optimizer, and micro-batches in flight.

bytes per parameter      parameter  gradient  master  each Adam moment
  fp32, fp64             4, 8       as it     -       as it
  bf16, fp16 (pure)      2          2         -       2 (torch keeps moments in the parameter's dtype)
  bf16-mixed             2          2 or 4    4       4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.errors import SpecError, nearest

__all__ = ["CATEGORIES", "COMPUTE_DTYPES", "Recipe", "in_flight", "recipe"]

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "reserved")

COMPUTE_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-mixed": torch.bfloat16,
}
_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1}


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter by category; `optimizer_bytes` holds moments and master copy."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def update_traffic_bytes(self) -> int:
        """Memory traffic of one optimizer update: everything read, all but the gradient written."""
        return 2 * self.total_bytes - self.gradient_bytes


def recipe(precision: str, optimizer: str, gradient_dtype: str = "same") -> Recipe:
    """The recipe of a training run. Raises SpecError for an optimizer whose state is not known."""
    if optimizer.lower() not in _MOMENTS:
        raise SpecError(
            f"unknown optimizer {optimizer!r}", where="train: optimizer", try_=nearest(optimizer, list(_MOMENTS))
        )
    moments = _MOMENTS[optimizer.lower()]
    size = COMPUTE_DTYPES[precision].itemsize
    gradient = 4 if gradient_dtype == "fp32" else size
    if precision == "bf16-mixed":
        return Recipe(size, gradient, 4 + 4 * moments)
    return Recipe(size, gradient, size * moments)


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at its peak. Without a pipeline each is done before the next."""
    if stages == 1:
        return 1
    if schedule == "gpipe":
        return micro_batches
    return min(micro_batches, stages - stage)
