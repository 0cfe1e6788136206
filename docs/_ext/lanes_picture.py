"""Draw the lanes of a run with several ranks a replica, from its journal: `lanes_picture.py RUN r1.1 lanes.svg`.

Three panels: the view in which the replica died, the one without it while its successor is fed, the one that took that
in. A column is a replica, a row is a rank, and a line is a lane: the ranks of equal place, which exchange and feed
among themselves. Views, donors and times are the journal's; who has which rank is the run's own setting.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from outlast.core import events as ev
from outlast.journal import Journal

_PANEL, _COLUMN, _ROW, _TOP, _BOX = 340, 78, 64, 92, 40
_INK, _SOFT, _BAD, _GOOD = "#17202b", "#55606e", "#c62f2f", "#16845b"
_LANES = ("#2f7fc9", "#b07b00", "#8d4bab", "#16845b")


class Panel(NamedTuple):
    """A view and what to say of it; `dead` has left it, `fed` receives its lanes' parts from `donors`."""

    title: str
    said: str
    members: list[str]
    dead: str = ""
    fed: str = ""
    donors: Sequence[str] = ()


def panels(events: Sequence[ev.AnyEvent], victim: str) -> list[Panel]:
    """The three moments of the death of `victim`."""
    slot = victim.partition(".")[0]
    died = next(e for e in events if isinstance(e, ev.ReplicaExited) and e.replica == victim)
    views = [e for e in events if isinstance(e, ev.ViewInstalled)]
    before = [view for view in views if view.at_s < died.at_s][-1]
    without = next(view for view in views if view.at_s >= died.at_s)
    later = [e for e in events if e.at_s > died.at_s]
    served = next(e for e in later if isinstance(e, ev.JoinerServed) and e.replica.startswith(f"{slot}."))
    caught = next(e for e in later if isinstance(e, ev.JoinerCaughtUp) and e.replica == served.replica)
    whole = next(view for view in views if served.replica in view.members)

    def at(event: ev.AnyEvent) -> str:
        return f"{event.at_s - died.at_s:.2f} s later"

    return [
        Panel(f"{victim}: {died.detail} in step {died.step}", "a rank takes its replica with it",
              before.members, dead=victim),
        Panel(f"{at(served)}: fed with step {served.step}", f"{at(caught)} it has caught up with step {caught.step}",
              without.members, fed=served.replica, donors=served.donors),
        Panel(f"{at(whole)}: view {whole.n}", "whole again, lane by lane", whole.members),
    ]  # fmt: skip


def picture(events: Sequence[ev.AnyEvent], victim: str) -> str:
    """The SVG."""
    started = next(e for e in events if isinstance(e, ev.RunStarted))
    ranks = int(str(started.config.get("ranks", 1)))
    height, width = _TOP + _ROW * ranks + 24, 3 * _PANEL
    drawn = [f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>']
    for number, panel in enumerate(panels(events, victim)):
        drawn += _panel(panel, number * _PANEL, ranks)
    inner = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Replicas of {ranks} ranks: a lane is the ranks of equal place, which exchange and '
        f'feed among themselves" font-family="system-ui, sans-serif" font-size="13">\n{inner}\n</svg>\n'
    )


def _panel(panel: Panel, left: int, ranks: int) -> Iterator[str]:
    shown = sorted({*panel.members, *([panel.fed] if panel.fed else [])})
    x = {name: left + 96 + _COLUMN * place for place, name in enumerate(shown)}
    yield _text(left + 16, 24, panel.title, _INK, bold=True)
    yield _text(left + 16, 42, panel.said, _SOFT)
    for name in shown:
        colour = _BAD if name == panel.dead else _GOOD if name == panel.fed else _INK
        yield _text(x[name], 74, name, colour, "middle", bold=True)
    for rank in range(ranks):
        y = _TOP + _ROW * rank + _BOX // 2
        colour = _LANES[rank % len(_LANES)]
        yield _text(left + 16, y + 4, f"lane {rank}", colour)
        exchanging = [name for name in shown if name in panel.members and name != panel.dead]
        for one, other in itertools.pairwise(exchanging):
            aside = 0 if shown.index(other) - shown.index(one) == 1 else 52  # past a replica that is not in it
            yield (
                f'<path d="M{x[one]},{y} Q{(x[one] + x[other]) // 2},{y - aside} {x[other]},{y}" fill="none" '
                f'stroke="{colour}" stroke-width="3"/>'
            )
        for donor in panel.donors:
            yield (
                f'<path d="M{x[donor]},{y + 12} Q{(x[donor] + x[panel.fed]) // 2},{y + 30} {x[panel.fed]},{y + 14}" '
                f'fill="none" stroke="{_GOOD}" stroke-width="2" stroke-dasharray="4 3"/>'
            )
        for name in shown:
            edge = _BAD if name == panel.dead else _GOOD if name == panel.fed else colour
            dashes = ' stroke-dasharray="4 3"' if edge in (_BAD, _GOOD) else ""
            yield (
                f'<rect x="{x[name] - 22}" y="{y - 14}" width="44" height="28" rx="5" fill="#fff" stroke="{edge}" '
                f'stroke-width="2"{dashes}/>'
            )
            yield _text(x[name], y + 4, f"rank {rank}", edge if dashes else _INK, "middle", small=True)


def _text(
    x: float, y: float, words: str, colour: str, anchor: str = "start", *, bold: bool = False, small: bool = False
) -> str:
    more = (' font-weight="600"' if bold else "") + (' font-size="11"' if small else "")
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def main(run: str, victim: str, target: str) -> None:
    """Draw the lanes around the death of `victim` in `run` into `target`."""
    with Journal.open_reader(Path(run)) as journal:
        events = [entry.event for entry in journal.events()]
    Path(target).write_text(picture(events, victim), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
