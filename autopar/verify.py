"""Does a plan train as one process would? The same model and batch both ways, compared tensor by tensor.

Every number is a relative error, max |a - b| / max(1e-3, max |b|) per tensor, b from the plain model in one process.
AdamW divides by the size of the gradient, so where a gradient is rounding noise (key biases, whose gradient is zero in
exact arithmetic; anything tiny in a model that casts to fp32 inside) it turns noise into full steps. The AdamW compared
here therefore has eps equal to its learning rate: a step then moves a weight by no more than its gradient is off.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar import passes
from autopar.api import build
from autopar.cost_model.search import search
from autopar.errors import AutoparError, SpecError, UnsupportedModelError
from autopar.ir import TracedModel
from autopar.models import resolve
from autopar.plan import Plan
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.runtime.limits import model_precision
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

__all__ = ["Factory", "VerifyResult", "verify", "verify_plans"]

Factory = Callable[[], tuple[nn.Module, Mapping[str, Any]]]
"""A module-level function that returns a fresh model and one global batch, the same at every call."""

_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_TOLERANCE_OWN, _TOLERANCE_HF, _TOLERANCE_FP32 = 1e-10, 1e-6, 2e-5
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3}),
}
_ROWS, _SEQ, _MOST_ROWS = 8, 16, 4096


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
        plan, d, steps = self.plan, self.plan.degrees, self.steps
        sharded = ", sequence sharded" if plan.sequence_sharding else ""
        lines = [
            f"plan: dp {d.dp}, tp {d.tp}, pp {d.pp}, micro-batch {plan.micro_batch}, {plan.schedule}{sharded}",
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
    traced, notices = _without_dropout(module, batch)
    reference = _Record.of_model(module, batch, steps)  # on every rank: each compares its own view
    results = []
    for plan in plans:
        chosen = plan if plan is not None else _searched(traced, ranks, pins, batch)
        pm = build(copy.deepcopy(module), traced, chosen)
        record = _Record.of_parallel(pm, batch, steps, module.state_dict())
        copies = [name for names in _everyone(pm.differing_copies()) for name in names]
        result = _result(record, reference, chosen, _tolerance(module, wanted), steps, copies)
        results.append(replace(result, notices=notices))
    return results


def _without_dropout(module: nn.Module, batch: Mapping[str, Any]) -> tuple[TracedModel, tuple[str, ...]]:
    """The captured model, and what had to be said. One that drops at random is put into evaluation mode: the masks of
    a parallel run are not those of the plain model, so there would be nothing to compare."""
    traced = passes.prepare(trace(module, batch))
    if not passes.draws_randomly(traced.graph_module.graph):
        return traced, ()
    module.eval()
    traced = passes.prepare(trace(module, batch))
    if passes.draws_randomly(traced.graph_module.graph):
        raise UnsupportedModelError(
            "forward drops at random in evaluation mode too: no two runs can be compared",
            where="model",
            try_="dropout with training=self.training",
        )
    return traced, ("dropout is random: both runs were compared in evaluation mode, without it",)


def _materialize(model: str | Factory, dtype: torch.dtype, pins: Pins) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if callable(model):
        module, batch = model()
    else:
        multiple = math.lcm(_ROWS, (pins.dp or 1) * (pins.microbatch or 1))
        if multiple > _MOST_ROWS:
            raise SpecError(
                f"dp x microbatch needs a batch of {multiple} sequences, verify makes at most {_MOST_ROWS}",
                where="pin microbatch",
            )
        module, batch = _same_everywhere(*resolve(model).materialize(multiple, _SEQ))
    return module.to(dtype).train(), {key: pytree.tree_map(partial(_in, dtype), value) for key, value in batch.items()}


def _in(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _same_everywhere(module: nn.Module, batch: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
    """Rank 0's weights and batch on every rank: a user's factory may draw from a generator that torch does not seed."""
    given: list[Any] = [(module.state_dict(), batch) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given, src=0)
    state, batch = given[0]
    module.load_state_dict(state)
    return module, batch


def _searched(traced: Any, ranks: int, pins: Pins | None, batch: Mapping[str, Tensor]) -> Plan:
    first = next((t for t in batch.values() if isinstance(t, Tensor) and t.dim() >= 2), None)
    if first is None:
        raise SpecError("no input has a batch and a sequence dim", where="example", try_="token ids of (batch, seq)")
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
    """What one way of training gives: loss and gradients of the first step, weights by optimizer after all steps."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    weights: Mapping[str, Mapping[str, Tensor]]

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

        def new(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> torch.optim.Optimizer:
            return cls([p for p in trained.parameters() if p.requires_grad], **options)

        return _record(trained, step, gradients, steps, module.state_dict(), new)

    @staticmethod
    def of_parallel(pm: ParallelModule, batch: Mapping[str, Any], steps: int, initial: Mapping[str, Tensor]) -> _Record:
        new = lambda cls, options: pm.optimizer(cls, **options)  # noqa: E731
        return _record(pm, lambda: pm.step(batch).item(), pm.full_gradients, steps, initial, new)


def _record(
    trained: nn.Module,
    step: Callable[[], float],
    gradients: Callable[[], Mapping[str, Tensor | None]],
    steps: int,
    initial: Mapping[str, Tensor],
    new: Callable[[type[torch.optim.Optimizer], dict[str, Any]], torch.optim.Optimizer],
) -> _Record:
    losses: list[float] = []
    first: dict[str, Tensor | None] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    initial = {name: t.clone() for name, t in initial.items()}
    for name, (cls, options) in _OPTIMIZERS.items():
        trained.load_state_dict(initial)
        optimizer = new(cls, options)
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(step())
            first = first or dict(gradients())
            optimizer.step()
        weights[name] = {key: t.detach().clone() for key, t in trained.state_dict().items()}
    return _Record(losses[0], first, weights)


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
    for optimizer, weights in reference.weights.items():
        for name, expected_weight in weights.items():
            error = _error(mine.weights[optimizer][name], expected_weight)
            errors.append({"what": f"weight after {optimizer}", "name": name, "error": error})
    everyone = [entry for entries in _everyone(errors) for entry in entries]

    def largest(what: str) -> float:
        found = [e["error"] for e in everyone if e["what"].startswith(what)]
        return math.nan if any(math.isnan(e) for e in found) else max(found, default=0.0)

    by_place: dict[tuple[str, str], dict[str, Any]] = {}
    # A wrong loss comes first: it is the cause, wrong gradients the effect.
    order = sorted(everyone, key=lambda e: (e["what"] != "loss" or e["error"] <= tolerance, -_or_infinite(e["error"])))
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
