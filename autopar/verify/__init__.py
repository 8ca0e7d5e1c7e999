"""Does a plan train as one process would? The same model and batch both ways, compared tensor by tensor.

Every number is a relative error, max |a - b| / max(1e-3, max |b|) per tensor, b from the plain model in one process.
AdamW divides by the size of the gradient, so where a gradient is rounding noise (key biases, whose gradient is zero in
exact arithmetic; anything tiny in a model that casts to fp32 inside) it turns noise into full steps. The AdamW compared
here therefore has eps equal to its learning rate: a step then moves a weight by no more than its gradient is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autopar import passes
from autopar.build import build
from autopar.errors import AutoparError, SpecError, UnsupportedModelError
from autopar.ir import TracedModel
from autopar.models import resolve
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.precision import in_dtype
from autopar.shell import copied
from autopar.specs import Pins
from autopar.trace import trace
from autopar.verify.layout import FixedLayouts, batch_size, pinned_plan
from autopar.verify.matrix import Case, MatrixResult, every_case, show_progress
from autopar.verify.record import Record
from autopar.verify.result import VerifyResult, compared, everyone

__all__ = ["Factory", "MatrixResult", "Planner", "VerifyResult", "verify", "verify_all", "verify_plans"]

Factory = Callable[[], tuple[nn.Module, Mapping[str, Any]]]
"""A module-level function that returns a fresh model and one global batch, the same at every call."""

Planner = Callable[[TracedModel], Sequence[Plan]]
"""A module-level function of the captured model, run where that is captured: once for all ranks, but for GPUs."""

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_TOLERANCE_OWN, _TOLERANCE_HF, _TOLERANCE_FP32 = 1e-10, 1e-6, 2e-5
_TOLERANCE_BF16 = 0.5  # splitting a sum in two moves single gradients of some models by a third
_ROUNDS = "bfloat16 rounds to three digits: this shows that nothing is grossly wrong, float64 shows that it is right"
_ROWS, _SEQ, _MOST_ROWS = 8, 16, 4096


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
    result: VerifyResult = run_ranks(
        ranks, _compare, ranks, pins, plan, once=_once(model, pins, dtype, steps), timeout_s=timeout_s
    )[0]
    return result


def verify_plans(
    model: str | Factory,
    plans: Sequence[Plan] | Planner,
    *,
    ranks: int | None = None,
    dtype: str = "float64",
    steps: int = 1,
    timeout_s: float = 600.0,
) -> list[VerifyResult]:
    """Several plans of equal world size on one set of processes: the model is built and captured once.

    plans: may be a function of that capture, which needs to be told `ranks`.
    """
    if ranks is None:
        if callable(plans):
            raise SpecError("a function gives the plans", where="ranks", try_="verify_plans(..., ranks=)")
        ranks = plans[0].degrees.world_size
    once = partial(_with_plans, _once(model, None, dtype, steps), plans)
    results: list[VerifyResult] = run_ranks(ranks, _compare_plans, once=once, timeout_s=timeout_s)[0]
    return results


def _with_plans(once: Callable[[], _Comparison], plans: Sequence[Plan] | Planner) -> tuple[_Comparison, Sequence[Plan]]:
    comparison = once()
    return comparison, plans(comparison.traced) if callable(plans) else plans


def _compare_plans(prepared: tuple[_Comparison, Sequence[Plan]]) -> list[VerifyResult]:
    """On every rank; the results are those of rank 0."""
    comparison, plans = prepared
    return [comparison.run(plan) for plan in plans]


def verify_all(
    model: str | Factory,
    ranks: int,
    pins: Pins | None = None,
    *,
    dtype: str = "float64",
    steps: int = 1,
    timeout_s: float = 7200.0,
) -> MatrixResult:
    """Every mix of degrees, schedule, ZeRO level, sequence sharding and checkpointing for `ranks` processes that has
    the pins, each compared with one process; the model is built and captured once. What a plan cannot run is listed
    with the reason."""
    result: MatrixResult = run_ranks(
        ranks, _compare_all, ranks, pins or Pins(), once=_once(model, pins, dtype, steps), timeout_s=timeout_s
    )[0]
    return result


def _once(model: str | Factory, pins: Pins | None, dtype: str, steps: int) -> Callable[[], _Comparison]:
    return partial(_Comparison, model, pins or Pins(), dtype, steps)


class _Comparison:
    """One model and its reference; plans are held against it on every rank."""

    def __init__(self, model: str | Factory, pins: Pins, dtype: str, steps: int) -> None:
        wanted = _DTYPES.get(dtype)
        if wanted is None:
            raise SpecError(f"{dtype!r} is not one of {', '.join(_DTYPES)}", where="dtype")
        self._module, self.batch = _materialize(model, wanted, pins)
        self.traced, notices = _without_dropout(self._module, self.batch)
        self._notices = notices if wanted != torch.bfloat16 else (*notices, _ROUNDS)
        self._tolerance, self.steps = _tolerance(self._module, wanted), steps

    @cached_property
    def _reference(self) -> Record:
        """Of each rank for itself, when it needs it: no backward runs before ranks are forked."""
        return Record.of_model(self._module, self.batch, self.steps)

    def run(self, plan: Plan) -> VerifyResult:
        """Collective; every rank compares its own view."""
        pm = build(copied(self._module), self.traced, plan)
        record = Record.of_parallel(pm, self.batch, self.steps, self._module.state_dict())
        copies = [name for names in everyone(pm.differing_copies()) for name in names]
        result = compared(record, self._reference, plan, self._tolerance, self.steps, copies)
        return replace(result, notices=self._notices)


def _compare(comparison: _Comparison, ranks: int, pins: Pins | None, plan: Plan | None) -> VerifyResult:
    """On every rank; the result is that of rank 0."""
    if plan is None:
        size = batch_size(comparison.traced, comparison.batch)
        plan = _from_rank_zero(partial(pinned_plan, comparison.traced, ranks, pins or Pins(), *size))
    return comparison.run(plan)


def _compare_all(comparison: _Comparison, ranks: int, pins: Pins) -> MatrixResult:
    """On every rank; the result is that of rank 0."""
    rows, seq_len = batch_size(comparison.traced, comparison.batch)
    layouts = FixedLayouts(comparison.traced, rows, seq_len)
    cases = list(every_case(ranks, pins, rows, seq_len))
    done: list[Case] = []
    for degrees, mix in cases:
        try:
            plan = _from_rank_zero(partial(layouts.plan, degrees, mix))
            done.append(Case(degrees, mix, comparison.run(plan)))
        except AutoparError as error:
            done.append(Case(degrees, mix, error.what))
        show_progress(done[-1], len(done), len(cases))
    return MatrixResult(tuple(done), comparison.steps)


def _from_rank_zero(find: Callable[[], Plan]) -> Plan:
    """Rank 0's plan on every rank, and its error too."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [find()]
        except AutoparError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], AutoparError):
        raise answer[0]
    found: Plan = answer[0]
    return found


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
    cast = partial(in_dtype, dtype=dtype)
    return module._apply(cast).train(), {key: pytree.tree_map(cast, value) for key, value in batch.items()}


def _same_everywhere(module: nn.Module, batch: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
    """Rank 0's weights and batch on every rank, where each makes its own: a user's factory may draw from a generator
    that torch does not seed."""
    if not dist.is_initialized():
        return module, batch
    given: list[Any] = [(module.state_dict(), batch) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given, src=0)
    state, batch = given[0]
    module.load_state_dict(state)
    return module, batch


def _tolerance(module: nn.Module, dtype: torch.dtype) -> float:
    """Hugging Face models cast to fp32 inside, whatever dtype they have."""
    if dtype != torch.float64:
        return _TOLERANCE_FP32 if dtype == torch.float32 else _TOLERANCE_BF16
    hugging_face = any(type(m).__module__.startswith("transformers.") for m in module.modules())
    return _TOLERANCE_HF if hugging_face else _TOLERANCE_OWN
