"""The loss curve as text: one line of blocks, or a plot of Braille dots with its axes.

Role: pure text from numbers. Means of neighbours stand for more points than there is room for; a value that is not
finite is shown as a cross and takes no part in the scale. Positive values over three decades or more get a logarithmic
scale, as else all but the first would lie on the floor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from outlast.core import events as ev
from outlast.observe.rounding import format_number

__all__ = ["losses", "plot", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDE = 1e3
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille bits by row and column of a 4 x 2 cell


def losses(events: Iterable[ev.AnyEvent]) -> list[tuple[int, float]]:
    """(step, loss) of every stable step the journal knows of, by step; the last word on a step holds."""
    points: dict[int, float] = {}
    for event in events:
        if isinstance(event, ev.ProgressMade):
            points.update((step, loss) for step, loss in event.losses)
    return sorted(points.items())


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """One line of at most `width` blocks, lowest to highest value; empty for no values."""
    cells = _scaled(_thin(values, max(1, width)))
    low, high = _range(cells)
    return "".join(_BLOCKS[_level(value, low, high, len(_BLOCKS))] if math.isfinite(value) else "×" for value in cells)


def plot(points: Sequence[tuple[int, float]], *, width: int = 72, height: int = 10) -> str:
    """Lines of a plot of loss over step, axes included, within `width` columns and `height` + 2 rows.

    Returns one line that says so if there is nothing to draw.
    """
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if not finite:
        return "no losses to plot"
    low, high = _range([loss for _, loss in finite])
    log = _is_wide([loss for _, loss in finite])
    top = format_number(high)
    labels = [top, *([""] * (height - 2)), format_number(low)] if height > 1 else [top]
    margin = max(map(len, labels))
    columns = max(4, width - margin - 2)
    values = _thin([loss for _, loss in points], columns * 2)
    if log:
        values, low, high = _logs(values), math.log10(low), math.log10(high)
    cells = _cells(values, low, high, columns, height)
    rows = [f"{label:>{margin}} ┤{''.join(row)}".rstrip() for label, row in zip(labels, cells, strict=True)]
    first, last = f"{points[0][0]}", ("log scale, " if log else "") + f"step {points[-1][0]}"
    axis = first + " " * max(1, columns - len(first) - len(last)) + last
    return "\n".join([*rows, f"{'':>{margin}} └{'─' * columns}", f"{'':>{margin}}  {axis}"])


def _cells(values: Sequence[float], low: float, high: float, columns: int, height: int) -> list[list[str]]:
    bits = [[0] * columns for _ in range(height)]
    crosses: set[int] = set()
    for index, value in enumerate(values):
        column = min(columns * 2 - 1, index * columns * 2 // len(values))
        if not math.isfinite(value):
            crosses.add(column // 2)
            continue
        row = height * 4 - 1 - _level(value, low, high, height * 4)
        bits[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    cells = [[chr(0x2800 + cell) if cell else " " for cell in row] for row in bits]
    for column in crosses:
        cells[0][column] = "×"
    return cells


def _thin(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` values: means of even runs of neighbours. One that is not finite makes its mean not finite."""
    if len(values) <= limit:
        return list(values)
    cuts = [index * len(values) // limit for index in range(limit + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def _is_wide(values: Sequence[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) >= _WIDE * min(finite)


def _scaled(values: Sequence[float]) -> Sequence[float]:
    return _logs(values) if _is_wide(values) else values


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log10(value) if math.isfinite(value) else math.nan for value in values]


def _range(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _level(value: float, low: float, high: float, levels: int) -> int:
    if high <= low:
        return levels // 2
    return min(levels - 1, int((value - low) / (high - low) * levels))
