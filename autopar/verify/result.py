"""What a comparison found: errors tensor by tensor, the worst of them over all ranks, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.plan import Plan
from autopar.verify.record import Record

__all__ = ["VerifyResult", "compared", "everyone", "layout_text"]


@dataclass(frozen=True)
class VerifyResult:
    """Largest relative errors of loss, gradients and weights (after SGD and after AdamW).

    worst             the tensors furthest off: {"what", "name", "error"}, worst first
    differing_copies  parameters whose replicas were not the same to the bit
    notices           what was changed for the comparison
    """

    loss_error: float
    grad_error: float
    weight_error: float
    worst: tuple[Mapping[str, Any], ...]
    plan: Plan
    tolerance: float
    steps: int
    differing_copies: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """False also for NaN."""
        errors = (self.loss_error, self.grad_error, self.weight_error)
        return not self.differing_copies and all(e <= self.tolerance for e in errors)

    def to_data(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "loss_error": self.loss_error,
            "grad_error": self.grad_error,
            "weight_error": self.weight_error,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "worst": [dict(w) for w in self.worst],
            "differing_copies": list(self.differing_copies),
            "notices": list(self.notices),
            "plan": self.plan.to_data(),
        }

    def text(self) -> str:
        """A short report."""
        plan, steps = self.plan, self.steps
        lines = [
            f"plan: {layout_text(plan)}",
            f"run: {plan.global_batch} x {plan.seq_len} tokens, {steps} SGD and {steps} AdamW steps",
            f"loss      {self.loss_error:.2e}",
            f"gradients {self.grad_error:.2e}",
            f"weights   {self.weight_error:.2e}   (largest relative errors; tolerance {self.tolerance:.0e})",
        ]
        lines += [f"  {w['error']:.2e}  {w['what']}  {w['name']}" for w in self.worst]
        if self.differing_copies:
            lines.append(f"copies differ between ranks: {', '.join(self.differing_copies)}")
        lines += [f"notice: {notice}" for notice in self.notices]
        return "\n".join([*lines, "passed" if self.passed else "FAILED"])


def layout_text(plan: Plan) -> str:
    """The plan in one line: degrees and how they are run, without what is at its default."""
    degrees = plan.degrees
    axes = [f"{axis} {size}" for axis in ("dp", "cp", "tp", "pp") if (size := getattr(degrees, axis)) > 1]
    parts = [*axes, f"micro-batch {plan.micro_batch}"]
    if degrees.pp > 1:
        virtual = f" ({plan.virtual_stages} stages a rank)" if plan.virtual_stages > 1 else ""
        parts.append(plan.schedule + virtual)
    parts += ["sequence sharded"] if plan.sequence_sharding else []
    group = f" over {plan.zero_group}" if plan.zero_group else ""
    parts += [f"zero {plan.zero}{group}"] if plan.zero else []
    parts += [f"{plan.context_parallel} attention"] if degrees.cp > 1 else []
    modes = sorted({mode for mode in plan.checkpoint.values() if mode != "none"})
    parts += [f"checkpoint {' and '.join(modes)}"] if modes else []
    parts += [f"{plan.checkpoint_segment} layers together"] if plan.checkpoint_segment > 1 else []
    return ", ".join(parts)


def compared(
    mine: Record, reference: Record, plan: Plan, tolerance: float, steps: int, copies: list[str]
) -> VerifyResult:
    """Errors of this rank, then the worst over all ranks. Collective."""
    errors = [{"what": "loss", "name": "loss", "error": _scalar_error(mine.loss, reference.loss)}]
    for name, expected in reference.gradients.items():
        errors.append({"what": "gradient", "name": name, "error": _gradient_error(mine.gradients.get(name), expected)})
    for optimizer, weights in reference.weights.items():
        for name, expected_weight in weights.items():
            error = _error(mine.weights[optimizer][name], expected_weight)
            errors.append({"what": f"weight after {optimizer}", "name": name, "error": error})
    entries = [entry for of_rank in everyone(errors) for entry in of_rank]

    def largest(what: str) -> float:
        found = [e["error"] for e in entries if e["what"].startswith(what)]
        return math.nan if any(math.isnan(e) for e in found) else max(found, default=0.0)

    by_place: dict[tuple[str, str], dict[str, Any]] = {}
    # A wrong loss comes first: it is the cause, wrong gradients the effect.
    order = sorted(entries, key=lambda e: (e["what"] != "loss" or e["error"] <= tolerance, -_or_infinite(e["error"])))
    for entry in order:
        by_place.setdefault((entry["what"], entry["name"]), entry)
    return VerifyResult(
        loss_error=largest("loss"),
        grad_error=largest("gradient"),
        weight_error=largest("weight"),
        worst=tuple(list(by_place.values())[:5]),
        plan=plan,
        tolerance=tolerance,
        steps=steps,
        differing_copies=tuple(dict.fromkeys(copies)),
    )


def everyone(value: Any) -> list[Any]:
    """`value` of every rank, in rank order. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _gradient_error(mine: Tensor | None, expected: Tensor | None) -> float:
    """A missing gradient counts as zero: an optimizer may treat the two differently, which the weights then show."""
    if mine is None and expected is None:
        return 0.0
    present = mine if mine is not None else expected
    assert present is not None
    zero = torch.zeros_like(present)
    return _error(zero if mine is None else mine, zero if expected is None else expected)


def _error(mine: Tensor, expected: Tensor) -> float:
    if mine.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    difference = (mine.to(expected.device).double() - expected.double()).abs()
    return (difference.max() / expected.double().abs().max().clamp(min=1e-3)).item()


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _scalar_error(mine: float, expected: float) -> float:
    return abs(mine - expected) / max(1e-3, abs(expected))
