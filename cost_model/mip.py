"""A mixed-integer programme as plain data: columns with bounds and cost, rows `sum coef * column (==, <=, >=) right`.

Columns have numbers, not names, so that module names which collide once they are cut to what a solver accepts do not
matter. `check_answer` holds a solver's answer against every bound and row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError

__all__ = ["TOLERANCE", "Answer", "Model", "NoAnswer", "SolverError", "check_answer", "simple_bound"]

TOLERANCE = 1e-6
"""Largest violation of a row, a bound or integrality, relative to what is added up in it: what solvers grant too."""


class SolverError(AutoparError):
    """A solver's answer breaks a constraint of the problem it was given, or no method found any answer."""


class NoAnswer(Exception):  # noqa: N818 - not an error: the next solver is asked
    """One sentence on why a solver gave no answer."""


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

    def idle_columns(self) -> set[int]:
        """Columns without cost in no row: a solver does not hear of them, any value within their bounds is right."""
        return {i for i, cost in enumerate(self.costs) if not cost}.difference(*(terms for _, terms, _ in self.rows))

    def _add(self, cost: float, low: float, high: float | None, integer: bool) -> int:
        self.costs.append(cost)
        self.lows.append(low)
        self.highs.append(high)
        self.integer.append(integer)
        return len(self.costs) - 1


@dataclass(frozen=True)
class Answer:
    """What one solver says: status "optimal", "incumbent" (with values of every column) or "infeasible"; `bound` is
    what it proves of an incumbent."""

    status: str
    values: tuple[float, ...] = ()
    bound: float = -math.inf


def check_answer(model: Model, values: Sequence[float], solver: str = "") -> float:
    """The objective, once every column is within its bounds and integral where it must be and every row holds.

    Raises SolverError naming the solver, the row or column and by how much it is off.
    """
    if len(values) != len(model.costs):
        raise SolverError(f"{solver} answered {len(values)} of {len(model.costs)} columns", where=model.name)
    for i, value in enumerate(values):
        low, high = model.lows[i], model.highs[i]
        off = max(low - value, 0.0 if high is None else value - high)
        off = max(off, abs(value - round(value))) if model.integer[i] and math.isfinite(value) else off
        if not math.isfinite(value) or off > TOLERANCE * max(1.0, abs(low), abs(high or 0.0)):
            raise SolverError(f"{solver} answered {value} for column {i}", where=model.name, try_=_other(solver))
    for index, (sense, terms, right) in enumerate(model.rows):
        parts = [coefficient * values[column] for column, coefficient in terms.items()]
        off = math.fsum(parts) - right
        off = {"==": abs(off), "<=": off, ">=": -off}[sense]
        if off > TOLERANCE * max(1.0, abs(right), sum(map(abs, parts))):
            raise SolverError(
                f"the answer of {solver} breaks row {index} by {off:.3g}", where=model.name, try_=_other(solver)
            )
    return model.constant + math.fsum(c * x for c, x in zip(model.costs, values, strict=True))


def simple_bound(model: Model) -> float:
    """A lower bound without a solver: of every row that asks for exactly one of some binaries the cheapest, and every
    other column at its cheaper bound."""
    bound, free = model.constant, set(range(len(model.costs)))
    for sense, terms, right in model.rows:
        one_of = sense == "==" and right == 1.0 and all(k == 1.0 for k in terms.values())
        if one_of and free.issuperset(terms) and all(model.integer[i] and model.highs[i] == 1.0 for i in terms):
            bound += min(model.costs[i] for i in terms)
            free.difference_update(terms)
    for i in free:
        cost, high = model.costs[i], model.highs[i]
        if cost < 0:
            bound += -math.inf if high is None else cost * high
        else:
            bound += cost * model.lows[i]
    return bound


def _other(solver: str) -> str:
    return f"--solver {'cbc' if solver == 'highs' else 'highs'}, and report this"
