"""The parallel module: a model that trains over the ranks of a plan exactly as it would on one.

Loss: the mean over all tokens of the global batch that count, however the batch is cut; see runtime/training_step.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.plan import BUCKET_BYTES, Plan
from autopar.runtime.batches import RowsSeen
from autopar.runtime.grad_norm import GradientNorm
from autopar.runtime.judge import StepJudge
from autopar.runtime.limits import check_axes, refuse_unbuilt
from autopar.runtime.monitor import Monitor
from autopar.runtime.observation import Observation
from autopar.runtime.optimizer import OptimizerGuard, check_patterns, new_optimizer, refuse_stale_optimizers
from autopar.runtime.overlap import AppliedOverlap
from autopar.runtime.parameter_watch import ParameterWatch, refuse_hooks
from autopar.runtime.programs import Program, Programs, Shared
from autopar.runtime.reducer import GradientReducer
from autopar.runtime.stage import set_training
from autopar.runtime.state import LocalState
from autopar.runtime.step_trace import StepTrace
from autopar.runtime.torch_guards import guard_torch
from autopar.runtime.world import World

__all__ = ["ParallelModule"]


class ParallelModule(nn.Module):
    """A model cut by a plan. Collective: every rank builds it with the same model and plan, and calls it alike.

    program      the captured model as the plan cuts it; see runtime/programs.py
    again        captures and rewrites a call that differs from it in what is no tensor; None: such calls are refused
    report       renders what was planned and why
    bucket_bytes, overlap    how data-parallel gradients are reduced: together in buckets, under backward or after it
                 (default: as the plan's `overlap` says)
    fp32_reduce  mesh axes over which 16-bit sums are taken in fp32; the default is the tensors' own dtype (gradients of
                 fp32 masters are fp32 anyway). "dp" stands for all sums of parameter gradients
    non_finite   what a step does about gradients that are not finite: "keep" does not look; "skip" drops them, so that
                 the optimizer does nothing; "stop" raises AutoparError naming parameters, ranks and step. fp16 skips
                 while its loss scaling looks for a factor, whichever of them is chosen
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        plan: Plan,
        *,
        again: Callable[[Mapping[str, Any]], Program] | None = None,
        device: torch.device,
        report: Callable[[], str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool | None = None,
        fp32_reduce: Collection[str] = (),
        non_finite: str = "keep",
        seed: int = 0,
    ) -> None:
        super().__init__()
        _run_eagerly()
        traced, stages = program.traced, program.stages
        refuse_unbuilt(plan, traced, stages)
        self.plan, self.traced = plan, traced
        self.world = World(plan, device)
        if not self.world.alone:
            refuse_stale_optimizers(model)
            refuse_hooks(model)
        self._state = LocalState(model, stages, self.world, plan, seed)
        self._wide = check_axes(fp32_reduce)
        self._overlap = AppliedOverlap(plan, stages[0].unapplied)
        self.notices = [*traced.notices, *self._state.notices, *self._overlap.warn(), *_without_effect(plan)]
        self._report = report
        self._norm = GradientNorm(self._state, self.world)
        self._judge = StepJudge(plan, non_finite, self._norm, self._state, device)
        under_backward = "dp_reduce" in plan.overlap if overlap is None else overlap
        shared = Shared(plan, self.world, self._judge, RowsSeen(), self._wide, bucket_bytes, under_backward)
        self._programs = Programs(program, again, self._state, shared)
        self._observed = Observation(plan, self.world, self._graphs)
        self._guard = OptimizerGuard(self._state, self.world, model)
        weakref.finalize(self, self._guard.remove)
        self._watch = ParameterWatch(self._state, self.world)
        if self._state.is_part:
            guard_torch(self._state)

    @property
    def _graphs(self) -> tuple[nn.Module, ...]:
        """What this rank runs in a step, all programs. In a tuple: nn.Module would list the parameters of a child
        module under paths of its graph."""
        return tuple(graph for program in self._programs.running for graph in program.graphs)

    @property
    def _reducer(self) -> GradientReducer:
        return self._programs.running[0].reducer

    def step(self, batch: Any, *, local: bool = False) -> Tensor:
        """Forward and backward of one global batch; afterwards gradients are complete. Returns the loss, 0-d and the
        same on every rank. Under `torch.no_grad()` forward alone: the way to evaluate a pipelined model.

        batch: what the model takes (mapping of arguments, sequence of positional ones, or the one argument): the global
        batch, the same on every rank; with `local=True` only the rows of this rank's dp position. More rows than
        planned are more micro-batches. Rows that are no multiple of dp x micro_batch are padded where the loss can
        leave rows out, and so are sequences that do not cut.
        A batch that differs from the example in what is no tensor (a flag, a number, an optional mask) is captured
        anew, once, and told in `notices`. Raises SpecError for rows that neither divide nor can be padded, for a batch
        that does not fit the capture, and where a capture anew is not possible.
        """
        program, bound = self._programs.of_batch(batch, training=self.training, local=local)
        if program.traced.loss is None:
            raise AutoparError(
                "the model returns no loss" + (" for this batch" if self.traced.loss is not None else ""),
                where="step",
                try_="pass labels in the example and in every batch, or loss_fn to parallelize",
            )
        if not self.training and program.evaluates_otherwise is not None and program.evaluates_otherwise():
            raise AutoparError(
                "forward runs other code in evaluation mode than in training, which step does not have",
                where="step",
                try_="pm(**batch) to evaluate under a plan without pipeline, or pm.train() before",
            )
        self._refuse_after_broken()
        watched = self._watch.check()
        with _ordinary_tensors():
            if not torch.is_grad_enabled():
                loss = program.step.evaluate(bound, local)
            else:
                loss = self._observed.step(lambda: program.step(bound, local))
        if watched is not None:
            watched.answer()
        self._take_notices()
        return loss

    def _refuse_after_broken(self) -> None:
        broken = next((program.step.broken_by for program in self._programs.running if program.step.broken_by), "")
        if broken:
            raise AutoparError(
                f"an earlier step was broken off ({broken}); what is under way between ranks would get into this one",
                where="step",
                try_="autopar.parallelize again, with the weights of the last checkpoint",
            )

    def _take_notices(self) -> None:
        self.notices += [notice for notice in self._programs.notices if notice not in self.notices]
        self.notices += self._judge.new_notices()
        self._programs.notices.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's outputs for the global batch, in the user's type, whole on every rank; see runtime/outputs.py.

        `step` moves less. Raises AutoparError under pipeline parallelism.
        """
        if (watched := self._watch.check()) is not None:
            watched.answer()
        program, bound = self._programs.of_call(args, kwargs, training=self.training)
        self._take_notices()
        with _ordinary_tensors():
            self._state.copies.follow()
            return program.call(self.training, bound)

    def optimizer(
        self,
        cls: Callable[..., torch.optim.Optimizer],
        *,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        only: Collection[str] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """`cls` over this rank's trainable parameters; a torch optimizer, which learning-rate schedulers take.

        only: names or patterns of the parameters it trains, where another optimizer trains the rest; default all.
        groups: options of their own by pattern of the original name, `{"*.bias": {"weight_decay": 0.0}}`; in this order
        in `param_groups`, with what matches none last.
        cls may be any factory that takes a list of groups. A rank holds slices of tensors: whether an optimizer works
        element by element is found out by a few steps on tiny tensors. One that reads whole tensors (Adafactor, Muon)
        gets them, each on one of the ranks that hold its slices (runtime/stand_ins.py); one that reads all parameters
        together (LBFGS) is refused with SpecError where ranks hold some of them. Collective, and so are the steps of
        one that gets whole tensors: every rank steps, or none.
        """
        only = [only] if isinstance(only, str) else only
        check_patterns([*(groups or {}), *(only or ())], list(self.traced.parameters))
        made = new_optimizer(cls, self._state, self.world, groups or {}, options, only=only)
        self._guard.allow(made.optimizer)
        self._observed.add_optimizer(made.optimizer)
        self.notices += made.notices
        return made.optimizer

    def monitor(self, path: str | Path | None = None, **options: Any) -> Monitor:
        """Measure every step from now on: time by part and rank, stragglers, memory; see runtime/monitor.py.

        path: a file of JSON lines; rank 0 writes a record every `every` (10) steps. options: every, tensorboard (a
        folder), memory_limit (bytes; default: the device's). Collective; `close` it, or use it as a context.
        """
        return self._observed.monitor(path, options)

    def trace(self, path: str | Path | None = None) -> StepTrace:
        """Context whose steps are traced: a Chrome trace a rank, and what communication was hidden, as `summary`."""
        return self._observed.trace(path)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does to a plain model. Collective.

        Returns the norm of all gradients, 0-d, fp64, the same on every rank; they are scaled if it exceeds `max_norm`.

        With `error_if_nonfinite` an AutoparError names the parameters and ranks at fault. Raises SpecError unless
        `norm_type` is positive or inf.
        """
        return self._norm.clip(max_norm, norm_type, error_if_nonfinite)

    def report(self) -> str:
        """What was chosen, why, what it beat and what it will cost, as text; which overlaps are applied where."""
        text = self.plan.dumps() if self._report is None else self._report()
        return f"{text}\n{self._overlap.text()}\n" if self.plan.overlap else text

    def differing_copies(self) -> list[str]:
        """Parameters that should be the same to the bit on several ranks and are not; the same answer on every rank of
        this stage's dp x tp block. Collective; none is what training keeps true."""
        return self._state.differing_copies()

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients under original names, on every rank; None where there is none. Collective."""
        return self._state.gather({name: p.grad for name, p in self._state.parameters.items()})

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters (local slices) under original names, in the order of the user's model."""
        dot = f"{prefix}." if prefix else ""
        return ((dot + name, p) for name, p in self._state.named_parameters())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As `named_parameters`."""
        return (parameter for _, parameter in self._state.named_parameters())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Whole tensors under the names of the user's own state_dict. Collective."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over whole tensors under original names; a tied one may be under any of its names. Returns the missing
        and the unknown keys; with `strict` there may be none. Raises AutoparError for that, for tensors that differ
        between ranks, and for `assign`. Collective."""
        if assign:
            raise AutoparError(
                "assign=True would put whole tensors in place of what this rank trains",
                where="load_state_dict",
                try_="assign=False, which copies, after casting the model before parallelize to the dtype wanted",
            )
        return self._state.load(state_dict, strict)

    def train(self, mode: bool = True) -> ParallelModule:
        """Training or evaluation mode: dropout on or off; `pm(...)` runs what the model's forward does in that mode."""
        changed = mode != self.training
        super().train(mode)
        if changed:
            for graph in self._graphs:
                set_training(graph, mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        samples = [
            torch.empty(1, dtype=dtype, device=self.world.device) for dtype in {p.dtype for p in self.parameters()}
        ]
        if all((to.dtype, to.device) == (x.dtype, x.device) for x, to in ((x, fn(x)) for x in samples)):
            return self  # a script's `.to(device)` where it is already
        raise AutoparError(
            "a parallel module cannot be moved or cast", try_="move or cast the model before parallelize"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(
            "a parallel module belongs to the processes that run it: it is neither copied nor pickled",
            try_="pm.state_dict() to save it; for a mean of weights, clones of pm.named_parameters() on each rank",
        )


@cache
def _run_eagerly() -> None:
    """`torch.compile` around a parallel module is a break of its graph: dynamo would trace captures and schedules."""
    for name in ("forward", "step"):
        setattr(ParallelModule, name, torch.compiler.disable(getattr(ParallelModule, name)))


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Contexts of the user whose tensors would outlive them.

    `torch.inference_mode()` as `torch.no_grad()`: what it makes could not be written in training, and FSDP keeps the
    memory it gathers into. `torch.autocast` without its cache, which gives a later micro-batch the cast of a weight
    whose memory FSDP has given up since.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                yield
        else:
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _without_effect(plan: Plan) -> Iterator[str]:
    """What the plan asks for and its sizes do not allow."""
    if plan.sequence_sharding and plan.degrees.tp > 1 and not plan.shards_sequence:
        yield (
            f"sequence_sharding has no effect: tp {plan.degrees.tp} does not divide the {plan.seq_len} tokens of a "
            f"sequence over cp {plan.degrees.cp}"
        )
