"""Does a plan train as one process would? The same model and batch both ways, compared tensor by tensor.

Every number is a relative error, max |a - b| / max(1e-3, max |b|) per tensor, b from the plain model in one process.
Elements whose gradient is zero in exact arithmetic (key biases) come out as rounding noise below NOISE; AdamW would
blow that noise up to full steps, so such elements are left out of the AdamW comparison and counted in `left_out`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import passes
from autopar.api import build
from autopar.cost_model.search import search
from autopar.errors import AutoparError, SpecError
from autopar.models import resolve
from autopar.plan import Plan
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.runtime.limits import model_precision
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

__all__ = ["NOISE", "Factory", "VerifyResult", "verify", "verify_plans"]

Factory = Callable[[], tuple[nn.Module, Mapping[str, Any]]]
"""A module-level function that returns a fresh model and one global batch, the same at every call."""

NOISE = {torch.float64: 1e-12, torch.float32: 1e-7}
_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_TOLERANCE_OWN, _TOLERANCE_HF, _TOLERANCE_FP32 = 1e-10, 1e-6, 2e-5
_SGD_RATE, _ADAMW_RATE = 0.1, 1e-3
_ROWS, _SEQ = 8, 16


@dataclass(frozen=True)
class VerifyResult:
    """Largest relative errors of loss, gradients and weights (after SGD and after AdamW).

    worst             the tensors furthest off: {"what", "name", "error"}, worst first
    differing_copies  parameters whose replicas were not the same to the bit
    left_out          parameter -> elements left out of the AdamW comparison, see the module docstring
    """

    loss_error: float
    grad_error: float
    weight_error: float
    worst: tuple[Mapping[str, Any], ...]
    plan: Plan
    tolerance: float
    steps: int
    differing_copies: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

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
            "left_out": dict(self.left_out),
            "plan": self.plan.to_data(),
        }

    def text(self) -> str:
        """A short report."""
        d = self.plan.degrees
        sharded = ", sequence sharded" if self.plan.sequence_sharding else ""
        lines = [
            f"plan: dp {d.dp}, tp {d.tp}, pp {d.pp}, micro-batch {self.plan.micro_batch}, {self.plan.schedule}{sharded}; "
            f"{self.plan.global_batch} x {self.plan.seq_len} tokens, {self.steps} SGD and {self.steps} AdamW steps",
            f"loss      {self.loss_error:.2e}",
            f"gradients {self.grad_error:.2e}",
            f"weights   {self.weight_error:.2e}   (largest relative errors; tolerance {self.tolerance:.0e})",
        ]
        lines += [f"  {w['error']:.2e}  {w['what']}  {w['name']}" for w in self.worst]
        if self.differing_copies:
            lines.append(f"copies differ between ranks: {', '.join(self.differing_copies)}")
        if self.left_out:
            count = sum(self.left_out.values())
            lines.append(f"left out after AdamW: {count} elements without gradient, in {', '.join(self.left_out)}")
        return "\n".join([*lines, "passed" if self.passed else "FAILED"])


def verify(
    model: str | Factory,
    ranks: int,
    pins: Pins | None = None,
    *,
    plan: Plan | None = None,
    dtype: str = "float64",
    steps: int = 3,
    timeout_s: float = 600.0,
) -> VerifyResult:
    """Train `model` on `ranks` local gloo processes and on one, and compare.

    model: a name for `autopar.models.resolve`, or a Factory. Without `plan` the search picks one for `ranks` local
    processes within `pins`. Raises AutoparError if there is none, or the model cannot be captured.
    """
    results: list[VerifyResult] = run_ranks(
        ranks, _compare, model, ranks, pins, [plan], dtype, steps, timeout_s=timeout_s
    )[0]
    return results[0]


def verify_plans(
    model: str | Factory, plans: Sequence[Plan], *, dtype: str = "float64", steps: int = 1, timeout_s: float = 600.0
) -> list[VerifyResult]:
    """Several plans of equal world size on one set of processes: the model is built and captured once."""
    ranks = plans[0].degrees.world_size
    results: list[VerifyResult] = run_ranks(
        ranks, _compare, model, ranks, None, list(plans), dtype, steps, timeout_s=timeout_s
    )[0]
    return results


def _compare(
    model: str | Factory, ranks: int, pins: Pins | None, plans: list[Plan | None], dtype: str, steps: int
) -> list[VerifyResult]:
    """On every rank; the results are those of rank 0."""
    wanted = _DTYPES.get(dtype)
    if wanted is None:
        raise SpecError(f"{dtype!r} is not one of {', '.join(_DTYPES)}", where="dtype")
    module, batch = _materialize(model, wanted, pins or Pins())
    traced = passes.prepare(trace(module, batch))
    reference = _Record.of_model(module, batch, steps)  # on every rank: each compares its own view
    results = []
    for plan in plans:
        chosen = plan if plan is not None else _searched(traced, ranks, pins, batch)
        pm = build(copy.deepcopy(module), traced, chosen)
        record = _Record.of_parallel(pm, batch, steps, module.state_dict())
        copies = [name for names in _everyone(pm.differing_copies()) for name in names]
        results.append(_result(record, reference, chosen, _tolerance(module, wanted), steps, copies))
    return results


def _materialize(model: str | Factory, dtype: torch.dtype, pins: Pins) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if callable(model):
        module, batch = model()
    else:
        source = resolve(model)
        rows = math.lcm(_ROWS, (pins.dp or 1) * (pins.microbatch or 1))
        module, batch = source.build("cpu"), source.example(rows, _SEQ)
    return module.to(dtype).train(), dict(batch)


def _searched(traced: Any, ranks: int, pins: Pins | None, batch: Mapping[str, Tensor]) -> Plan:
    first = next(t for t in batch.values() if isinstance(t, Tensor) and t.dim() >= 2)
    train = TrainSpec(global_batch=first.shape[0], seq_len=first.shape[1], precision=model_precision(traced))
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [search(traced, ClusterSpec.parse(f"local:{ranks}"), train, pins).plan]
        except AutoparError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], AutoparError):
        raise answer[0]
    found: Plan = answer[0]
    return found


@dataclass(frozen=True)
class _Record:
    """What one way of training gives: loss and gradients of the first step, weights after SGD and after AdamW."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    sgd: Mapping[str, Tensor]
    adamw: Mapping[str, Tensor]
    smallest_gradients: Mapping[str, Tensor]

    @staticmethod
    def of_model(module: nn.Module, batch: Mapping[str, Any], steps: int) -> _Record:
        """The plain model; it is left as it was."""
        trained = copy.deepcopy(module)

        def step() -> float:
            loss = _loss_of(trained(**batch))
            loss.backward()
            return loss.item()

        def gradients() -> dict[str, Tensor | None]:
            return {n: None if p.grad is None else p.grad.clone() for n, p in trained.named_parameters()}

        return _record(trained, step, gradients, steps, module.state_dict())

    @staticmethod
    def of_parallel(pm: ParallelModule, batch: Mapping[str, Any], steps: int, initial: Mapping[str, Tensor]) -> _Record:
        return _record(pm, lambda: pm.step(batch).item(), pm.full_gradients, steps, initial)


def _record(
    trained: nn.Module,
    step: Callable[[], float],
    gradients: Callable[[], Mapping[str, Tensor | None]],
    steps: int,
    initial: Mapping[str, Tensor],
) -> _Record:
    losses: list[float] = []
    first: dict[str, Tensor | None] = {}
    smallest: dict[str, Tensor] = {}
    weights: dict[Any, dict[str, Tensor]] = {}
    initial = {name: t.clone() for name, t in initial.items()}
    for cls, rate in ((torch.optim.SGD, _SGD_RATE), (torch.optim.AdamW, _ADAMW_RATE)):
        trained.load_state_dict(initial)
        optimizer = cls([p for p in trained.parameters() if p.requires_grad], lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(step())
            now = gradients()
            first = first or dict(now)
            if cls is torch.optim.AdamW:
                for name, g in now.items():
                    if g is not None:
                        smallest[name] = g.abs() if name not in smallest else torch.minimum(smallest[name], g.abs())
            optimizer.step()
        weights[cls] = {name: t.detach().clone() for name, t in trained.state_dict().items()}
    return _Record(losses[0], first, weights[torch.optim.SGD], weights[torch.optim.AdamW], smallest)


def _loss_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    loss = outputs["loss"] if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise SpecError("the model returns no loss to compare", where="forward", try_="return it alone or as `loss`")
    return loss


def _result(
    mine: _Record, reference: _Record, plan: Plan, tolerance: float, steps: int, copies: list[str]
) -> VerifyResult:
    """Errors of this rank, then the worst over all ranks. Collective."""
    errors = [{"what": "loss", "name": "loss", "error": _scalar_error(mine.loss, reference.loss)}]
    for name, expected in reference.gradients.items():
        errors.append({"what": "gradient", "name": name, "error": _gradient_error(mine.gradients.get(name), expected)})
    left_out: dict[str, int] = {}
    for name, expected_weight in reference.sgd.items():
        errors.append({"what": "weight after SGD", "name": name, "error": _error(mine.sgd[name], expected_weight)})
    for name, expected_weight in reference.adamw.items():
        noise = _noise(reference.smallest_gradients.get(name))
        if noise is not None:
            left_out[name] = int(noise.sum())
        errors.append(
            {"what": "weight after AdamW", "name": name, "error": _error(mine.adamw[name], expected_weight, noise)}
        )
    everyone = [entry for entries in _everyone(errors) for entry in entries]

    def largest(what: str) -> float:
        found = [e["error"] for e in everyone if e["what"].startswith(what)]
        return math.nan if any(math.isnan(e) for e in found) else max(found, default=0.0)

    by_place: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in sorted(everyone, key=lambda e: (not math.isnan(e["error"]), -e["error"])):
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
        left_out=left_out,
    )


def _noise(smallest: Tensor | None) -> Tensor | None:
    """Elements whose gradient is rounding noise, where it is not zero outright; None if there are none."""
    if smallest is None:
        return None
    noise = (smallest < NOISE.get(smallest.dtype, 0.0)) & (smallest > 0)
    return noise if bool(noise.any()) else None


def _gradient_error(mine: Tensor | None, expected: Tensor | None) -> float:
    """A missing gradient counts as zero: an optimizer may treat the two differently, which the weights then show."""
    if mine is None and expected is None:
        return 0.0
    present = mine if mine is not None else expected
    assert present is not None
    zero = torch.zeros_like(present)
    return _error(zero if mine is None else mine, zero if expected is None else expected)


def _error(mine: Tensor, expected: Tensor, left_out: Tensor | None = None) -> float:
    if mine.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    difference = (mine.to(expected.device).double() - expected.double()).abs()
    if left_out is not None:
        difference = difference.masked_fill(left_out, 0.0)
    return (difference.max() / expected.double().abs().max().clamp(min=1e-3)).item()


def _scalar_error(mine: float, expected: float) -> float:
    return abs(mine - expected) / max(1e-3, abs(expected))


def _tolerance(module: nn.Module, dtype: torch.dtype) -> float:
    """Hugging Face models cast to fp32 inside, whatever dtype they have."""
    if dtype == torch.float32:
        return _TOLERANCE_FP32
    hugging_face = any(type(m).__module__.startswith("transformers.") for m in module.modules())
    return _TOLERANCE_HF if hugging_face else _TOLERANCE_OWN


def _everyone(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
