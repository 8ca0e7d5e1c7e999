"""What happens to the gradients of a step before anyone sees them: fp16 scaling undone, what is not finite dropped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.errors import AutoparError, SpecError
from autopar.plan import Plan
from autopar.runtime.grad_norm import GradientNorm
from autopar.runtime.precision import LossScale
from autopar.runtime.state import LocalState

__all__ = ["NON_FINITE", "StepJudge"]

NON_FINITE = ("keep", "skip", "stop")


class StepJudge:
    """Called once a step, on all ranks, with this step's gradients complete; see ParallelModule for `non_finite`.

    Whether gradients are finite is one number that all ranks agree on: all skip a step, or none. A skipped step has no
    gradients at all, so any optimizer leaves weights and state as they are. In fp16 an overflow is how the factor of
    the loss is found: it is skipped, and stops a run only where there is no factor left to lower.
    """

    def __init__(
        self, plan: Plan, non_finite: str, norm: GradientNorm, state: LocalState, device: torch.device
    ) -> None:
        if non_finite not in NON_FINITE:
            raise SpecError(f"{non_finite!r} is not one of {', '.join(NON_FINITE)}", where="non_finite")
        self._norm, self._state = norm, state
        self._stops = non_finite == "stop"
        self._scale = LossScale(device) if plan.precision == "fp16" else None
        self.looks = non_finite != "keep" or self._scale is not None
        self.steps, self.skipped = 0, 0
        self._notices: list[str] = []

    @property
    def scale(self) -> Tensor | None:
        """The factor of this step's loss, 0-d; None without loss scaling."""
        return None if self._scale is None else self._scale.value

    def __call__(self) -> None:
        self.steps += 1
        finite = bool(torch.isfinite(self._norm.total(math.inf)))
        if finite and self._scale is not None:
            self._norm.scale(1.0 / self._scale.value)
        if not finite:
            self._drop(stop=self._stops and (self._scale is None or bool(self._scale.value <= 1)))
        if self._scale is not None:
            self._scale.update(finite)

    def _drop(self, stop: bool) -> None:
        self.skipped += 1
        what = f"step {self.steps}: {self._norm.describe()}"
        for parameter in self._state.parameters.values():
            parameter.grad = None
        if stop:
            raise AutoparError(what, where="step", try_="a lower learning rate, or non_finite='skip'")
        self._notices.append(f"{what}; skipped")

    def new_notices(self) -> list[str]:
        """What happened since the last call."""
        notices, self._notices = self._notices, []
        return notices
