"""The training script's output for whoever watches `outlast run`: the log of the view's first member, line by line.

The first member is the one whose `run.is_writer` is true. It reads journal and logs, and disturbs nothing; which lines
were shown is remembered, so that a traceback is not told twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from outlast.core import events as ev
from outlast.errors import OutlastError
from outlast.journal import Journal, holds_run

__all__ = ["Follower"]

_REMEMBERED = 400


class Follower:
    """`poll()` writes what is new, `close()` what is left. A change of the first member goes on where it stands."""

    def __init__(self, run_dir: Path, write: Callable[[str], None]) -> None:
        self._run_dir, self._write = run_dir, write
        self.shown: deque[str] = deque(maxlen=_REMEMBERED)
        self._journal: Journal | None = None
        self._seq = 0
        self._member = ""
        self._of_view = False
        self._planned: ev.ViewInstalled | None = None
        self._offset = 0
        self._rest = b""

    def poll(self) -> None:
        """Show the new whole lines."""
        for event in self._events():
            self._take(event)
        self._read()

    def close(self) -> None:
        """Show the rest, whole line or not."""
        self.poll()
        self._show(self._rest)
        self._rest = b""
        if self._journal is not None:
            self._journal.close()

    def _events(self) -> list[ev.AnyEvent]:
        try:
            if self._journal is None:
                if not holds_run(self._run_dir):
                    return []
                self._journal = Journal.open_reader(self._run_dir)
            kinds: list[type[ev.AnyEvent]] = [ev.ReplicaStarted, ev.ViewInstalled, ev.ViewFormed, ev.TrainingEnded]
            entries = self._journal.events(self._seq, kinds)
        except OutlastError:
            return []  # being made just now, or unreadable: the live view tells that
        self._seq = entries[-1].seq if entries else self._seq
        return [entry.event for entry in entries]

    def _take(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.ReplicaStarted() if not self._of_view and event.replica.startswith("r0."):
                self._turn_to(event.replica)
            case ev.ViewInstalled() if event.planned:
                self._planned = event
            case ev.ViewInstalled():
                self._turn_to(event.members[0], in_view=True)
            case ev.ViewFormed() if self._planned and (self._planned.epoch, self._planned.n) == (event.epoch, event.n):
                self._turn_to(self._planned.members[0], in_view=True)
            case ev.TrainingEnded():
                self._turn_to(event.writer, in_view=True)

    def _turn_to(self, member: str, in_view: bool = False) -> None:
        if member != self._member:
            self._read()
            self._show(self._rest)
            self._member, self._rest = member, b""
            path = self._log
            self._offset = path.stat().st_size if self._of_view and path.exists() else 0
        self._of_view = self._of_view or in_view

    @property
    def _log(self) -> Path:
        return self._run_dir / "logs" / f"{self._member}.log"

    def _read(self) -> None:
        if not self._member:
            return
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show(line, empty=True)

    def _show(self, line: bytes, empty: bool = False) -> None:
        if line or empty:
            text = line.decode("utf-8", "replace")
            self.shown.append(text)
            self._write(text)
