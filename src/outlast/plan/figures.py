"""Curves that a terminal and an SVG file show alike.

Invariant: both draw the same points; lines are told apart by marks and dashes, never by hue. It computes where a point
lies, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .number_words import significant

__all__ = ["Figure"]

_MARKS = "*o+x#@%="
_DASHES = ("", "6 4", "2 3", "8 3 2 3", "1 4", "12 4")
_COLUMNS, _ROWS = 64, 16
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 340, 80, 20, 30, 60

_Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """series: (name, points); points that a logarithm has no place for are left out."""

    title: str
    x_label: str
    y_label: str
    series: tuple[tuple[str, _Points], ...]
    log_x: bool = False
    log_y: bool = False

    def _scaled(self) -> list[tuple[str, list[tuple[float, float]]]]:
        def usable(x: float, y: float) -> bool:
            return math.isfinite(x + y) and (x > 0 or not self.log_x) and (y > 0 or not self.log_y)

        return [
            (
                name,
                [
                    (math.log10(x) if self.log_x else x, math.log10(y) if self.log_y else y)
                    for x, y in points
                    if usable(x, y)
                ],
            )
            for name, points in self.series
        ]

    def _box(self) -> tuple[float, float, float, float]:
        every = [point for _, points in self._scaled() for point in points] or [(0.0, 0.0)]
        xs, ys = [x for x, _ in every], [y for _, y in every]
        return min(xs), max(max(xs), min(xs) + 1e-12), min(ys), max(max(ys), min(ys) + 1e-12)

    def _ends(self) -> tuple[str, str, str, str]:
        box = self._box()
        logs = (self.log_x, self.log_x, self.log_y, self.log_y)
        x0, x1, y0, y1 = (significant(10**v if log else v) for v, log in zip(box, logs, strict=True))
        return x0, x1, y0, y1

    def text(self) -> str:
        """For a terminal: one mark a series, the last one drawn on top."""
        x0, x1, y0, y1 = self._box()
        cells = [[" "] * _COLUMNS for _ in range(_ROWS)]
        for number, (_, points) in enumerate(self._scaled()):
            for x, y in points:
                column = round((x - x0) / (x1 - x0) * (_COLUMNS - 1))
                cells[_ROWS - 1 - round((y - y0) / (y1 - y0) * (_ROWS - 1))][column] = _MARKS[number % len(_MARKS)]
        left, right, low, high = self._ends()
        margin = max(len(low), len(high))
        edge = [high.rjust(margin), *[" " * margin] * (_ROWS - 2), low.rjust(margin)]
        lines = [f"{side} |{''.join(row).rstrip()}" for side, row in zip(edge, cells, strict=True)]
        axis = " " * margin + " +" + "-" * _COLUMNS
        ends = " " * (margin + 2) + left + right.rjust(_COLUMNS - len(left))
        scale = f"{self.x_label}{' (log)' * self.log_x}, {self.y_label} up{' (log)' * self.log_y}"
        keys = "  ".join(f"{_MARKS[i % len(_MARKS)]} {name}" for i, (name, _) in enumerate(self.series))
        return "\n".join([self.title, *lines, axis, ends, scale, keys])

    def svg(self) -> str:
        """A file of its own: no script, no external reference."""
        x0, x1, y0, y1 = self._box()

        def at(x: float, y: float) -> tuple[float, float]:
            return (
                _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT),
                _TOP + (1 - (y - y0) / (y1 - y0)) * (_HEIGHT - _TOP - _BOTTOM),
            )

        body = [f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" stroke="#000"/>']
        for number, (name, points) in enumerate(self._scaled()):
            places = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y in points))
            dash = _DASHES[number % len(_DASHES)]
            style = f'fill="none" stroke="#333" stroke-width="1.6" stroke-dasharray="{dash}"'
            body.append(f'<polyline points="{places}" {style}/>')
            y = _HEIGHT - 24 + 14 * (number // 4)
            x = _LEFT + 160 * (number % 4)
            body.append(f'<path d="M{x} {y - 4}h28" {style}/>')
            body.append(_words(x + 34, y, name))
        left, right, low, high = self._ends()
        floor = _HEIGHT - _BOTTOM + 14
        body += [
            _words(_LEFT, floor, left),
            _words(_WIDTH - _RIGHT, floor, right, "end"),
            _words((_LEFT + _WIDTH) / 2, floor, self.x_label + (" (log)" if self.log_x else ""), "middle"),
            _words(_LEFT - 6, _HEIGHT - _BOTTOM, low, "end"),
            _words(_LEFT - 6, _TOP + 8, high, "end"),
            _words(_LEFT, _TOP - 10, f"{self.title}: {self.y_label}" + (" (log)" if self.log_y else "")),
        ]
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self.title)}" font-size="12" '
            f'font-family="sans-serif" xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>\n'
        )


def _words(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
