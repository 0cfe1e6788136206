"""A journal's entries kind by kind, along its index, to be merged into one order.

Role: what the readings of a state, of a story and of a page share. Only reads. Views of long ago come without the names
of their members, which take most of the time of a fleet of thousands and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.core import events as ev
from outlast.journal import Entry, Journal
from outlast.observe.story_events import counted_view

__all__ = ["NUM_NAMED_VIEWS", "Ordered", "entries_of", "in_order", "named_views", "newest_of"]

NUM_NAMED_VIEWS = (4, 64)
"""The newest views are read with names: so many views, fewer where they have more than 80,000 names in all."""
_NAMES = 80_000
_PIECE, _PIECE_OF_VIEWS = 2000, 16  # entries held at once; a view names all its members


def in_order(entries: Iterable[Ordered]) -> list[ev.AnyEvent]:
    """The events of entries in order; what several streams had counts once."""
    last, events = 0, []
    for entry in entries:
        if entry.seq != last:
            last = entry.seq
            events.append(entry.event)
    return events


class Ordered:
    """An entry that is compared by its place, and never by its event."""

    __slots__ = ("event", "seq")

    def __init__(self, entry: Entry) -> None:
        self.seq, self.event = entry

    def __lt__(self, other: Ordered) -> bool:
        return self.seq < other.seq


def entries_of(journal: Journal, kind: type[ev.AnyEvent], last: int) -> Iterator[Ordered]:
    """All entries of a kind up to the entry `last`, oldest first."""
    if kind is ev.ViewInstalled:
        yield from _views(journal, last)
        return
    since = 0
    while entries := journal.events(since, [kind], limit=_PIECE):
        since = entries[-1].seq
        yield from (Ordered(entry) for entry in entries if entry.seq <= last)
        if since > last:
            return


def named_views(journal: Journal) -> list[Entry]:
    """The newest views, as many as have not too many members in all: each changes by one or two of them."""
    newest = journal.newest(ev.ViewInstalled)
    size = max((len(entry.event.members) for entry in newest if isinstance(entry.event, ev.ViewInstalled)), default=1)
    least, most = NUM_NAMED_VIEWS
    return journal.newest(ev.ViewInstalled, min(most, max(least, _NAMES // max(1, size))))


def newest_of(journal: Journal, kind: type[ev.AnyEvent], count: int, last: int) -> Iterator[Ordered]:
    """The newest `count` entries of a kind up to the entry `last`, oldest first."""
    yield from (Ordered(entry) for entry in journal.newest(kind, count) if entry.seq <= last)


def _views(journal: Journal, last: int) -> Iterator[Ordered]:
    """All views; those before the newest few with the number of their members, and without their names."""
    named = named_views(journal)
    since, until = 0, min([last + 1, *(entry.seq for entry in named)])
    while bodies := journal.bodies(ev.ViewInstalled, since, until, limit=_PIECE_OF_VIEWS):
        since = bodies[-1][0]
        yield from (Ordered(Entry(seq, counted_view(body))) for seq, body in bodies)
    yield from (Ordered(entry) for entry in named if entry.seq <= last)
