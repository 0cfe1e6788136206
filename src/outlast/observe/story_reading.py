"""What `outlast why` reads of a journal: all that a story tells, and of what comes with every step a part.

Role: the events of a story, from the journal alone or from the history that was kept beside it. Only reads.
"""

from __future__ import annotations

import heapq
import typing
from operator import itemgetter

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe._history import History
from outlast.observe.journal_streams import Ordered, entries_of, in_order, newest_of
from outlast.observe.run_status import NUM_NEWEST
from outlast.observe.step_anatomy import NUM_WORDS

__all__ = ["read_story"]

_KINDS: tuple[type[ev.AnyEvent], ...] = tuple(
    kind for kind in typing.get_args(ev.AnyEvent) if kind not in {ev.ProgressMade, ev.StepAnatomy}
)
_NUM_SAMPLES, _ALL_OF = 2000, 20_000  # what is sampled of a journal longer than that


def read_story(journal: Journal, history: History | None = None) -> list[ev.AnyEvent]:
    """All events in order, but of the progress of a long run only so many, evenly spread, and the newest: what `why`
    needs beside the history, and enough to learn a pace and a band of losses from. With `history`, which was read to
    the end, what that kept of them: no starts of members, in a time that grows with what befell the run only."""
    last = journal.last_seq
    words = newest_of(journal, ev.StepAnatomy, NUM_WORDS, last)
    newest = newest_of(journal, ev.ProgressMade, NUM_NEWEST, last)
    if history is not None:
        told = [*history.story.entries(), *((entry.seq, entry.event) for stream in (newest, words) for entry in stream)]
        return list(dict(sorted(told, key=itemgetter(0))).values())
    short = last <= _ALL_OF
    found = journal.events(kinds=[ev.ProgressMade]) if short else journal.sample(ev.ProgressMade, _NUM_SAMPLES)
    progress = (Ordered(entry) for entry in found if entry.seq <= last)
    whole = (entries_of(journal, kind, last) for kind in _KINDS)
    return in_order(heapq.merge(*whole, progress, newest, words))
