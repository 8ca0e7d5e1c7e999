"""Solves the integer programmes: HiGHS in process or CBC as a process; every answer is checked before it is used.

A solver that is absent, crashes, hangs or runs out of time without an answer is passed over for the other; what
happened is kept in `Solution.notes`. If none answers, `Solution.values` is empty and its status "no answer": the caller
then takes its own heuristic, whose distance from a bound it states. An answer that breaks a constraint raises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_model.mip import TOLERANCE, Model, NoAnswer, SolverError, check_answer, simple_bound
from autopar.cost_model.solver_backends import BACKENDS
from autopar.search_spec import SOLVERS

__all__ = ["Model", "Solution", "SolverError", "SolverPolicy", "solve"]

_LEAST_S = 0.1


@dataclass(frozen=True)
class SolverPolicy:
    """`first` of SOLVERS is asked first, the others after it; "heuristic" asks no solver. A problem may take
    `time_limit_s`, but not longer than to `deadline_s` of `time.perf_counter`, if that is set."""

    first: str = "highs"
    time_limit_s: float = 30.0
    deadline_s: float = math.inf

    @property
    def order(self) -> tuple[str, ...]:
        if self.first == "heuristic":
            return ()
        return (self.first, *(name for name in SOLVERS if name not in (self.first, "heuristic")))

    def left_s(self) -> float:
        """Seconds the next problem may take; never so few that a solver could not even start."""
        return min(self.time_limit_s, max(_LEAST_S, self.deadline_s - time.perf_counter()))


@dataclass(frozen=True)
class Solution:
    """`status` is "optimal", "incumbent" (a limit was hit, `gap` says how far), "infeasible" or "no answer" (both
    without values). `notes` says why a solver was passed over."""

    status: str
    objective: float
    bound: float
    values: tuple[float, ...]
    solver: str
    solve_s: float
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the proven bound."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-12)


def solve(model: Model, *, policy: SolverPolicy | None = None) -> Solution:
    """Solve to proven optimality, or to the best incumbent within the time limit, checked against every constraint.

    Raises SolverError if an answer breaks a constraint, or is better than what the same solver calls impossible. That
    there is none cannot be checked by itself: the other solver is asked too, and what it finds is an error.
    """
    policy = policy or SolverPolicy()
    started, notes, refused = time.perf_counter(), list[str](), ""
    for name in policy.order:
        try:
            answer = BACKENDS[name](model, policy.left_s())
        except NoAnswer as why:
            notes.append(f"{name} gave no answer: {why}")
            continue
        elapsed = time.perf_counter() - started
        if answer.status == "infeasible":
            refused = refused or name
            continue
        values = _rounded(model, answer.values)
        objective = check_answer(model, values, name)
        if refused:
            raise SolverError(f"{refused} finds no answer possible, {name} has one", where=model.name)
        bound = objective if answer.status == "optimal" else max(answer.bound, simple_bound(model))
        if bound > objective + TOLERANCE * max(1.0, abs(objective)):
            raise SolverError(
                f"{name} claims a bound of {bound}, above its own answer of {objective}", where=model.name
            )
        return Solution(answer.status, objective, min(bound, objective), values, name, elapsed, tuple(notes))
    elapsed = time.perf_counter() - started
    if refused:
        return Solution("infeasible", math.inf, math.inf, (), refused, elapsed, tuple(notes))
    return Solution("no answer", math.inf, simple_bound(model), (), "heuristic", elapsed, tuple(notes))


def _rounded(model: Model, values: Sequence[float]) -> tuple[float, ...]:
    """Integers as integers, where they are within the tolerance: the rows are then checked for what will be built."""
    return tuple(
        float(round(v)) if whole and math.isfinite(v) and abs(v - round(v)) <= TOLERANCE else float(v)
        for v, whole in zip(values, model.integer, strict=False)
    )
