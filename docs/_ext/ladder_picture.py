"""Draw the ladder of a run's checkpoints, from its journal: `ladder_picture.py RUN ladder.svg`.

Time runs to the right and is drawn to scale. On top are the steps that training had committed; below, for each tier,
from when until when it could have given back which step: memory from a save's end to the next one's, the disk until the
generation was removed, the farther place once it was copied there, until the first copy after that removal, as it keeps
as many. What a run began again from is said where the journal has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from outlast.core import events as ev
from outlast.journal import Journal

_WIDTH, _LEFT, _RIGHT = 980, 110, 24
_CURVE_TOP, _CURVE_HEIGHT, _ROW, _BAR = 52, 96, 54, 18
_INK, _SOFT, _LINE, _BAD = "#17202b", "#55606e", "#b9c1cb", "#c62f2f"
_TIERS = {"memory": "#8d4bab", "disk": "#2f7fc9", "object": "#16845b"}
_NAMES = {"memory": "memory", "disk": "disk", "object": "farther place"}


class Bar(NamedTuple):
    """A tier could give back the state of `step` from one moment to another."""

    tier: str
    step: int
    from_s: float
    until_s: float


def bars(events: Sequence[ev.AnyEvent]) -> Iterator[Bar]:
    """What each tier held, and when."""
    end_s = events[-1].at_s
    saved = [event for event in events if isinstance(event, ev.CheckpointSaved)]
    gone = {n: event.at_s for event in events if isinstance(event, ev.CheckpointPruned) for n in event.generations}
    drained = {event.generation: event.at_s for event in events if isinstance(event, ev.CheckpointDrained)}
    for save, after in zip(saved, [*saved[1:], None], strict=True):
        yield Bar("memory", save.step, save.at_s, after.at_s if after else end_s)
        yield Bar("disk", save.step, save.at_s, gone.get(save.generation, end_s))
        if save.generation in drained:
            removed_s = gone.get(save.generation, end_s)
            tidied_s = min((at_s for at_s in drained.values() if at_s > removed_s), default=end_s)
            yield Bar("object", save.step, drained[save.generation], tidied_s)


def picture(events: Sequence[ev.AnyEvent]) -> str:
    """The SVG."""
    formed = next(event.at_s for event in events if isinstance(event, ev.ViewFormed))
    end_s = next((e.at_s for e in events if isinstance(e, ev.RunFinished)), events[-1].at_s)
    begin_s = events[0].at_s
    kept = [event for event in events if event.at_s <= end_s]

    def x(at_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (at_s - formed) / (end_s - formed)

    drawn = [*_training(kept, formed, x), *_ladder(list(bars(kept)), x), *_falls(kept, x)]
    height = _CURVE_TOP + _CURVE_HEIGHT + 30 + _ROW * len(_TIERS) + 34
    drawn.append(_text(_LEFT, height - 12, f"+{formed - begin_s:.0f} s", _SOFT))
    drawn.append(_text(_WIDTH - _RIGHT, height - 12, f"+{end_s - begin_s:.0f} s", _SOFT, "end"))
    inner = "\n".join(drawn)
    title = "Steps of a run, and which of them memory, disk and a farther place could give back at each moment"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="13">\n'
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#fff"/>\n{inner}\n</svg>\n'
    )


def _training(events: Sequence[ev.AnyEvent], formed: float, x: object) -> Iterator[str]:
    """Steps committed over time, broken where they were lost."""
    assert callable(x)
    made = [e for e in events if isinstance(e, ev.ProgressMade) and e.committed >= 0]
    most = max(event.committed for event in made)
    yield _text(8, _CURVE_TOP + 12, f"step {most}", _SOFT)
    yield _text(8, _CURVE_TOP + _CURVE_HEIGHT, "step 0", _SOFT)
    lines: list[list[str]] = [[f"{x(formed):.1f},{_CURVE_TOP + _CURVE_HEIGHT}"]]
    before = 0
    for event in made:
        if event.committed < before:
            lines.append([])
        before = event.committed
        y = _CURVE_TOP + _CURVE_HEIGHT * (1 - event.committed / most)
        lines[-1].append(f"{x(event.committed_at_s):.1f},{y:.1f}")
    for line in lines:
        yield f'<polyline points="{" ".join(line)}" fill="none" stroke="{_INK}" stroke-width="2"/>'


def _ladder(held: Sequence[Bar], x: object) -> Iterator[str]:
    """A row for each tier; of generations that it holds at once each has a line of its own."""
    assert callable(x)
    for row, (tier, colour) in enumerate(_TIERS.items()):
        top = _CURVE_TOP + _CURVE_HEIGHT + 30 + _ROW * row
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top - 6}" y2="{top - 6}" stroke="{_LINE}"/>'
        yield _text(8, top + 24, _NAMES[tier], _INK, bold=True)
        mine = [bar for bar in held if bar.tier == tier]
        lines = 1 if tier == "memory" else 3
        size = min(_BAR, (_ROW - 10) / lines)
        for number, bar in enumerate(mine):
            y = top + (number % lines) * size
            width = max(1.0, x(bar.until_s) - x(bar.from_s))
            yield (
                f'<rect x="{x(bar.from_s):.1f}" y="{y:.1f}" width="{width:.1f}" height="{size - 1:.1f}" rx="2" '
                f'fill="{colour}" fill-opacity="0.85"><title>{_NAMES[tier]}: step {bar.step}</title></rect>'
            )
            if width > 26:
                yield _text(x(bar.from_s) + 4, y + size - 4, str(bar.step), "#fff", small=True)


def _falls(events: Sequence[ev.AnyEvent], x: object) -> Iterator[str]:
    """Where every replica was gone, and what the run began again from."""
    assert callable(x)
    top = _CURVE_TOP + _CURVE_HEIGHT + 30
    for event in events:
        if isinstance(event, ev.FleetGone):
            at = x(event.at_s)
            yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_CURVE_TOP - 14}" y2="{top + 3 * _ROW}" stroke="{_BAD}"/>'
            loaded = next(e for e in events if isinstance(e, ev.CheckpointLoaded) and e.at_s > event.at_s)
            words = f"every replica is killed at step {event.step}; {loaded.at_s - event.at_s:.1f} s later "
            words += f"they have step {loaded.step} back from {loaded.tier}"
            yield _text(at, _CURVE_TOP - 20, words, _BAD, "middle")


def _text(
    x: float, y: float, words: str, colour: str, anchor: str = "start", *, bold: bool = False, small: bool = False
) -> str:
    more = (' font-weight="600"' if bold else "") + (' font-size="11"' if small else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def main(run: str, target: str) -> None:
    """Draw the ladder of `run` into `target`."""
    with Journal.open_reader(Path(run)) as journal:
        events = [entry.event for entry in journal.events()]
    Path(target).write_text(picture(events), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
