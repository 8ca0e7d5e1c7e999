"""From a batch bound to the graph's inputs to this rank's rows: cut over dp, padded where that shows nowhere.

Padding adds to no loss term: added tokens come at the end of causal sequences and have no target; added rows repeat the
last one without its targets.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.errors import SpecError
from autopar.ir import TracedModel
from autopar.plan import Plan
from autopar.recomputation import attention_cores
from autopar.runtime.agreement import first_refusal
from autopar.runtime.batch_agreement import BatchAgreement
from autopar.runtime.index_limits import IndexLimits
from autopar.runtime.pipeline import check_micro_batches, runnable_micro_batches
from autopar.runtime.rows import count_micro_batches, cut_rows, fitting, pad_rows, row_count
from autopar.runtime.sequence import pad_sequences, sequence_length
from autopar.runtime.tokens import TokenCounter
from autopar.runtime.world import World

__all__ = ["ROW_IDS", "BatchIntake", "RowsSeen"]

ROW_IDS = "row_ids"
"""Input that passes add where dropout has to know which rows it sees."""


@dataclass
class RowsSeen:
    """Rows since training began: what the masks of dropout go by."""

    count: int = 0


class BatchIntake:
    """Prepares batches of one program for one plan. `rows_seen` and `notices` are shared by the programs of a model."""

    def __init__(
        self,
        traced: TracedModel,
        plan: Plan,
        world: World,
        counter: TokenCounter,
        rows_seen: RowsSeen | None = None,
        notices: list[str] | None = None,
    ) -> None:
        self._traced, self._plan, self._world, self._counter = traced, plan, world, counter
        self._rows_seen = rows_seen or RowsSeen()
        self._notices = [] if notices is None else notices
        self._told_of_padding = False
        self._batches = BatchAgreement(world)
        cores = attention_cores([n for n in traced.graph_module.graph.nodes if n.op == "call_function"])
        self._causal = all(len(core) == 1 and _is_causal(core[0]) for core in cores)
        self._limits = IndexLimits(traced)
        self._hides_rows = counter.hides_rows and _only_targets(traced, counter.inputs)
        targets = [spec for spec in traced.inputs if spec.name in counter.inputs]
        self._hides_tokens = self._hides_rows and all(s.seq_dim is not None for s in targets)

    def _numbered(self, inputs: dict[str, Tensor], every: Sequence[int] | None = None) -> dict[str, Tensor]:
        """With the number of every row since training began, if dropout reads it; `every`: rows of each dp rank, if
        these are one rank's own. Comes after the last refusal: rows that were never run have no number."""
        if all(spec.name != ROW_IDS for spec in self._traced.inputs):
            return inputs
        rows = self._rows_of(inputs)
        first = self._rows_seen.count + (0 if every is None else sum(every[: self._world.position["dp"]]))
        self._rows_seen.count += rows if every is None else sum(every)
        return {**inputs, ROW_IDS: torch.arange(first, first + rows)}

    def _rows_of(self, inputs: dict[str, Tensor]) -> int:
        return row_count([s for s in self._traced.inputs if s.name != ROW_IDS], inputs)

    def _prepared(self, bound: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        """The batch as graph inputs, padded to lengths that cut, and its rows. Raises SpecError if it does not fit."""
        inputs = self.padded_sequences(fitting(self._traced, bound))
        return inputs, self._rows_of(inputs)

    def _own_batch(self, bound: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
        """As `_prepared`, with the rows each dp rank brings: what one of them cannot use, all refuse. Collective."""
        own = -1
        try:
            inputs, own = self._prepared(bound)
        finally:  # whatever is raised here, the peers hear of it before it goes on
            counts = self._rows_of_all(own)
            if min(counts) < 0:
                refusal = first_refusal(sys.exception() if own < 0 else None, self._world.group("dp"))
                if own >= 0:
                    raise SpecError(
                        f"dp rank {refusal.rank} has rows that cannot be used: {refusal.what}",
                        where="batch",
                        try_=refusal.try_,
                    )
        return inputs, counts

    def _rows_of_all(self, own: int) -> list[int]:
        rows = torch.zeros(self._world.size("dp"), dtype=torch.int64, device=self._world.device)
        rows[self._world.position["dp"]] = own
        counts: list[int] = self._world.sum(rows, "dp").tolist()
        return counts

    def _refuse(self, every: list[int], local: bool) -> None:
        """Raise SpecError, naming row counts that would do; nothing if these do."""
        if not all(every) and any(every):
            empty = ", ".join(str(rank) for rank, rows in enumerate(every) if not rows)
            raise SpecError(
                f"dp rank {empty} has no rows",
                where="batch",
                try_="one row at least on every rank" + ("; one without targets adds nothing" * self._hides_rows),
            )
        for rows in every:
            count = count_micro_batches(rows, 1 if local else self._world.size("dp"), self._plan.micro_batch)
            if self._plan.degrees.pp > 1:
                check_micro_batches(self._plan.schedule, self._plan.degrees.pp, count)
        if local and self._plan.zero:
            raise SpecError(
                f"dp ranks bring {', '.join(map(str, every))} rows, and under ZeRO all run the same micro-batches",
                where="batch",
                try_=f"{max(every)} rows on every rank, or zero 0",
            )

    def step_rows(self, bound: Mapping[str, Tensor], local: bool) -> tuple[dict[str, Tensor], int]:
        """This rank's rows of a training batch on its device, and the micro-batches they make.

        Rows that do not divide are padded, unless each rank brings its own or the loss would see it: SpecError.
        """
        self._batches.check(bound, local=local)
        if local:
            inputs, every = self._own_batch(bound)
        else:
            inputs, rows = self._prepared(bound)
            every = [rows]
        unit = self._plan.micro_batch if local else self._world.size("dp") * self._plan.micro_batch
        wanted = [self._runnable(rows, unit) for rows in every]
        if local and self._plan.zero:  # FSDP's ranks meet in every micro-batch: who brings fewer rows runs empty ones
            wanted = [max(wanted)] * len(wanted)
        hidden = all(every) and self._hides_rows
        if wanted != every and not hidden:
            self._refuse(every, local)
        own = wanted[self._world.position["dp"]] if local else wanted[0]
        micro_batches = own // unit
        self._counter.check(micro_batches)
        inputs = self._numbered(inputs, every if local else None)
        if wanted != every:
            inputs = pad_rows(self._traced.inputs, inputs, own, self._counter.fill)
            self._tell_of_empty(every, unit)
        return self._own_rows(inputs, local), micro_batches

    def _tell_of_empty(self, every: Sequence[int], unit: int) -> None:
        """Once, that whole micro-batches of padding run because the schedule wants them."""
        added, rows = max((self._runnable(rows, unit) - rows, rows) for rows in every)
        if added < unit or self._told_of_padding:
            return
        self._told_of_padding = True
        self._notices.append(
            f"schedule {self._plan.schedule} runs {(rows + added) // unit} micro-batches for {rows} rows: {added} rows "
            f"of padding are added, {added // unit} of the micro-batches hold nothing else"
        )

    def call_rows(self, bound: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int | None]:
        """This rank's rows of a called batch on its device, and the length of its sequences if they were padded. Raises
        SpecError if it does not fit."""
        self._batches.check(bound, local=False)
        fitted = fitting(self._traced, bound)
        padded = self.padded_sequences(fitted, called=True)
        dp = self._world.size("dp")
        if dp > 1:
            count_micro_batches(self._rows_of(padded), dp, self._plan.micro_batch)
        length = None if padded is fitted else sequence_length(self._traced.inputs, fitted)
        return self._own_rows(self._numbered(padded)), length

    def _runnable(self, rows: int, unit: int) -> int:
        """Rows, padded ones included, that make micro-batches which the schedule can run."""
        pp = self._plan.degrees.pp
        return unit * runnable_micro_batches(self._plan.schedule if pp > 1 else "", pp, -(-rows // unit) or 1)

    def _own_rows(self, inputs: dict[str, Tensor], local: bool = False) -> dict[str, Tensor]:
        """This dp rank's rows, on its device."""
        dp = self._world.size("dp")
        if dp > 1 and not local:
            inputs = cut_rows(self._traced.inputs, inputs, dp)[self._world.position["dp"]]
        return {name: t.to(self._world.device, non_blocking=True) for name, t in inputs.items()}

    def padded_sequences(self, inputs: dict[str, Tensor], *, called: bool = False) -> dict[str, Tensor]:
        """Sequences that cut into 2 cp chunks and, where the stream is sharded over tp, into tp parts of each.

        called: all outputs are wanted, not the loss alone. Raises SpecError where they cannot be padded, or hold an
        index that no table has.
        """
        specs, multiple = self._traced.inputs, self._sequence_multiple()
        lengths = {s.name: inputs[s.name].shape[s.seq_dim] for s in specs if s.seq_dim is not None}
        if all(length % multiple == 0 for length in lengths.values()):
            self._limits.check(inputs)
            return inputs
        seen = self._counter.seen_ends[called] or self._counter.seen_ends[0]
        if not (self._causal and self._hides_tokens) or seen:
            sees = seen if self._causal else "attention that is not causal"
            sees = sees or "a loss that does not ignore tokens by their target"
            raise SpecError(
                f"sequences of {max(lengths.values())} tokens do not cut into the {multiple} parts of cp and sequence "
                f"sharding, and {sees} would see padding",
                where="batch",
                try_=f"a length that is a multiple of {multiple}",
            )
        padded = pad_sequences(inputs, specs, multiple, self._counter.fill)
        self._limits.check(padded)
        return padded

    def _sequence_multiple(self) -> int:
        degrees = self._plan.degrees
        chunks = 2 * degrees.cp if degrees.cp > 1 else 1
        return math.lcm(chunks, degrees.cp * degrees.tp) if self._plan.shards_sequence else chunks


def _only_targets(traced: TracedModel, names: tuple[str, ...]) -> bool:
    """Whether these inputs reach the loss and nothing else that learns: then their values may be replaced."""
    pending = [n for n in traced.graph_module.graph.nodes if n.op == "placeholder" and str(n.target) in names]
    seen = set(pending)
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or user in seen:
                continue
            if user.meta.get("grad") and "cross_entropy" not in str(user.target):
                return False
            seen.add(user)
            if not user.meta.get("grad"):
                pending.append(user)
    return True


def _is_causal(node: fx.Node) -> bool:
    """Of fused attention; what a written-out one hides is in a mask, which nobody reads here."""
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False))
