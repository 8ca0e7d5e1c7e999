"""Checks that every specification shares. Each raises SpecError with the place, the rule and the value."""

from __future__ import annotations

import math
from typing import Any

from autopar.errors import SpecError

__all__ = [
    "LARGEST_COUNT",
    "finite_non_negative",
    "finite_positive",
    "require_count",
    "require_fraction",
    "require_one_of",
    "require_text",
    "shown",
]

LARGEST_COUNT = 2**31 - 1
"""Of devices' shares, sequences and tokens: what a tensor's dim can be indexed with, and divided in no time."""


def finite_positive(value: Any, where: str, *, wanted: str = "a positive number") -> float:
    """`value` as a float. Raises SpecError if it is not a number, not finite, zero or negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"must be {wanted}, not {shown(value)}", where=where)
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise SpecError(f"must be {wanted}, not {shown(value)}", where=where)
    return number


def finite_non_negative(value: Any, where: str) -> float:
    """`finite_positive` that lets zero pass: an idealised device with no launch cost, a link with no latency."""
    if value == 0 and not isinstance(value, bool):
        return 0.0
    return finite_positive(value, where, wanted="a number not below zero")


def require_text(value: Any, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise SpecError(f"must be a name, not {shown(value)}", where=where)


def require_count(value: Any, where: str, *, largest: int = LARGEST_COUNT) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"must be a positive integer, not {shown(value)}", where=where)
    if value > largest:
        raise SpecError(f"must be at most {largest}, not {shown(value)}", where=where)


def require_fraction(value: Any, where: str) -> None:
    if finite_positive(value, where, wanted="a fraction above 0, at most 1") > 1:
        raise SpecError(f"must be a fraction above 0, at most 1, not {shown(value)}", where=where)


def require_one_of(value: Any, allowed: tuple[str, ...], where: str) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise SpecError(f"{shown(value)} is not one of {', '.join(allowed)}", where=where)


def shown(value: Any) -> str:
    """`value` as a message quotes it, in at most 60 characters: a number may have thousands of digits."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits, or deeper nesting, than Python prints
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
