"""Quantities as people write them in a file: "80GB", "400Gb/s", "2us", "989 TFLOPS".

`B` is a byte and `b` a bit; `k M G T P` are powers of 1000, `Ki Mi Gi Ti` powers of 1024. A plain number is in the base
unit: bytes, bytes per second, seconds, flops per second.
"""

from __future__ import annotations

import re
from typing import Any

from autopar.checks import finite_positive, shown
from autopar.errors import SpecError

__all__ = ["bandwidth_bytes_per_s", "count", "duration_s", "flops_per_s", "memory_bytes", "time_s"]

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIX |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*"
_MEMORY = re.compile(_NUMBER + r"([kKMGT]i?|)B")
_BANDWIDTH = re.compile(_NUMBER + r"([kKMGTP]i?|)(B/s|Bps|b/s|bps|bit/s)")
_TIME = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s)")
_COUNT = re.compile(_NUMBER + r"([kKMGBT]|)")
_DURATION = re.compile(_NUMBER + r"(s|m|min|h|d|w)")
_FLOPS = re.compile(_NUMBER + r"([kMGTP])(?:FLOPS|FLOP/s|flops|flop/s|Flops|)")
_SECONDS_PER = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_PER_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3, "s": 1.0}


def memory_bytes(value: Any, where: str) -> int:
    """ "80GB" -> 80e9, "80GiB" -> 80 * 2**30. A fraction of a byte is dropped."""
    wanted = 'a size such as "80GB" or "80GiB"'
    found = _matched(_MEMORY, value, where, wanted)
    if found is None:
        return int(finite_positive(value, where, wanted=wanted))
    return int(finite_positive(_number(found[1], where, wanted) * _PREFIX[found[2]], where, wanted=wanted))


def bandwidth_bytes_per_s(value: Any, where: str) -> float:
    """ "400Gb/s" -> 50e9, "450GB/s" -> 450e9."""
    wanted = 'a bandwidth such as "450GB/s" (bytes) or "400Gb/s" (bits)'
    found = _matched(_BANDWIDTH, value, where, wanted)
    if found is None:
        return finite_positive(value, where, wanted=wanted)
    per_byte = 1 if found[3].startswith("B") else 8
    return finite_positive(_number(found[1], where, wanted) * _PREFIX[found[2]] / per_byte, where, wanted=wanted)


def time_s(value: Any, where: str) -> float:
    """ "2us" -> 2e-6."""
    wanted = 'a time such as "2us"'
    found = _matched(_TIME, value, where, wanted)
    if found is None:
        return finite_positive(value, where, wanted=wanted)
    return finite_positive(_number(found[1], where, wanted) / _PER_SECOND[found[2]], where, wanted=wanted)


def count(value: Any, where: str) -> float:
    """ "15T" -> 15e12, "300B" and "300G" -> 300e9."""
    wanted = 'a count such as "15T" or "15e12"'
    found = _matched(_COUNT, value, where, wanted)
    if found is None:
        return finite_positive(value, where, wanted=wanted)
    return finite_positive(_number(found[1], where, wanted) * _PREFIX[found[2].replace("B", "G")], where, wanted=wanted)


def duration_s(value: Any, where: str) -> float:
    """ "30d" -> 2_592_000.0; "90s", "15m", "12h" and "2w" too, a plain number is seconds."""
    wanted = 'a duration such as "90s", "15m", "12h" or "30d"'
    if isinstance(value, str) and re.fullmatch(_NUMBER, value):
        value = _number(value, where, wanted)
    found = _matched(_DURATION, value, where, wanted)
    if found is None:
        return finite_positive(value, where, wanted=wanted)
    return finite_positive(_number(found[1], where, wanted) * _SECONDS_PER[found[2]], where, wanted=wanted)


def flops_per_s(value: Any, where: str) -> float:
    """ "989T" or "989 TFLOPS" -> 989e12."""
    wanted = 'a rate such as "989T" or "989TFLOPS"'
    found = _matched(_FLOPS, value, where, wanted)
    if found is None:
        return finite_positive(value, where, wanted=wanted)
    return finite_positive(_number(found[1], where, wanted) * _PREFIX[found[2]], where, wanted=wanted)


def _matched(pattern: re.Pattern[str], value: Any, where: str, wanted: str) -> re.Match[str] | None:
    """The match of a text, None for a value that is no text."""
    if not isinstance(value, str):
        return None
    found = pattern.fullmatch(value.strip())
    if found is None:
        raise SpecError(f"must be {wanted}, not {shown(value)}", where=where)
    return found


def _number(text: str, where: str, wanted: str) -> float:
    try:
        return float(text)
    except ValueError as error:  # "1.2.3"
        raise SpecError(f"must be {wanted}, not {shown(text)}", where=where) from error
