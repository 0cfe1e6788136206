"""A run's history as far as it was folded, kept in a file beside the journal so that nobody folds it twice.

Role: accounts and curves need every `ProgressMade` of a run, a million in a long one; whoever has folded many of them
writes the folds down (`history.kept`), and the next reader goes on from there. Invariants: the journal alone is the
truth; a file that is cut short, damaged, of other code, or of another journal is passed over, and never an error; it
is published by one rename, and where the directory cannot be written there is none. Not for what changes a run.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.core import events as ev
from outlast.errors import OutlastError
from outlast.journal import Journal, code_digest, ends_digest, sealed, unsealed
from outlast.observe import _accounting, _cycles, _history, story_events
from outlast.observe._history import History

__all__ = ["KEPT_NAME", "keep", "kept_history", "read_history"]

KEPT_NAME = "history.kept"
_MAGIC = b"outlast history 1\n"
_WORTH_KEEPING = 2000
_WORTH_TELLING = 50_000
_PIECE = 2000
_MAX_BYTES = 64 * 2**20


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds. `code`: of the modules that folded; `last`: a digest of the entry numbered `seq`."""

    code: bytes
    seq: int
    last: bytes
    accounts: msgspec.Raw
    losses: msgspec.Raw
    times: msgspec.Raw
    story: msgspec.Raw
    steps_committed: int


def read_history(run_dir: Path, journal: Journal, *, say: Callable[[str], None] | None = None) -> History:
    """The history of a run up to its newest entry, from what was kept and the rest of the journal. Keeps what was new
    if it was much. `say` is told what takes long. Raises EnvironmentFault for a journal that cannot be read."""
    history = kept_history(run_dir, journal) or History()
    before = history.seq
    left = journal.last_seq - before
    if say is not None and left > _WORTH_TELLING:
        say(f"reading {left:,} entries of the journal; the next time that takes no time")
    while entries := journal.events(history.seq, limit=_PIECE):
        for entry in entries:
            history.take(entry.event, entry.seq)
    if history.seq - before > _WORTH_KEEPING:
        keep(run_dir, journal, history)
    return history


def kept_history(run_dir: Path, journal: Journal) -> History | None:
    """What was kept of this journal by this code; None where there is nothing that can be relied on."""
    try:
        with (run_dir / KEPT_NAME).open("rb") as file:
            data = file.read(_MAX_BYTES)
        body = unsealed(_MAGIC, data)
        if body is None:
            return None
        kept = msgspec.msgpack.decode(body, type=_Kept)
        if kept.code != _code() or kept.last != ends_digest(journal, kept.seq):
            return None
        history = History()
        history.accounts.load(kept.accounts)
        history.losses.load(kept.losses)
        history.times.load(kept.times)
        history.story.load(kept.story)
    except (OSError, OutlastError, msgspec.MsgspecError):
        return None
    history.seq, history.steps_committed = kept.seq, kept.steps_committed
    return history


def keep(run_dir: Path, journal: Journal, history: History) -> bool:
    """Write down what was folded; whether that could be done. Waits for no disk: the file can be made again."""
    code, last = _code(), ends_digest(journal, history.seq)
    if code is None or last is None:
        return False
    kept = _Kept(
        code=code,
        seq=history.seq,
        last=last,
        accounts=msgspec.Raw(history.accounts.dump()),
        losses=msgspec.Raw(history.losses.dump()),
        times=msgspec.Raw(history.times.dump()),
        story=msgspec.Raw(history.story.dump()),
        steps_committed=history.steps_committed,
    )
    body = msgspec.msgpack.encode(kept)
    scratch = run_dir / f"{KEPT_NAME}.{os.getpid()}"
    try:
        scratch.write_bytes(sealed(_MAGIC, body))
        scratch.replace(run_dir / KEPT_NAME)
    except OSError:  # a full or read-only disk, another user's run: it is read again from the journal
        with contextlib.suppress(OSError):
            scratch.unlink()
        return False
    return True


@functools.cache
def _code() -> bytes | None:
    """Folds that other code made may count otherwise."""
    return code_digest([_accounting, _cycles, _history, story_events, ev])
