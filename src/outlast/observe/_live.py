"""The live view of a running run: follows its journal.

Role: on a terminal a progress bar, the replicas' states and the loss, with what happened scrolling above; elsewhere
plain lines. Before the first step it says how far the beginning is; a run that is long under way is shown from its
newest entries on. Invariants: it only reads; a journal that cannot be
read is told once and never disturbs the run. Rich is loaded when a terminal is drawn to, not before. Events carry their
times; the wall's clock only says how old they are.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from outlast.core import events as ev
from outlast.errors import ConfigError, OutlastError
from outlast.journal import Journal, holds_run, run_now_s
from outlast.observe._curve import sparkline
from outlast.observe._history import History
from outlast.observe._kept_history import keep
from outlast.observe.rounding import counted, format_number, format_s
from outlast.observe.run_status import StatusFold
from outlast.observe.state_reading import StateReading, newest_told
from outlast.observe.status_records import OVER, Status
from outlast.observe.timeline_rows import Row, timeline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live as RichLive

__all__ = ["Live"]

POLL_S = 0.2
_LINE_EVERY_S = 10.0
_NUM_LOSSES = 4096
_NUM_ROWS = 16
_PIECE = 5000  # entries held at once
_KEEP_EVERY = 5000  # entries, an hour or so of a run
_LONG = 20_000  # entries: a journal that has more when it is opened is not read from its beginning
_NUM_TOLD, _NUM_PROGRESS = 40, 1000  # of such a journal: entries that a timeline may tell, and those with losses
_BAR_COLUMNS = 40
_BEFORE = "; first torch is imported, and hosts come in"


class Live:
    """Shows the run in `run_dir` on `stream` (standard error by default) until `run_until`'s event is set.

    `total_steps` makes the bar, else what the loop says; `line_every_s`: how often a plain progress line is written, in
    the journal's time; `strict`: a journal that cannot be read is an error, and not only the end of the view. Used by
    one thread at a time. The directory may still be empty when it starts.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int | None = None,
        *,
        stream: TextIO | None = None,
        line_every_s: float = _LINE_EVERY_S,
        clock: Callable[[], float] | None = None,
        strict: bool = False,
    ) -> None:
        self._run_dir, self._total, self._stream = run_dir, total_steps, stream or sys.stderr
        self._line_every_s, self._next_line_s = line_every_s, 0.0
        self._fold, self._seq, self._start_s = StatusFold(), 0, 0.0
        self._losses: deque[float] = deque(maxlen=_NUM_LOSSES)
        self._journal: Journal | None = None
        self._screen: RichLive | None = None
        self._broken, self._strict = False, strict
        self._clock, self._shown = clock or (lambda: run_now_s(run_dir)), ""  # the state that was shown last
        self._begun = ""  # how far the beginning was, when it was last told
        self._history: History | None = History()  # None: it would not be whole
        self._kept_seq = 0

    def run_until(self, done: threading.Event, *, poll_s: float = POLL_S) -> None:
        """Show until `done` is set, then what is left, then close."""
        try:
            while not done.is_set():
                self.poll()
                done.wait(poll_s)
            self.poll()
        finally:
            self.close()

    def poll(self, *, held: bool | None = True) -> Status:
        """Show what has happened since the last call; returns the state now. `held`: whether a process holds the run,
        as for `StatusFold.status`, with which this says the same of the same moment."""
        told: list[ev.AnyEvent] = []
        fresh = False
        while self._read(told):
            fresh = True
        self._keep()
        state = self._fold.status(held=held, now_s=self._clock() if held else None)
        rows = timeline(told, start_s=self._start_s)
        # On a terminal what is known of a silence is drawn anew as it grows: a figure that stands still is not of now.
        news = fresh or (state.state == "stalled" and (self._shown != "stalled" or self._is_terminal()))
        if not self._broken and (news or self._says_beginning(state)):
            self._shown = state.state
            if self._is_terminal():
                self._draw(state, rows)
            else:
                self._write_lines(state, rows)
        return state

    def say(self, line: str) -> None:
        """A line of the training script: above the picture on a terminal, else plainly on standard output."""
        if self._screen is not None and sys.stdout.isatty():
            from rich.text import Text

            self._screen.console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was, the last picture in place."""
        if self._screen is not None:
            self._screen.stop()
            self._screen = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _read(self, told: list[ev.AnyEvent]) -> bool:
        """Take the next entries; whether there were any. Those that a timeline may tell are added to `told`."""
        if self._broken:
            return False
        try:
            if self._journal is None:
                if not holds_run(self._run_dir):
                    return False
                self._journal = Journal.open_reader(self._run_dir)
                if self._journal.last_seq > _LONG:
                    told += self._begin_late(self._journal)
                    return True
            entries = self._journal.events(self._seq, limit=_PIECE)
        except ConfigError:
            return False  # removed between the look and the opening
        except OutlastError as error:
            if self._strict:
                raise
            self._broken = True
            print(f"outlast: the live view ends here, the run goes on\n{error}", file=self._stream, flush=True)
            return False
        if entries:
            self._seq, self._start_s = entries[-1].seq, self._start_s or entries[0].event.at_s
        for entry in entries:
            if self._history is not None:
                self._history.take(entry.event, entry.seq)
            self._fold.take(entry.event)
            if isinstance(entry.event, ev.ProgressMade):
                self._losses.extend(loss for _, loss in entry.event.losses)
            elif not isinstance(entry.event, ev.StepAnatomy):
                told.append(entry.event)
        return bool(entries)

    def _begin_late(self, journal: Journal) -> list[ev.AnyEvent]:
        """Take from a long journal what a status is made of, which lasts as long for a million steps as for a thousand,
        and what happened last, which is returned."""
        reading = StateReading(journal)
        before = f"the newest of {reading.last_seq:,} entries; outlast why {self._run_dir} tells the whole story"
        print(f"outlast: {before}", file=self._stream, flush=True)
        events = reading.of_all()
        for event in events:
            self._fold.take(event)
        for entry in journal.newest(ev.ProgressMade, _NUM_PROGRESS):
            if isinstance(entry.event, ev.ProgressMade) and entry.seq <= reading.last_seq:
                self._losses.extend(loss for _, loss in entry.event.losses)
        self._seq, self._start_s, self._history = reading.last_seq, events[0].at_s, None
        return newest_told(journal, _NUM_TOLD, reading.last_seq)

    def _keep(self) -> None:
        """Write down what was folded of a long run, so that `outlast why` need not fold it again."""
        if self._journal is not None and self._history is not None and self._seq - self._kept_seq > _KEEP_EVERY:
            self._kept_seq = self._seq
            keep(self._run_dir, self._journal, self._history)

    def _says_beginning(self, state: Status) -> bool:
        """Whether it is time to say how far a run without a step is: on a terminal always, else now and then."""
        if not _begins(state):
            return False
        return self._is_terminal() or self._clock() >= self._next_line_s

    def _is_terminal(self) -> bool:
        return self._stream.isatty()

    def _write_lines(self, state: Status, rows: list[Row]) -> None:
        for row in rows:
            print(_line(row), file=self._stream)
        if _begins(state):
            self._write_beginning(state)
        now_s = state.updated_at_s or 0.0
        due = now_s >= self._next_line_s or state.state == "stalled" or bool(self._begun)
        if state.step is not None and due:
            self._begun = ""
            self._next_line_s = now_s + self._line_every_s
            print(f"+{now_s - self._start_s:.1f} s  {_summary(state, self._total or state.until)}", file=self._stream)
        self._stream.flush()

    def _write_beginning(self, state: Status) -> None:
        """As soon as all processes are there, and else at the distance of progress lines."""
        now_s, told = self._clock(), _beginning(state)
        self._next_line_s = self._next_line_s or now_s + self._line_every_s  # the first rows have just been written
        if now_s >= self._next_line_s or (_manned(state) and told != self._begun):
            self._next_line_s, self._begun = now_s + self._line_every_s, told
            print(f"+{max(0.0, now_s - self._start_s):.1f} s  {told}", file=self._stream)

    def _draw(self, state: Status, rows: list[Row]) -> None:
        if self._screen is None:
            self._screen = _open_screen(self._stream)
        for row in rows:
            self._screen.console.print(_styled(row))
        since_s = self._clock() - self._start_s if _begins(state) and not state.detail else None
        picture = _picture(state, self._total or state.until, list(self._losses), self._screen.console, since_s)
        self._screen.update(picture, refresh=True)


def _line(row: Row) -> str:
    recomputed = row.microbatches_recomputed
    figures = [
        f"noticed by {row.noticed_by}" if row.noticed_by else "",
        f"after {format_s(row.detect_s)}" if row.detect_s is not None else "",
        "" if recomputed is None else f"{counted(recomputed, 'microbatch', 'microbatches')} recomputed",
        f"downtime {format_s(row.downtime_s)}" if row.downtime_s is not None else "",
    ]
    mark = {"info": "", "warning": "! ", "error": "!! "}[row.level]
    return f"+{row.since_s:.1f} s  {mark}{row.what}" + "".join(f"; {figure}" for figure in figures if figure)


def _begins(state: Status) -> bool:
    """Whether the run has not committed a step yet, and may."""
    return bool(state.run_id) and state.step is None and state.state not in OVER


def _manned(state: Status) -> bool:
    return _num_manned(state) >= state.num_replicas


def _num_manned(state: Status) -> int:
    return sum(replica.state not in {"exited", "ended"} for replica in state.replicas)


def _beginning(state: Status) -> str:
    """How far a run is that has no step yet, or none any more."""
    if state.detail:  # all replicas were gone: what the last view had is no word about those that follow
        return state.detail
    if state.view is not None:
        return "the replicas know each other, and compute the first step"
    if state.coordinator is None or not state.agents:
        return "coordinator and agents are starting"
    if not _manned(state):
        count = _num_manned(state)
        return f"{count} of {state.num_replicas} replicas have a process" + (_BEFORE if not count else "")
    return "all replicas have a process and load the script; it goes on when all have joined"


def _summary(state: Status, total: int | None) -> str:
    if _begins(state):
        return _beginning(state)
    steps = f"step {state.step}" + (f" of {total}" if total else "")
    training = sum(replica.state == "training" for replica in state.replicas)
    over = state.state in OVER
    busy = state.detail if state.state == "ending" else f"{training} of {state.num_replicas} replicas training"
    parts = [steps] if over else [steps, busy]
    parts += [f"loss {format_number(state.loss)}"] if state.loss is not None else []
    parts += [state.detail] if state.state == "stalled" else []
    parts += [f"{format_s(state.step_s)} a step"] if state.step_s else []
    parts += [counted(state.num_recoveries, "recovery", "recoveries")] if state.num_recoveries else []
    parts += [f"step {state.last_save.step} saved"] if state.last_save else []
    parts += ["the newest save failed"] if state.failed_save else []
    return ", ".join(parts)


def _open_screen(stream: TextIO) -> RichLive:
    from rich.console import Console
    from rich.live import Live as Screen

    screen = Screen(console=Console(file=stream), auto_refresh=False, transient=False)
    screen.start()
    return screen


def _styled(row: Row) -> RenderableType:
    from rich.text import Text

    return Text(_line(row), style={"info": "", "warning": "yellow", "error": "bold red"}[row.level])


def _picture(
    state: Status, total: int | None, losses: list[float], console: Console, since_s: float | None
) -> RenderableType:
    """`since_s`: how long a run without a step has been beginning."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=total, completed=state.step or 0, width=_BAR_COLUMNS) if total else ""
    head.add_row(f"{state.state:<8}", bar if since_s is None else f"for {format_s(max(0.0, since_s))}")
    people = Table.grid(padding=(0, 2))
    shown = [] if state.state in OVER else state.replicas
    for replica in shown[:_NUM_ROWS]:
        step = "" if replica.step is None else f"step {replica.step}"
        people.add_row(f"  {replica.replica}", Text(replica.state, style=_STYLES[replica.state]), step, replica.detail)
    parts: list[RenderableType] = [head, Text(f"  {_summary(state, total)}"), *([people] if shown else [])]
    if len(shown) > _NUM_ROWS:
        parts.append(Text(f"  and {len(shown) - _NUM_ROWS} more replicas"))
    if losses:
        parts.append(Text(f"  loss {sparkline(losses, max(10, min(60, console.width - 8)))}"))
    return Group(*parts)


_STYLES = {
    "starting": "dim", "joining": "cyan", "spare": "cyan", "forming": "yellow", "training": "green",
    "stalled": "bold yellow", "suspected": "bold yellow", "leaving": "dim", "ending": "green", "exited": "red",
    "ended": "dim",
}  # fmt: skip
