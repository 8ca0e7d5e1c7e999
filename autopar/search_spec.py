"""How to search: for what, with how much memory to spare, with which solver, for how long."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from autopar.checks import finite_non_negative, finite_positive, require_one_of
from autopar.errors import SpecError
from autopar.plan import Plan

__all__ = ["OBJECTIVES", "SOLVERS", "SearchSpec"]

_LEAST_S = 0.01
OBJECTIVES = ("step-time", "memory", "cost")
SOLVERS = ("highs", "cbc", "heuristic")


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """What the search is for, what it may spend and with which solver.

    objective        "step-time"; "memory": least memory on the fullest device, and of the plans that need no more the
                     fastest; "cost": least money per token, on as many of the cluster's devices as that takes
    memory_headroom  fraction of every device's memory that stays free
    solver           asked first: "highs" (in process), "cbc" (a process of its own), or "heuristic" (no solver). The
                     others step in where it gives no answer, and the result says so
    time_limit_s     seconds the search may take; then the best plan so far is returned with its gap. None: no limit
    keep             a plan that is in use: it stays (cost_model/kept_plan.py) unless the best plan is faster by more
                     than the fraction keep_within. For the objective step-time, on equal devices

    Raises SpecError if a value is of the wrong type or range.
    """

    objective: str = "step-time"
    memory_headroom: float = 0.0
    solver: str = "highs"
    time_limit_s: float | None = None
    keep: Plan | None = None
    keep_within: float = 0.01

    def __post_init__(self) -> None:
        require_one_of(self.objective, OBJECTIVES, "search.objective")
        if finite_non_negative(self.memory_headroom, "search.memory_headroom") >= 1:
            raise SpecError("must be a fraction below 1", where="search.memory_headroom", try_="0.1")
        require_one_of(self.solver, SOLVERS, "search.solver")
        if self.time_limit_s is not None:
            finite_positive(self.time_limit_s, "search.time_limit_s")
        finite_non_negative(self.keep_within, "search.keep_within")
        if self.keep is not None and self.objective != "step-time":
            raise SpecError(f"a plan is kept by its step time, the objective is {self.objective}", where="search.keep",
                            try_="the objective step-time, or pins")  # fmt: skip

    @property
    def deadline_s(self) -> float:
        """On the clock of `time.perf_counter`, for a search that starts now; infinite without a limit."""
        return time.perf_counter() + (math.inf if self.time_limit_s is None else self.time_limit_s)

    def share_of(self, deadline_s: float, searches: int) -> SearchSpec:
        """For the first of so many searches that end together at the deadline: its equal part of what is left."""
        if math.isinf(deadline_s):
            return self
        return replace(self, time_limit_s=max(_LEAST_S, deadline_s - time.perf_counter()) / searches)
