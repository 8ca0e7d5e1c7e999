"""Checks that every specification shares. Each raises SpecError with the place, the rule and the value."""

from __future__ import annotations

import math
from typing import Any

from autopar.errors import SpecError

__all__ = [
    "finite_non_negative",
    "finite_positive",
    "require_count",
    "require_fraction",
    "require_one_of",
    "require_text",
]


def finite_positive(value: Any, where: str, *, wanted: str = "a positive number") -> float:
    """`value` as a float. Raises SpecError if it is not a number, not finite, zero or negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"must be {wanted}, not {value!r}", where=where)
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise SpecError(f"must be {wanted}, not {value!r}", where=where)
    return number


def finite_non_negative(value: Any, where: str) -> float:
    """`finite_positive` that lets zero pass: an idealised device with no launch cost, a link with no latency."""
    if value == 0 and not isinstance(value, bool):
        return 0.0
    return finite_positive(value, where, wanted="a number not below zero")


def require_text(value: Any, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise SpecError(f"must be a name, not {value!r}", where=where)


def require_count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"must be a positive integer, not {value!r}", where=where)


def require_fraction(value: Any, where: str) -> None:
    if finite_positive(value, where, wanted="a fraction above 0, at most 1") > 1:
        raise SpecError(f"must be a fraction above 0, at most 1, not {value!r}", where=where)


def require_one_of(value: Any, allowed: tuple[str, ...], where: str) -> None:
    if value not in allowed:
        raise SpecError(f"{value!r} is not one of {', '.join(allowed)}", where=where)
