"""Plots as inline SVG that read in greyscale: lines told apart by dashes, bars by hatches and labels, never by hue.

Invariant: no script, no external reference, deterministic text. All colours are greys.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

__all__ = ["bars", "histogram", "line", "spans", "stacked"]

_WIDTH, _LEFT, _RIGHT = 720, 190, 60
_HATCHES = ("solid", "diagonal", "dots", "cross", "light", "white")


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def _svg(height: float, body: Sequence[str], label: str) -> str:
    patterns = (
        '<defs><pattern id="diagonal" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#ddd"/><rect width="2.5" height="6" fill="#555"/></pattern>'
        '<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#eee"/>'
        '<circle cx="3" cy="3" r="1.6" fill="#444"/></pattern>'
        '<pattern id="cross" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<rect width="6" height="6" fill="#fff"/>'
        '<path d="M0 0L6 6M6 0L0 6" stroke="#333"/></pattern></defs>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'font-family="sans-serif" xmlns="http://www.w3.org/2000/svg">{patterns}{"".join(body)}</svg>'
    )


def _fill(index: int) -> str:
    name = _HATCHES[index % len(_HATCHES)]
    return {"solid": "#333", "light": "#bbb", "white": "#fff"}.get(name, f"url(#{name})")


def _ticks(low: float, high: float, num: int = 5) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** floor(log10(span / num))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= num)
    first = ceil(low / step)
    return [i * step for i in range(first, floor(high / step + 1e-9) + 1)]


def line(
    points: Sequence[tuple[float, float]],
    *,
    x_label: str,
    y_label: str,
    mark: tuple[float, str] | None = None,
    log_x: bool = True,
) -> str:
    """A curve; `mark` draws a dashed vertical at x with a label."""
    height, bottom, top = 260, 215, 20
    xs = [log10(x) if log_x else x for x, _ in points]
    ys = [y for _, y in points]
    low, high = min(ys), max(ys) + 1e-9

    def px(x: float) -> float:
        return _LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (_WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return bottom - (y - low) / (high - low) * (bottom - top)

    body = [f'<path d="M{_LEFT} {top}V{bottom}H{_WIDTH - _RIGHT}" fill="none" stroke="#000"/>']
    for tick in _ticks(low, high):
        body.append(
            f'<path d="M{_LEFT - 4} {py(tick):.1f}h4" stroke="#000"/>'
            + _text(_LEFT - 8, py(tick) + 4, f"{tick:.4g}", "end")
        )
    decades = range(ceil(xs[0]), floor(xs[-1]) + 1) if log_x else _ticks(xs[0], xs[-1])
    for tick in decades:
        words = f"{10**tick:g}" if log_x else f"{tick:.4g}"
        body.append(
            f'<path d="M{px(tick):.1f} {bottom}v4" stroke="#000"/>' + _text(px(tick), bottom + 18, words, "middle")
        )
    path = "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in zip(xs, ys, strict=True))
    body.append(f'<path d="M{path}" fill="none" stroke="#000" stroke-width="2"/>')
    if mark:
        at = px(log10(mark[0]) if log_x else mark[0])
        body.append(
            f'<path d="M{at:.1f} {top}V{bottom}" stroke="#000" stroke-dasharray="5 4"/>'
            + _text(at + 6, top + 10, mark[1])
        )
    body += [_text(_WIDTH - _RIGHT, bottom + 38, x_label, "end"), _text(8, top + 4, y_label)]
    return _svg(height, body, f"{y_label} against {x_label}")


def bars(items: Sequence[tuple[str, float, str]], *, label: str) -> str:
    """Horizontal bars: (name, value >= 0, text beside the bar)."""
    largest = max((value for _, value, _ in items), default=1.0) or 1.0
    body = []
    for i, (name, value, words) in enumerate(items):
        y, width = 8 + i * 22, value / largest * (_WIDTH - _LEFT - _RIGHT - 90)
        body.append(_text(_LEFT - 8, y + 13, name, "end"))
        body.append(
            f'<rect x="{_LEFT}" y="{y}" width="{max(width, 0.5):.1f}" height="16" fill="{_fill(1)}" stroke="#000"/>'
        )
        body.append(_text(_LEFT + width + 6, y + 13, words))
    return _svg(16 + 22 * len(items), body, label)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, label: str) -> str:
    """One bar of the whole per row, cut into named shares with a hatch each, and a legend."""
    body, names = [], [name for name, _ in rows[0][1]]
    for r, (title, parts) in enumerate(rows):
        x, y = float(_LEFT), 10 + r * 40
        body.append(_text(_LEFT - 8, y + 18, title, "end"))
        for i, (_, value) in enumerate(parts):
            width = value * (_WIDTH - _LEFT - _RIGHT)
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.2f}" height="26" fill="{_fill(i)}" stroke="#000"/>'
            )
            x += width
    y = 10 + 40 * len(rows) + 8
    for i, name in enumerate(names):
        at = _LEFT + (i % 3) * 165
        down = y + (i // 3) * 22
        body.append(
            f'<rect x="{at}" y="{down}" width="14" height="14" fill="{_fill(i)}" stroke="#000"/>'
            + _text(at + 20, down + 12, name)
        )
    return _svg(y + 22 * ceil(len(names) / 3) + 10, body, label)


def histogram(values: Sequence[float], *, x_label: str, bins: int = 24) -> str:
    """Counts in even bins."""
    low, high = min(values), max(values) + 1e-12
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    bottom, top, span = 180, 15, _WIDTH - _LEFT - _RIGHT
    body = [f'<path d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}" stroke="#000"/>']
    for i, count in enumerate(counts):
        tall = count / max(counts) * (bottom - top)
        body.append(
            f'<rect x="{_LEFT + i * span / bins:.1f}" y="{bottom - tall:.1f}" width="{span / bins - 1:.1f}" '
            f'height="{tall:.1f}" '
            f'fill="{_fill(4)}" stroke="#000"/>'
        )
    for tick in _ticks(low, high):
        body.append(_text(_LEFT + (tick - low) / (high - low) * span, bottom + 18, f"{tick:.4g}", "middle"))
    body.append(_text(_WIDTH - _RIGHT, bottom + 38, x_label, "end"))
    return _svg(228, body, f"distribution of {x_label}")


def spans(items: Sequence[tuple[str, float, float]], *, centre: float, label: str) -> str:
    """A tornado: per item the values at the low (hatched) and high (solid) end of its range, about `centre`."""
    low = min(min(a, b) for _, a, b in items)
    high = max(max(a, b) for _, a, b in items)
    width = max(high - low, 1e-9)

    def px(value: float) -> float:
        return _LEFT + (value - low) / width * (_WIDTH - _LEFT - _RIGHT)

    body = []
    for i, (name, a, b) in enumerate(items):
        y = 8 + i * 22
        body.append(_text(_LEFT - 8, y + 13, name, "end"))
        for value, fill in ((a, _fill(1)), (b, _fill(0))):
            x, size = min(px(value), px(centre)), abs(px(value) - px(centre))
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(size, 0.3):.1f}" height="16" fill="{fill}" stroke="#000"/>'
            )
    bottom = 12 + 22 * len(items)
    body.append(f'<path d="M{px(centre):.1f} 4V{bottom}" stroke="#000" stroke-dasharray="5 4"/>')
    for value in (low, centre, high):
        body.append(_text(px(value), bottom + 16, f"{value:.4f}", "middle"))
    return _svg(bottom + 28, body, label)
