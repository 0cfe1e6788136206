"""Numbers as a reader sees them: rounded, in their natural unit. Text only; nothing is computed from it."""

from __future__ import annotations

import math

__all__ = ["duration", "share", "significant"]


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits, with thousands separated; no exponent between 1e-4 and 1e7."""
    number = float(value)
    if math.isnan(number):
        return "unknown"
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    if 1e-4 <= abs(number) < 1e7:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(number))))
        return f"{number:,.{decimals}f}"
    return f"{number:.{digits - 1}e}"


def duration(seconds: float) -> str:
    """A span in its natural unit: 42 s, 12 min, 3.1 h, 9.2 d."""
    value = float(seconds)
    if not math.isfinite(value):
        return "never" if value > 0 else "unknown"
    if abs(value) < 1e-6:
        return "0 s"
    for unit, size, limit in (
        ("s", 1.0, 120.0),
        ("min", 60.0, 7200.0),
        ("h", 3600.0, 72 * 3600.0),
        ("d", 86400.0, math.inf),
    ):
        if abs(value) < limit:
            return f"{significant(value / size)} {unit}"
    raise AssertionError("unreachable: the last limit is infinite")


def share(value: float, digits: int = 2) -> str:
    """A fraction as a percentage."""
    return f"{100 * float(value):.{digits}f} %"
