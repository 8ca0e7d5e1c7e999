"""autopar: a declarative auto-parallel compiler for PyTorch Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AutoparError,
    InfeasiblePlanError,
    PassError,
    PlanMismatchError,
    SpecError,
    UnsupportedModelError,
)
from autopar.plan import Plan
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec

if TYPE_CHECKING:
    from autopar.api import parallelize, plan

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "ClusterSpec",
    "InfeasiblePlanError",
    "PassError",
    "Pins",
    "Plan",
    "PlanMismatchError",
    "SearchSpec",
    "SpecError",
    "TrainSpec",
    "UnsupportedModelError",
    "parallelize",
    "plan",
]

if not TYPE_CHECKING:
    # torch is imported by the first call, so that specifications, plans and `autopar --help` are there at once. These
    # are functions of this module, not a __getattr__, because `autopar.plan` is also a submodule: importing it, above,
    # sets that attribute, and only a later definition here makes `autopar.plan(...)` the search.

    def plan(*args: Any, **kwargs: Any) -> Plan:
        from autopar import api

        return api.plan(*args, **kwargs)

    def parallelize(*args: Any, **kwargs: Any) -> Any:
        from autopar import api

        return api.parallelize(*args, **kwargs)

    plan.__doc__ = "Search the best plan for a model on a cluster: see `autopar.api.plan`."
    parallelize.__doc__ = "A model as a module that trains by the best plan: see `autopar.api.parallelize`."
