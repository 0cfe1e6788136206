"""How coordinators ended, and with the last of them the run, where nobody else is left to write it down.

Role: a coordinator's end is told by its successor. One that dies while it starts has written nothing, so the next is
given all that is not in the journal yet. When no other is started the launcher, which outlives them all, writes the
rest and the run's end itself. It decides nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.core.protocol import messages as m
from outlast.errors import EnvironmentFault, OutlastError
from outlast.journal import Journal
from outlast.runtime.transport.save_messages import COORDINATOR_RECORD, SAVE_EPOCHS

__all__ = ["CoordinatorEnds", "ended_code", "keeps_checkpoints"]

_LOG_BYTES = 2000


def ended_code(run_dir: Path, code: int | None = None) -> int | None:
    """The run's exit code if the coordinator left because the run was over, None if it died. On a full disk the
    last event may have found no room; the record, which keeps some, says so of a coordinator that ended by `code`.

    None, too, where neither can be read just now, as for want of a descriptor: a successor reads it, and ends the run
    again if it was over.
    """
    try:
        with Journal.open_reader(run_dir) as journal:
            finished, record = _finished(journal), _record(journal)
    except EnvironmentFault:
        return None
    if finished is not None:
        return finished.exit_code
    return code if record.outcome and code == record.exit_code else None


def keeps_checkpoints(run_dir: Path) -> bool:
    """Whether the coordinator has a place to save to, wherever that was said; True where it cannot be read just now."""
    try:
        with Journal.open_reader(run_dir) as journal:
            return journal.get(SAVE_EPOCHS) is not None
    except EnvironmentFault:
        return True


class CoordinatorEnds:
    """Remembers in the launcher how coordinators of its run ended, until one that lives has told it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._all: list[dict[str, Any]] = []

    def died(self, why: str, silent_s: float) -> None:
        self._all.append({
            "cause": "coordinator", "replica": "coordinator", "noticed_by": "launcher", "lost_steps": 0, "step": 0,
            "detect_s": silent_s, "downtime_s": 0.0, "microbatches_recomputed": 0,
            "detail": f"{why}; training went on without it",
        })  # fmt: skip

    def untold(self, shared: bool = False) -> str | None:
        """For the next coordinator: what no event tells of yet, in order, as JSON; None if there is nothing. `shared`:
        events of other hosts' launchers are among those here, so only the newest end is passed on."""
        rest = self._all[-1:] if shared or not self._all else self._untold()
        return json.dumps(rest) if rest else None

    def write_end(self, lock_fd: int, at_s: float, code: int, stopped: str) -> None:
        """The run's end, if no coordinator has written it. `lock_fd`: the run's lock; `stopped`: by what it was asked
        to stop; "": it was given up. One that was decided and not written, for want of room or of time, is written as
        it was decided."""
        with contextlib.suppress(OutlastError):
            with Journal.open_reader(self._run_dir) as journal:
                written, record = _finished(journal), _record(journal)
            if written is not None:
                return
            if record.outcome:
                outcome, detail, code = record.outcome, record.detail, record.exit_code
            elif stopped:
                outcome, detail = "stopped", f"{stopped}; its coordinator had ended before it could end the run"
            else:
                outcome, detail = "failed", self._why()
            self._write_end(os.dup(lock_fd), at_s, code, outcome, detail)

    def _write_end(self, lock_fd: int, at_s: float, code: int, outcome: Any, detail: str) -> None:
        from outlast.observe import StatusFold, accounting

        with Journal.open_writer(self._run_dir, lock_fd=lock_fd) as journal:
            fold = StatusFold()
            rows = self._untold()[:-1]  # the last one had no successor
            rest = [ev.Recovery(at_s=at_s, view=[journal.epoch, 0], **row) for row in rows]
            for entry in journal.each():
                fold.take(entry.event)
            end = ev.RunFinished(
                at_s=at_s,
                outcome=outcome,
                steps=fold.status().step or 0,  # that the last coordinator had heard of
                detail=detail,
                exit_code=code,
                seconds={},
            )
            told = (entry.event for entry in journal.each())
            seconds = accounting(itertools.chain(told, rest, [end])).seconds()
            journal.append_many([*rest, msgspec.structs.replace(end, seconds=seconds)])

    def _untold(self) -> list[dict[str, Any]]:
        told = 0
        with contextlib.suppress(OutlastError), Journal.open_reader(self._run_dir) as journal:
            known = [entry.event for entry in journal.events(kinds=[ev.Recovery])]
            told = sum(isinstance(event, ev.Recovery) and event.cause == "coordinator" for event in known)
        return self._all[told:]

    def _why(self) -> str:
        last = self._all[-1]["detail"].partition(";")[0] if self._all else "the last one ended"
        try:
            tail = (self._run_dir / "logs" / "coordinator.log").read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        except OSError:
            tail = ""
        text = f"its coordinator could not be kept alive: {len(self._all)} ended, the last because {last}"
        return text + (f"; the end of its log:\n{tail}".rstrip() if tail.strip() else "")


def _finished(journal: Journal) -> ev.RunFinished | None:
    found = [entry.event for entry in journal.newest(ev.RunFinished)]
    return found[0] if found and isinstance(found[0], ev.RunFinished) else None


def _record(journal: Journal) -> m.FleetRecord:
    stored = journal.get(COORDINATOR_RECORD)
    return msgspec.msgpack.decode(stored, type=m.FleetRecord) if stored else m.FleetRecord()
