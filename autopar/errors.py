"""Errors a user can meet. Each says what is wrong, where, and what to try; the CLI prints one and exits with code 2.

`assert` is kept for faults of autopar itself.
"""

from __future__ import annotations

__all__ = [
    "AutoparError",
    "InfeasiblePlanError",
    "PassError",
    "PlanMismatchError",
    "SpecError",
    "UnsupportedModelError",
    "nearest",
]


class AutoparError(Exception):
    """Base of every error meant for a user.

    `what` states the fault in one sentence, `where` names the file, key, module path or node, `try_` the next step.
    """

    def __init__(self, what: str, *, where: str = "", try_: str = "") -> None:
        self.what, self.where, self.try_ = what, where, try_
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text.removesuffix('.')}. Try: {try_}" if try_ else text)


class SpecError(AutoparError):
    """A cluster, training or pin specification is malformed or contradicts itself."""


class UnsupportedModelError(AutoparError):
    """The model cannot be captured; `where` is the module path."""


class InfeasiblePlanError(AutoparError):
    """No plan satisfies the limits; the message names the binding limit and what is missing. `nearest_plan`, where
    memory is the limit, is an `autopar.Plan` that runs on devices with as much memory as the message asks for."""

    def __init__(self, what: str, *, where: str = "", try_: str = "", nearest_plan: object = None) -> None:
        super().__init__(what, where=where, try_=try_)
        self.nearest_plan = nearest_plan


class PassError(AutoparError):
    """A rewrite pass met a graph that breaks its contract; `where` is pass and node."""


class PlanMismatchError(AutoparError):
    """A plan does not belong to this model, cluster or world size."""


def nearest(word: str, known: list[str]) -> str:
    """`"did you mean X?"` for the closest known word, or the list of known words when none is close."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(sorted(known))}"
