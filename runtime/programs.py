"""The programs of one model. What is no tensor in a call (a flag, a number, a mask that is left out) is part of the
captured graph, so a call that differs in it is another program: captured anew, cut by the same plan, run over the same
parameters, buffers and gradients.

Programs are kept: there are as many captures as kinds of calls, and a model that is called in ever new ways is refused.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopar.binding import as_call, call_arguments
from autopar.errors import AutoparError, SpecError
from autopar.ir import StageGraph, TracedModel
from autopar.plan import Plan
from autopar.runtime.batches import BatchIntake, RowsSeen
from autopar.runtime.calls import CalledModel, WholeGraph
from autopar.runtime.gathered import GatheredGraph, gathered
from autopar.runtime.judge import StepJudge
from autopar.runtime.limits import refuse_unbuilt
from autopar.runtime.reductions import gradient_reducer
from autopar.runtime.stage import localize, set_training
from autopar.runtime.state import LocalState
from autopar.runtime.tokens import TokenCounter
from autopar.runtime.training_step import TrainingStep
from autopar.runtime.world import World
from autopar.runtime.zero import shard_stage

__all__ = ["MOST_PROGRAMS", "Program", "Programs", "Shared"]

MOST_PROGRAMS = 8
"""Kinds of calls. More are a number that changes from step to step, which wants to be a tensor."""


@dataclass(frozen=True)
class Program:
    """A capture of the model and what the plan makes of it.

    stages       one graph per pipeline stage; this rank runs those at its position on pp, and every pp-th after it
    token_count  graph from model inputs to what the terms of the loss are divided by; see passes/token_loss.py
    whole        `whole(training)` builds the graph with all the user's outputs in training or evaluation mode, for
                 `pm(**batch)`; see runtime/calls.py. None under pipeline parallelism
    evaluates_otherwise  whether forward in evaluation mode differs by more than dropout: then `step` only trains
    """

    traced: TracedModel
    stages: tuple[StageGraph, ...]
    token_count: fx.GraphModule | None
    whole: Callable[[bool], WholeGraph] | None = None
    evaluates_otherwise: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Shared:
    """What the programs of a model have in common. `wide`: mesh axes whose 16-bit sums are taken in fp32; `notices`:
    what they have to tell, to be taken by the caller."""

    plan: Plan
    world: World
    judge: StepJudge
    rows_seen: RowsSeen
    wide: tuple[str, ...]
    bucket_bytes: int
    overlap: bool
    notices: list[str] = field(default_factory=list)


class RunningProgram:
    """A program as it runs on this rank; `state` as its stages read it."""

    def __init__(self, program: Program, state: LocalState, shared: Shared, *, first: bool) -> None:
        plan, world = shared.plan, shared.world
        self.traced, self.evaluates_otherwise = program.traced, program.evaluates_otherwise
        self._state, self._shared = state, shared
        self.graphs: tuple[nn.Module, ...] = tuple(self._local_stage(stage, first) for stage in state.own_stages)
        counter = TokenCounter.on(world, program.token_count)
        intake = BatchIntake(program.traced, plan, world, counter, shared.rows_seen, shared.notices)
        self.reducer = gradient_reducer(
            state, world, bucket_bytes=shared.bucket_bytes, overlap=shared.overlap, wide="dp" in shared.wide,
            hooked=plan.schedule != "zero-bubble",
        )  # fmt: skip
        self.step = TrainingStep(
            plan,
            program.traced,
            state,
            self.graphs,
            world=world,
            counter=counter,
            intake=intake,
            reducer=self.reducer,
            judge=shared.judge,
        )
        self.call = CalledModel(
            plan,
            program.traced,
            program.whole,
            self._localize,
            world=world,
            intake=intake,
            reducer=self.reducer,
            judge=shared.judge,
        )

    def _localize(self, stage: StageGraph) -> fx.GraphModule:
        tensors = self._state.tensors_of(stage)
        world = self._shared.world
        return localize(stage.graph_module, tensors, world.group_names(), world.device, self._shared.wide)

    def _local_stage(self, stage: StageGraph, first: bool) -> nn.Module:
        graph, plan, world = self._localize(stage), self._shared.plan, self._shared.world
        if not plan.zero or world.data_mesh is None:
            return graph
        if not first:  # FSDP has wrapped the parameters for the first program
            return gathered(graph, plan)
        return shard_stage(graph, stage, self._state, world, plan, "dp" in self._shared.wide)


class Programs:
    """Finds the program of a call, and has one made for a new kind of call.

    again: captures a call, given by its arguments, and rewrites it; None where nobody can.
    running: the programs so far, the first one first. `notices`: those of `shared`, also of what is captured later.
    """

    def __init__(
        self, first: Program, again: Callable[[Mapping[str, Any]], Program] | None, state: LocalState, shared: Shared
    ) -> None:
        self._again, self._state, self._shared = again, state, shared
        self.running = [RunningProgram(first, state, shared, first=True)]
        self.notices = shared.notices
        self._compared = False

    def of_batch(self, batch: Any, *, training: bool, local: bool) -> tuple[RunningProgram, dict[str, Tensor]]:
        """As `of_call`, for a batch of `step`."""
        call = None
        try:
            call = as_call(batch)
        finally:  # the user's own mapping may raise anything, on one rank alone
            if call is None and local:
                self._agree(-1, repr(sys.exception()), always=True)
        return self.of_call(*call, training=training, local=local)

    def of_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool, local: bool = False
    ) -> tuple[RunningProgram, dict[str, Tensor]]:
        """The program of a call and the call's tensors by the names of its inputs. Collective where ranks might differ:
        each brings its own rows (`local`), there are several programs, or training has just begun.

        Raises SpecError for a call that no program can be made for.
        """
        differences: list[SpecError] = []
        for position, program in enumerate(self.running):
            try:
                bound = program.traced.signature.bind(args, kwargs)
            except SpecError as difference:
                differences.append(difference)
                continue
            self._agree(position, "" if local else _shapes(bound), always=local)
            return program, bound
        self._agree(len(self.running), differences[0].what, always=True)
        self._refuse(differences[0])
        signature = self.running[0].traced.signature
        program = self._start(call_arguments(signature.parameters, args, kwargs, signature.rest), differences[0])
        for graph in program.graphs:
            set_training(graph, training)
        return program, program.traced.signature.bind(args, kwargs)

    def _refuse(self, difference: SpecError) -> None:
        """Raise SpecError where no further program can be had."""
        if self._again is None:
            raise difference
        if len(self.running) == MOST_PROGRAMS:
            raise SpecError(
                f"{difference.what}; {MOST_PROGRAMS} kinds of calls have a captured program each",
                where=difference.where,
                try_="a tensor for what changes from step to step",
            )

    def _agree(self, position: int, what: str, *, always: bool) -> None:
        """Raise SpecError on every rank if ranks call different programs."""
        world = self._shared.world
        # A flag that goes by the rank shows in the first call; to compare later ones would cost every step.
        first, self._compared = not self._compared, True
        if world.alone or not (always or first or len(self.running) > 1):
            return
        called = zlib.crc32(f"{position} {_ADDRESS.sub('', what)}".encode())
        extremes = torch.tensor([called, -called], device=world.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if int(extremes.sum()) == 0:
            return
        told: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(told, what)
        raise SpecError(
            "ranks call the model in different ways"
            + "".join(f"; rank {rank}: {text}" for rank, text in enumerate(told) if text),
            where="batch",
            try_="the same arguments on every rank, other than tensors with rows of their own",
        )

    def _start(self, arguments: Mapping[str, Any], difference: SpecError) -> RunningProgram:
        assert self._again is not None
        try:
            program = self._again(arguments)
            refuse_unbuilt(self._shared.plan, program.traced, program.stages)
            state = self._state.read_by(program.stages)
        except AutoparError as error:
            raise SpecError(
                f"{difference.what}; that call has no program of its own: {error}",
                where=difference.where,
                try_=difference.try_,
            ) from error
        self.running.append(RunningProgram(program, state, self._shared, first=False))
        whole = ", with all its parameters gathered at once in a step" if self._gathers() else ""
        self.notices += [f"{difference.what}: captured again{whole}", *program.traced.notices]
        return self.running[-1]

    def _gathers(self) -> bool:
        return any(isinstance(graph, GatheredGraph) for graph in self.running[-1].graphs)


def _shapes(bound: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in bound.items())


_ADDRESS = re.compile("0x[0-9a-f]+")  # of objects in messages: another one on every rank
