"""The one module that talks to a MILP solver (PuLP: HiGHS in process, CBC when HiGHS fails).

A model is plain data: columns with bounds and cost, rows `low <= sum coef * column <= high`. Traps avoided here:
`LpStatus` reads "Optimal" after a time-out, so `sol_status` is what counts; without an incumbent PuLP still fills
variable values, so they are not read; `LpAffineExpression(list)` overwrites a repeated variable, so coefficients are
added up first; HiGHS must always run with one thread (changing the number within a process returns garbage).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pulp

__all__ = ["Model", "Solution", "SolverError", "solve"]


class SolverError(RuntimeError):
    """No solver gave an answer to a problem that must have one; a fault of ours or of the installation."""


@dataclass
class Model:
    """A minimisation problem under construction. Column and row indices are positions in the lists."""

    name: str
    costs: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float | None] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[str, dict[int, float], float]] = field(default_factory=list)
    constant: float = 0.0

    def add_binary(self, cost: float = 0.0) -> int:
        return self._add(cost, 0.0, 1.0, True)

    def add_continuous(self, cost: float = 0.0, low: float = 0.0, high: float | None = None) -> int:
        return self._add(cost, low, high, False)

    def add_row(self, terms: Iterable[tuple[int, float]], sense: str, right: float) -> None:
        """`sense` is "==", "<=" or ">="; coefficients of a repeated column are added up."""
        total: dict[int, float] = {}
        for column, coefficient in terms:
            total[column] = total.get(column, 0.0) + coefficient
        self.rows.append((sense, total, right))

    def _add(self, cost: float, low: float, high: float | None, integer: bool) -> int:
        self.costs.append(cost)
        self.lows.append(low)
        self.highs.append(high)
        self.integer.append(integer)
        return len(self.costs) - 1


@dataclass(frozen=True)
class Solution:
    """`status` is "optimal", "incumbent" (time limit hit, `gap` says how far) or "infeasible" (no values)."""

    status: str
    objective: float
    bound: float
    values: tuple[float, ...]
    solver: str
    solve_s: float

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the proven bound."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-12)


_SENSE = {"==": pulp.LpConstraintEQ, "<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE}


def solve(model: Model, *, time_limit_s: float = 30.0) -> Solution:
    """Solve to proven optimality, or to the best incumbent within the time limit.

    Raises SolverError if neither HiGHS nor CBC answers.
    """
    started = time.perf_counter()
    for name in ("HiGHS", "CBC"):
        problem, variables = _build(model)
        solver = _make(name, time_limit_s)
        if solver is None:
            continue
        try:
            with _silent_stdout():
                problem.solve(solver)
        except (pulp.PulpSolverError, OSError):
            continue  # the other solver is tried; if none answers the error below says so
        status = problem.sol_status
        elapsed = time.perf_counter() - started
        if status in (pulp.LpSolutionInfeasible, pulp.LpSolutionUnbounded):
            return Solution("infeasible", float("inf"), float("inf"), (), name, elapsed)
        if status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            values = tuple(v.varValue or 0.0 for v in variables)
            objective = model.constant + sum(c * x for c, x in zip(model.costs, values, strict=True) if c)
            proven = status == pulp.LpSolutionOptimal
            bound = objective if proven else _dual_bound(problem, name, model.constant)
            return Solution("optimal" if proven else "incumbent", objective, bound, values, name, elapsed)
    raise SolverError(f"{model.name}: neither HiGHS nor CBC gave an answer within {time_limit_s} s")


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints its banner when first loaded, before any option can turn it off, and would spoil `--json`."""
    saved, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)


def _build(model: Model) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem(model.name.replace(" ", "_"), pulp.LpMinimize)
    kinds = ("Continuous", "Integer")
    variables = [
        problem.add_variable(f"c{i}", low, high, kinds[integer])
        for i, (low, high, integer) in enumerate(zip(model.lows, model.highs, model.integer, strict=True))
    ]
    problem.setObjective(pulp.LpAffineExpression([(v, c) for v, c in zip(variables, model.costs, strict=True) if c]))
    for index, (sense, terms, right) in enumerate(model.rows):
        expression = pulp.LpAffineExpression([(variables[i], c) for i, c in terms.items()])
        problem.addConstraint(pulp.LpConstraint(expression, _SENSE[sense], f"r{index}", right))
    return problem, variables


def _make(name: str, time_limit_s: float) -> pulp.LpSolver | None:
    if name == "HiGHS":
        # our models are tight and small: presolve takes longer than it saves (0.9 against 0.5 s for ten block ILPs)
        solver = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, gapRel=0.0, presolve="off")
    else:
        solver = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=0.0)
    return solver if solver.available() else None


def _dual_bound(problem: pulp.LpProblem, name: str, constant: float) -> float:
    if name != "HiGHS":
        return -float("inf")
    return float(problem.solverModel.getInfo().mip_dual_bound) + constant
