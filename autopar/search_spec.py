"""How to search: with which solver, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.checks import finite_positive, require_one_of

__all__ = ["SOLVERS", "SearchSpec"]

SOLVERS = ("highs", "cbc", "heuristic")


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """What the search may spend, and with which solver.

    solver        asked first: "highs" (in process), "cbc" (a process of its own), or "heuristic" (no solver). The
                  others step in where it gives no answer, and the result says so
    time_limit_s  seconds the search may take; then the best plan so far is returned with its gap. None: no limit

    Raises SpecError if a value is of the wrong type or range.
    """

    solver: str = "highs"
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        require_one_of(self.solver, SOLVERS, "search.solver")
        if self.time_limit_s is not None:
            finite_positive(self.time_limit_s, "search.time_limit_s")
