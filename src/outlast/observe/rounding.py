"""How figures are rounded for people: one rule each for terminal, page and log.

Role: text from numbers, nothing else. Pure. Invariant: `web/page/format.js` writes the same words of the same number;
`tests/observe/test_rounding.py` holds the two together. Halves go to the even digit, as Python's own formatting has it.
"""

from __future__ import annotations

__all__ = ["counted", "format_number", "format_s", "format_share", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_s(seconds: float) -> str:
    """A duration in seconds, for people: `53 ms`, `1.25 s`, `2 min 03 s`, `1 h 05 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{format_number(seconds, 3)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float, digits: int = 4) -> str:
    """A number of which so many digits matter, a loss say: `0.6931`, `1.5`, `2.5e-05`."""
    return f"{value:.{digits}g}"


def format_share(share: float) -> str:
    """A share from 0 to 1 in per cent, with one digit after the point: `93.4%`."""
    return f"{share:.1%}"


def size(num_bytes: float) -> str:
    """A size in bytes, for people: `512 B`, `1.5 MiB`."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{f'{value:.0f}' if value >= 999.5 else format_number(value, 3)} {_UNITS[unit]}"


def counted(number: int, one: str, many: str = "") -> str:
    """A number of something, in words: `1 step`, `2,000 steps`. `many`: its plural, if it is not with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
