"""Draw one fault of a run as a sequence diagram, from its journal: `fault_picture.py RUN r1.1 fault.svg`.

Who is there stands on top, time runs down, in the order and at the times of the journal; nothing is made up or drawn to
scale. The rows are the journal's own events, from the death to the moment at which the successor has caught up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from outlast.core import events as ev
from outlast.journal import Journal

_COLUMN, _ROW, _TOP, _LEFT = 128, 34, 64, 96
_INK, _SOFT, _LINE, _BAD, _GOOD = "#17202b", "#55606e", "#b9c1cb", "#c62f2f", "#16845b"


class Arrow(NamedTuple):
    """What one told others at a moment; to itself where `to` is empty."""

    at_s: float
    of: str
    to: Sequence[str]
    words: str
    colour: str = _INK


def arrows(events: Sequence[ev.AnyEvent], victim: str) -> Iterator[Arrow]:
    """The fault of `victim` and what followed, until another process of its slot has caught up."""
    slot = victim.partition(".")[0]
    begun = False
    for event in events:
        begun = begun or (isinstance(event, ev.ReplicaExited) and event.replica == victim)
        if not begun:
            continue
        match event:
            case ev.ReplicaExited() if event.replica == victim:
                yield Arrow(event.at_s, victim, (), f"{event.detail or event.cause} in step {event.step}", _BAD)
                if event.noticed_by.startswith("r"):
                    yield Arrow(event.at_s, event.noticed_by, ("coordinator",), f"{victim}'s connections ended", _BAD)
            case ev.ViewInstalled():
                words = f"view {event.n}: {', '.join(name.partition('.')[0] for name in event.members)}"
                yield Arrow(event.at_s, "coordinator", event.members, words)
            case ev.ViewFormed():
                yield Arrow(event.at_s, "coordinator", (), f"view {event.n} has formed, for step {event.step}", _GOOD)
            case ev.Recovery() if event.replica == victim:
                words = f"step {event.step} is committed; {event.microbatches_recomputed} microbatches computed again"
                yield Arrow(event.at_s, "coordinator", (), words, _GOOD)
            case ev.ReplicaStarted():
                yield Arrow(event.at_s, event.agent, (event.replica,), "starts")
            case ev.JoinerServed():
                for donor in event.donors:
                    words = f"the state of step {event.step}, a part from each" if donor == event.donors[0] else ""
                    yield Arrow(event.at_s, donor, (event.replica,), words)
            case ev.JoinerCaughtUp():
                yield Arrow(event.at_s, event.replica, (), f"has caught up with step {event.step}", _GOOD)
                if event.replica.partition(".")[0] == slot:
                    return


def picture(told: Sequence[Arrow], origin_s: float, title: str) -> str:
    """The SVG."""
    people = list(dict.fromkeys(name for arrow in told for name in (arrow.of, *arrow.to)))
    people.sort(key=lambda name: (name != "coordinator", not name.startswith("a"), name))
    x = {name: _LEFT + _COLUMN * place + _COLUMN // 2 for place, name in enumerate(people)}
    width, height = _LEFT + _COLUMN * len(people) + 120, _TOP + _ROW * (len(told) + 1)
    drawn = [f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>']
    for name in people:
        drawn.append(f'<line x1="{x[name]}" x2="{x[name]}" y1="44" y2="{height - 12}" stroke="{_LINE}"/>')
        drawn.append(_text(x[name], 32, name, _INK, "middle", bold=True))
    shown_s = None
    for row, arrow in enumerate(told):
        y = _TOP + _ROW * row + 14
        if arrow.at_s != shown_s:
            shown_s = arrow.at_s
            drawn.append(_text(8, y + 4, f"+{arrow.at_s - origin_s:.3f} s", _SOFT))
        drawn += _drawn(arrow, x, y, width)
    inner = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">\n'
        f'<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{_INK}"/></marker></defs>\n{inner}\n</svg>\n'
    )


def _drawn(arrow: Arrow, x: dict[str, int], y: int, width: int) -> Iterator[str]:
    start = x[arrow.of]
    yield f'<circle cx="{start}" cy="{y}" r="5" fill="{arrow.colour}"/>'
    for name in arrow.to:
        end = x[name] + (8 if x[name] < start else -8)
        yield f'<line x1="{start}" x2="{end}" y1="{y}" y2="{y}" stroke="{_INK}" marker-end="url(#tip)"/>'
    right = min([start, *(x[name] for name in arrow.to)])
    last = right > width - 3 * _COLUMN
    yield _text(right + (-10 if last else 10), y - 7, arrow.words, arrow.colour, "end" if last else "start")


def _text(x: int, y: int, words: str, colour: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def main(run: str, victim: str, target: str) -> None:
    """Draw the fault of `victim` in `run` into `target`."""
    with Journal.open_reader(Path(run)) as journal:
        events = [entry.event for entry in journal.events()]
    told = list(arrows(events, victim))
    Path(target).write_text(picture(told, events[0].at_s, f"What followed the death of {victim}"), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
