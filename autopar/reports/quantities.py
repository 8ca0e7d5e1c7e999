"""Quantities as a person reads them: three digits and a unit."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "percent_text", "range_text", "seconds_text"]

_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_text(value: float) -> str:
    return _scaled(value, _BYTES, "B")


def seconds_text(value: float) -> str:
    return _scaled(value, _SECONDS, "s")


def count_text(value: float) -> str:
    return _scaled(value, _COUNTS, "").replace(" ", "")


def percent_text(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def range_text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _scaled(value: float, scales: tuple[tuple[float, str], ...], base: str) -> str:
    if value == 0:
        return f"0 {base}".strip()
    for scale, unit in scales:
        # Compared after rounding, so that 999.96 of a unit becomes 1 of the next.
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)} {unit}"
    scale, unit = (1.0, base) if base != "s" else scales[-1]
    return f"{_three_digits(value / scale)} {unit}".strip()


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
