"""What a search found: the plan, the nearest others, how far each is proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.mesh import Degrees
from autopar.plan import Plan

__all__ = ["OF_PLAN", "PROVEN", "Candidate", "SearchResult"]

PROVEN = 1e-6
"""A gap that is rounding."""

OF_PLAN = ("solver", "status", "bound_s", "gap", "candidates", "pruned")
"""What a plan says of the search."""


@dataclass(frozen=True)
class Candidate:
    """A layout that was not chosen, within 5 % of its best setting. `bound_s` is its analytic lower bound."""

    degrees: Degrees
    sp: bool
    micro_batch: int
    schedule: str
    checkpoint: str
    step_time_s: float | None
    bound_s: float
    time_s: Mapping[str, float]
    peak_memory_bytes: int | None
    reason: str
    virtual_stages: int = 1
    zero: int = 0
    zero_group: int = 0
    context_parallel: str = "ring"


@dataclass(frozen=True)
class SearchResult:
    """`alternatives`: the nearest other layouts (degrees and sequence sharding), fastest first; `statistics`: counts
    and times of the search; `notices`: what was assumed."""

    plan: Plan
    alternatives: tuple[Candidate, ...]
    statistics: Mapping[str, Any]
    notices: tuple[str, ...] = ()

    def with_statistics(self, **changed: Any) -> SearchResult:
        """Also in what the plan says of them."""
        statistics = {**self.statistics, **changed}
        return replace(self, statistics=statistics, plan=self.plan.replace(solver={k: statistics[k] for k in OF_PLAN}))

    def against(self, bound_s: float) -> SearchResult:
        """Where a step may be as short as `bound_s`, other searches included."""
        gap = max(0.0, float(self.plan.prediction["step_time_s"]) / bound_s - 1)
        status = self.statistics["status"]
        status = "incumbent" if status == "optimal" and gap > PROVEN else status
        return self.with_statistics(bound_s=bound_s, gap=gap, status=status)
