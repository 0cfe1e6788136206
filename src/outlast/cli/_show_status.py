"""What `outlast status` does. Loads no typer, see `_plain_words.py`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli._runs import DEFAULT_RUNS, open_run, print_json

if TYPE_CHECKING:
    from outlast.core.events import AnyEvent
    from outlast.journal import Journal
    from outlast.observe import Status

__all__ = ["show_status"]

_CLEAR = "\x1b[H\x1b[2J"


def show_status(
    run: Path = Path(DEFAULT_RUNS), *, follow: bool = False, every: float = 2.0, as_json: bool = False
) -> int:
    """Print a run's status once, or, with `follow`, every `every` seconds that it has changed."""
    with open_run(run) as (reader, run_dir):
        if follow:
            _follow(reader, run_dir, every, as_json, threading.Event())
        else:
            _show(_Asked(reader, run_dir), reader, run_dir, as_json)
    return 0


class _Asked:
    """A run at one moment, told in two parts, since who is in it may be ten thousand."""

    def __init__(self, reader: Journal, run_dir: Path) -> None:
        from outlast import journal, observe

        self._held = journal.is_held(run_dir)  # asked first: what is written before the lock is let go of is then read
        self._reading = observe.StateReading(reader)
        self._now_s = journal.run_now_s(run_dir) if self._held else None

    def run(self) -> Status:
        """All but its replicas, sooner."""
        return self._folded(self._reading.of_run(), people=False)

    def state(self) -> Status:
        return self._folded(self._reading.of_all(), people=True)

    def _folded(self, events: list[AnyEvent], people: bool) -> Status:
        from outlast import observe

        fold = observe.StatusFold()
        for event in events:
            fold.take(event)
        return fold.status(held=self._held, now_s=self._now_s, people=people)


def _show(asked: _Asked, reader: Journal, run_dir: Path, as_json: bool) -> None:
    from outlast import observe

    if as_json:
        print_json(asked.state(), run_dir=run_dir)
        return
    print(observe.render_run(asked.run()), flush=True)  # each part as soon as it is read
    print(*observe.render_losses(observe.sample_losses(reader)), "", sep="\n", flush=True)
    print(observe.render_people(asked.state()), flush=True)


def _follow(reader: Journal, run_dir: Path, every_s: float, as_json: bool, stop: threading.Event) -> None:
    """Show the state whenever it has changed; a terminal is drawn anew, elsewhere tables or lines follow each other."""
    import msgspec

    from outlast import observe

    shown: object = None
    while True:
        asked = _Asked(reader, run_dir)
        state = asked.state()
        news = msgspec.structs.replace(state, step_age_s=None, updated_at_s=None, as_of_s=None, save_age_s=None)
        if news != shown:
            shown = news
            if as_json:
                fields = {"run_dir": str(run_dir.resolve()), **msgspec.structs.asdict(state)}
                print(msgspec.json.encode(fields).decode(), flush=True)
            else:
                print(_CLEAR if sys.stdout.isatty() else "", end="")
                _show(asked, reader, run_dir, False)
        if state.state in observe.OVER or stop.wait(every_s):
            return
