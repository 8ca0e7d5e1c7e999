"""The whole matrix: every way to run a model on some ranks, each compared with one process, in one table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from autopar.mesh import AXES, Degrees, divisors
from autopar.plan import CHECKPOINT_MODES, SCHEDULES
from autopar.specs import Pins
from autopar.verify.result import VerifyResult, layout_text

__all__ = ["Case", "MatrixResult", "every_case", "show_progress"]


@dataclass(frozen=True)
class Case:
    """One mix and what came of it: a comparison, or why the mix cannot be run."""

    degrees: Degrees
    pins: Pins
    outcome: VerifyResult | str

    @property
    def name(self) -> str:
        if isinstance(self.outcome, VerifyResult):
            return layout_text(self.outcome.plan)
        axes = [f"{axis} {size}" for axis in ("dp", "cp", "tp", "pp") if (size := getattr(self.degrees, axis)) > 1]
        sp = "sequence sharded" if self.pins.sp else ""
        group = f" over {self.pins.zero_group}" if self.pins.zero_group else ""
        zero = f"zero {self.pins.zero}{group}" if self.pins.zero else ""
        checkpoint = f"checkpoint {self.pins.checkpoint}" if self.pins.checkpoint != "none" else ""
        parts = [*axes, self.pins.schedule or "", sp, zero, checkpoint]
        return ", ".join(part for part in parts if part)

    @property
    def verdict(self) -> str:
        if isinstance(self.outcome, str):
            return "refused"
        return "passed" if self.outcome.passed else "FAILED"

    def to_data(self) -> dict[str, Any]:
        if isinstance(self.outcome, str):
            return {"layout": self.name, "verdict": self.verdict, "reason": self.outcome}
        return {"layout": self.name, "verdict": self.verdict, **self.outcome.to_data()}


@dataclass(frozen=True)
class MatrixResult:
    """All cases, in order."""

    cases: tuple[Case, ...]
    steps: int

    @property
    def passed(self) -> bool:
        """Nothing that ran differs, and something ran."""
        verdicts = [case.verdict for case in self.cases]
        return "passed" in verdicts and "FAILED" not in verdicts

    def to_data(self) -> dict[str, Any]:
        return {"passed": self.passed, "steps": self.steps, "cases": [case.to_data() for case in self.cases]}

    def text(self) -> str:
        """The table, then what was refused and why, then the counts."""
        width = max(len(case.name) for case in self.cases)
        lines = [f"{'layout':{width}}  {'loss':>8}  {'grads':>8}  {'weights':>8}"]
        for case in self.cases:
            if isinstance(case.outcome, str):
                lines.append(f"{case.name:{width}}  refused: {case.outcome}")
                continue
            r = case.outcome
            errors = "  ".join(f"{e:8.1e}" for e in (r.loss_error, r.grad_error, r.weight_error))
            lines.append(f"{case.name:{width}}  {errors}  {case.verdict}")
            if not r.passed:
                lines += [f"    {w['error']:.2e}  {w['what']}  {w['name']}" for w in r.worst]
        verdicts = [case.verdict for case in self.cases]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("passed", "FAILED", "refused"))
        notices = {n for case in self.cases if isinstance(case.outcome, VerifyResult) for n in case.outcome.notices}
        lines += [f"notice: {notice}" for notice in sorted(notices)]
        return "\n".join([*lines, f"{len(self.cases)} layouts, {self.steps} SGD and AdamW steps each: {counts}"])


def every_case(ranks: int, pins: Pins, rows: int, seq_len: int) -> Iterator[tuple[Degrees, Pins]]:
    """Every mix within the pins that means something on its degrees: no ZeRO level without data ranks, no schedule
    without a pipeline."""
    for sizes in itertools.product(divisors(ranks), repeat=len(AXES)):
        degrees = Degrees(**dict(zip(AXES, sizes, strict=True)))
        wanted = all(getattr(pins, axis) in (None, getattr(degrees, axis)) for axis in AXES)
        if degrees.world_size != ranks or not wanted or rows % degrees.dp or seq_len % degrees.cp:
            continue
        data = degrees.dp * degrees.cp
        shards = degrees.tp > 1 and (seq_len // degrees.cp) % degrees.tp == 0
        options = {
            "sp": (False, True) if shards else (False,),
            "zero": (0, 1, 2, 3) if data > 1 else (0,),
            "zero_group": (None, *divisors(degrees.dp)[1:-1]),
            "schedule": SCHEDULES if degrees.pp > 1 else (None,),
            "checkpoint": CHECKPOINT_MODES,
        }
        pinned = {name: getattr(pins, name) for name in options}
        if any(value is not None and value not in options[name] for name, value in pinned.items()):
            continue  # a pin without effect here
        if degrees.pp == 1 and (pins.virtual_stages or 1) > 1:
            continue
        values = [options[name] if value is None else (value,) for name, value in pinned.items()]
        for mix in itertools.product(*values):
            chosen = dict(zip(options, mix, strict=True))
            if chosen["zero"] or chosen["zero_group"] is None:
                yield degrees, replace(pins, **chosen)


def show_progress(case: Case, done: int, total: int) -> None:
    """A line on a terminal, from rank 0."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        print(f"{done}/{total}  {case.verdict}  {case.name}", file=sys.stderr, flush=True)
