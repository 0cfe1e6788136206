"""What a coordinator takes over from the whole journal, and a summary of it, so that it reads the newest entries alone.

Role: `JournalFold` is all that is believed and known of every entry so far: the record by which saves are timed, which
saves are known, how far progress is told. `RecordSummary` writes it down beside the journal now and then, with the
place up to which it counts. Invariants: it is made of entries that were read, never of what was only said, so that it
and the rest give what the whole journal gives, to the last bit; what cannot be relied on (of other code or settings,
of another journal or one that has lost its end, torn) is passed over, and everything is read. It decides nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import msgspec

from outlast.checkpoint.threads import Threads
from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.policy import Band, Belief, Losses, RunRecord
from outlast.errors import OutlastError
from outlast.journal import Journal, code_digest, ends_digest, sealed, unsealed
from outlast.runtime.coordinator._bookkeeping import ToldProgress

__all__ = ["SUMMARY", "JournalFold", "KnownSaves", "RecordSummary"]

SUMMARY = "journal_summary"
_EVERY = 2000  # entries: what is read besides a summary, and how seldom one is written
_MAGIC = b"outlast summary 1\n"
_KNOWN = 256  # saves; a member has at most a few in flight, and says nothing anew of one that was settled

Save = tuple[tuple[int, int], int]
"""((epoch, n) of the view, step)"""


class KnownSaves:
    """The newest saves that were written down, so that none is told twice, and the one of the latest step of all."""

    def __init__(self) -> None:
        self._newest: dict[Save, None] = {}
        self._furthest: Save | None = None

    def add(self, save: Save) -> None:
        """Know it from now on. The oldest one is forgotten where there are too many."""
        if save in self:
            return
        self._newest[save] = None
        if self._furthest is None or save[1] > self._furthest[1]:
            self._furthest = save
        if len(self._newest) > _KNOWN:
            del self._newest[next(iter(self._newest))]

    def __contains__(self, save: Save) -> bool:
        return save in self._newest or save == self._furthest

    def __iter__(self) -> Iterator[Save]:
        """The furthest one, where it is no longer among the newest, and these, oldest first."""
        if self._furthest is not None and self._furthest not in self._newest:
            yield self._furthest
        yield from self._newest

    def load(self, saves: list[Save]) -> None:
        """Know those that iterating over another one gave, in their order."""
        self._newest = dict.fromkeys(saves[-_KNOWN:])
        self._furthest = max(saves, key=lambda save: save[1], default=None)


class _Folded(msgspec.Struct, frozen=True, kw_only=True):
    record: msgspec.Raw
    begun: list[Save]
    published: list[Save]
    failed: list[Save]
    progress: ToldProgress


class JournalFold:
    """Takes the entries of a journal one by one. `config`: of the run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.record = RunRecord(min_s=config.checkpoint_min_s, num_replicas=config.replicas)
        self.begun, self.published, self.failed = KnownSaves(), KnownSaves(), KnownSaves()
        self.progress = ToldProgress()

    def take(self, event: ev.AnyEvent) -> None:
        """Take the next one."""
        self.record.take(event)
        if isinstance(event, ev.ProgressMade | ev.Stall | ev.Recovery):
            self.progress = self.progress.after(event)
        elif isinstance(event, ev.CheckpointBegan | ev.CheckpointSaved):
            known = self.begun if isinstance(event, ev.CheckpointBegan) else self.published
            known.add(((event.view[0], event.view[1]), event.step))
        elif isinstance(event, ev.CheckpointFailed):  # the newest one of that step, which says no view
            for save in [save for save in self.begun if save[1] == event.step][-1:]:
                self.failed.add(save)

    def dump(self) -> bytes:
        """Return all that was folded, for `load`: some ten kilobytes at most, however long the run is."""
        folded = _Folded(
            record=msgspec.Raw(self.record.dump()),
            begun=list(self.begun),
            published=list(self.published),
            failed=list(self.failed),
            progress=self.progress,
        )
        return msgspec.msgpack.encode(folded)

    def load(self, data: bytes | msgspec.Raw) -> None:
        """Go on from what one of the same settings has dumped. Raises msgspec.MsgspecError."""
        folded = msgspec.msgpack.decode(data, type=_Folded)
        self.record.load(folded.record)
        self.begun.load(folded.begun)
        self.published.load(folded.published)
        self.failed.load(folded.failed)
        self.progress = folded.progress

    def copy(self) -> JournalFold:
        """Return another one that has taken the same."""
        other = JournalFold(self._config)
        other.load(self.dump())
        return other


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """`code`: of what folds; `settings`: those that a fold begins with; `ends`: a digest of the journal's first entry
    and of the one numbered `seq`, up to which the fold counts."""

    code: bytes
    settings: tuple[float, int]
    seq: int
    ends: bytes
    fold: msgspec.Raw


class RecordSummary:
    """Follows the journal, from the summary that stands beside it if there is one. `epoch`: with which it is written,
    and no longer once a higher one is claimed; `config`: of the run; `alive`: called now and then while much is read.
    Raises EnvironmentFault for a journal that cannot be read."""

    def __init__(
        self, journal: Journal, epoch: int, config: RunConfig, alive: Callable[[], None] = lambda: None
    ) -> None:
        self._journal, self._epoch, self._config, self._alive = journal, epoch, config, alive
        self._fold, self._seq = JournalFold(config), 0
        self._load()
        self._kept = self._seq
        self._heard, self._closing = 0, False
        self._threads: Threads | None = None
        self._take_new()

    def taken(self) -> JournalFold:
        """Return a fold of all that the journal holds, for its caller alone, who goes on with what it hears."""
        self._heard = self._seq - self._kept
        return self._fold.copy()

    # --- while entries are written -------------------------------------------------------------------------------
    def heard(self) -> None:
        """One entry was appended: now and then, have a thread read what is new and write the summary. On the loop."""
        self._heard += 1
        if self._heard < _EVERY or self._closing:
            return
        self._heard = 0
        self._threads = self._threads or Threads(1, "outlast-summary", limit_s=0.0)
        loop = asyncio.get_running_loop()

        def done(work: concurrent.futures.Future[None]) -> None:
            if (error := work.exception()) is not None:
                loop.call_soon_threadsafe(_raise, error)

        with contextlib.suppress(RuntimeError, MemoryError):  # no thread is to be had just now
            self._threads.submit(self.follow).add_done_callback(done)

    def follow(self) -> None:
        """Take what is new in the journal; write the summary down where that was much. A disk that refuses is tried
        again later: without it, more is read."""
        try:
            self._take_new()
            if self._seq - self._kept >= _EVERY and not self._closing:
                self._keep()
        except OutlastError:
            return

    def close(self) -> None:
        """Begin nothing more. What a thread is at is not waited for."""
        self._closing = True
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _take_new(self) -> None:
        for number, entry in enumerate(self._journal.each(self._seq)):
            if number % _EVERY == 0:
                self._alive()
            if self._closing:
                return
            self._fold.take(entry.event)
            self._seq = entry.seq

    # --- what stands beside the journal --------------------------------------------------------------------------
    def _keep(self) -> None:
        """Write it down, where nobody else may have begun to coordinate here."""
        code, ends = _code(), ends_digest(self._journal, self._seq)
        if code is None or ends is None or not self._journal.held:
            return
        fold = msgspec.Raw(self._fold.dump())
        stored = _Stored(code=code, settings=self._settings, seq=self._seq, ends=ends, fold=fold)
        if self._journal.put_here(self._epoch, SUMMARY, sealed(_MAGIC, msgspec.msgpack.encode(stored))):
            self._kept = self._seq

    def _load(self) -> None:
        body = unsealed(_MAGIC, self._journal.get_here(SUMMARY) or b"")
        if body is None:
            return
        try:
            stored = msgspec.msgpack.decode(body, type=_Stored)
            if (stored.code, stored.settings) != (_code(), self._settings):
                return
            if stored.ends != ends_digest(self._journal, stored.seq):
                return
            fold = JournalFold(self._config)
            fold.load(stored.fold)
        except msgspec.MsgspecError:
            return
        self._fold, self._seq = fold, stored.seq

    @property
    def _settings(self) -> tuple[float, int]:
        return float(self._config.checkpoint_min_s), self._config.replicas


@functools.cache
def _code() -> bytes | None:
    """A digest of what folds: other code may make something else of the same entries."""
    kinds = (RunRecord, Belief, Losses, Band, ToldProgress, JournalFold)
    return code_digest([*(sys.modules[kind.__module__] for kind in kinds), ev])


def _raise(error: BaseException) -> None:
    """On the loop: the thread has come upon a mistake in the code, as the loop itself would have."""
    raise error
