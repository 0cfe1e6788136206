"""The runs that are served, read on one thread, published as parts that never change.

Role: who reads journals and when. One thread follows all runs; a request reads only what was published last, so no
reader waits for a disk, holds a lock, or costs the run anything. Invariants: parts are numbered by `version`, and only
rise; a listener that is slow finds the newest parts when it comes back, and nothing was queued for it meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from outlast.core import events as ev
from outlast.journal import run_now_s
from outlast.observe import UsefulTime
from outlast.observe.page_reading import RunReading
from outlast.observe.status_records import OVER, Status
from outlast.observe.web._metrics import Scraped
from outlast.observe.web._parts import CurveParts, chosen, head_part, marks_part, members_part, row_data, story_part

__all__ = ["BesidePlan", "Board", "SentPart", "Shown"]

_POLL_S = 0.5
_HEAD_EVERY_S = 1.0
_HISTORY_TURN_S = 0.1
_CURVES_EVERY_S = 1.0
_PLAN_EVERY_S, _PLAN_SHARE = 30.0, 0.002  # of a processor: beliefs of a long run take the more, and change the less

BesidePlan = Callable[[Sequence[ev.AnyEvent], UsefulTime], list[dict[str, object]]]
"""What was planned beside what was seen, from the events of a story and the useful time of now: tables, as `title`,
`columns`, `rows`, `note`."""


class SentPart(NamedTuple):
    """A part as it was published. `version`: rises with each change; `data`: the JSON; `news`: the JSON for who holds
    the version before, which is shorter where a part grows at its end."""

    version: int
    data: bytes
    news: bytes


_NEVER = SentPart(0, b"", b"")


class Shown:
    """One run as it is shown: its reading, and the parts that were published. `spent_s`: the processor's seconds that
    this thread has used."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        beside_plan: BesidePlan | None = None,
        spent_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.name, self.reading, self._beside_plan = name, RunReading(run_dir), beside_plan
        self.parts: dict[str, SentPart] = {}
        """By name. Never changed: what is published anew is another dictionary."""
        self._curves, self._spent_s = CurveParts(), spent_s
        self.lock = threading.RLock()  # the folds are one thread's at a time: the board's, or a request's for rows
        self._seen: dict[str, Any] = {}
        self._next_head_s = self._next_plan_s = 0.0
        self._plan_every_s = _PLAN_EVERY_S

    def turn(self, now_s: float) -> bool:
        """Read what is new and publish what it changes; whether anything was published."""
        with self.lock:
            fresh = self.reading.poll()
            reading_on = self._read_history()
            if not self.reading.opened:
                said = {"waiting": str(self.reading.run_dir), "trouble": self.reading.trouble}
                return self._publish("absent", said, said)
            # Of progress alone readers are told once a second: what is sent to a hundred of them is most of the work.
            told = fresh and self._changed("marks", len(self.reading.fold.rows))
            if not (told or reading_on or _due(now_s, self._next_head_s, _HEAD_EVERY_S)):
                return False
            self._next_head_s = now_s + _HEAD_EVERY_S
            return self._publish_all(now_s)

    def scraped(self, now_s: float) -> Scraped | None:
        """The run for the metrics; None while there is no journal."""
        with self.lock:
            if not self.reading.opened:
                return None
            status, now_or_none = self._status(now_s, people=True)
            return Scraped(
                name=self.name,
                fold=self.reading.fold,
                status=status,
                now_s=now_or_none,
                share_read=self.reading.share_read,
            )

    def rows(self, wanted: str, first: int | None, limit: int, near_s: float | None) -> dict[str, object]:
        """`limit` rows of a choice from `first` on, by default the last ones; with `near_s` those around a moment."""
        with self.lock:
            found = self._chosen(wanted)
        at = max(0, len(found) - limit) if first is None else first
        if near_s is not None:
            before = sum(page.row.since_s < near_s for page in found)
            at = max(0, before - limit // 2)
        at = min(max(0, at), len(found))
        return {"total": len(found), "first": at, "rows": [row_data(page) for page in found[at : at + limit]]}

    def _chosen(self, wanted: str) -> list[Any]:
        count = len(self.reading.fold.rows)
        kept = self._seen.get(f"rows {wanted}")
        if kept is None or kept[0] != count:
            kept = (count, list(chosen(self.reading.fold, wanted)))
            self._seen[f"rows {wanted}"] = kept
        return kept[1]

    def _read_history(self) -> bool:
        end_s, any_read = time.monotonic() + _HISTORY_TURN_S, False
        while time.monotonic() < end_s and self.reading.advance(500):
            any_read = True
        return any_read

    def _status(self, now_s: float, people: bool) -> tuple[Status, float | None]:
        """The status, and now as it and all accounts are told of it: None where nobody holds the run."""
        held = self.reading.held()
        now_or_none = now_s if held else None
        return self.reading.fold.status(held=held, now_s=now_or_none, people=people), now_or_none

    def _publish_all(self, now_s: float) -> bool:
        fold = self.reading.fold
        state, now_or_none = self._status(now_s, people=False)
        rows = len(fold.rows)
        published = self._publish("head", None, head_part(fold, state, now_or_none, self.reading.share_read))
        people = (fold.people_version, state.state in OVER, state.state == "stalled")
        if self._changed("members", people):
            published |= self._publish("members", people, members_part(self._status(now_s, people=True)[0]))
        if self._changed("marks", rows):
            published |= self._publish("marks", rows, marks_part(fold))
        story = (rows, state.state, self.reading.whole, fold.anatomy.version)
        if self._changed("story", story):
            published |= self._publish("story", story, story_part(fold, state, now_or_none))
        told = fold.version if self.reading.whole else -1 - int(time.monotonic() / _CURVES_EVERY_S)
        if self._changed("curves", told):
            published |= self._publish("curves", told, *self._curves.take(fold))
        return self._publish_plan(now_s, state, now_or_none) or published

    def _publish_plan(self, now_s: float, state: Status, now_or_none: float | None) -> bool:
        """Beliefs are folded from the whole story, so seldom, and at the end; they say of which moment they are."""
        fold, over = self.reading.fold, state.state in OVER
        key = fold.version, over
        ended = over and not self._seen.get("plan", key)[1]
        due = self.reading.whole and (ended or _due(now_s, self._next_plan_s, self._plan_every_s))
        if self._beside_plan is None or not due or not self._changed("plan", key):
            return False
        before_s = self._spent_s()
        since_s = fold.latest_s - (fold.start_s or fold.latest_s)
        useful = fold.useful(state, now_or_none)
        content = {"since_s": since_s, "tables": self._beside_plan(self.reading.story(), useful)}
        self._plan_every_s = max(_PLAN_EVERY_S, (self._spent_s() - before_s) / _PLAN_SHARE)
        self._next_plan_s = now_s + self._plan_every_s
        return self._publish("plan", key, content)

    def _changed(self, part: str, key: object) -> bool:
        return self._seen.get(part) != key

    def _publish(self, part: str, key: object, content: object, news: object = None) -> bool:
        """`news`: what makes `content` of the one before; None: there is nothing shorter."""
        self._seen[part] = key
        data = msgspec.json.encode(content)
        old = self.parts.get(part, _NEVER)
        if old.data == data:
            return False
        short = data if news is None else msgspec.json.encode(news)
        parts = {**self.parts, part: SentPart(old.version + 1, data, short)}
        if part != "absent":
            parts.pop("absent", None)
        self.parts = parts
        return True


class Board:
    """All runs of a server. `on_change` is called from the board's thread after anything was published. `clock`:
    now, as the events of the run in a directory have it (Unix seconds). `beside_plan`:
    what is shown beside the plan, which this room knows nothing of; None is nothing."""

    def __init__(
        self,
        run_dirs: Sequence[Path],
        *,
        clock: Callable[[Path], float] = run_now_s,
        beside_plan: BesidePlan | None = None,
    ) -> None:
        self.runs: dict[str, Shown] = {}
        for run_dir in run_dirs:
            name, number = run_dir.resolve().name or "run", 1
            while name in self.runs:
                number += 1
                name = f"{run_dir.resolve().name}-{number}"
            self.runs[name] = Shown(name, run_dir, beside_plan)
        self.on_change: Callable[[], None] = _nothing
        self.clock = clock
        self._wake, self._done = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Follow the journals until `stop`."""
        self._thread = threading.Thread(target=self._follow, name="outlast-board", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread, and let go of the journals."""
        self._done.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        for shown in self.runs.values():
            shown.reading.close()

    def turn(self) -> bool:
        """One round over all runs; whether anything was published."""
        published = [shown.turn(self.clock(shown.reading.run_dir)) for shown in self.runs.values()]
        return any(published)

    @property
    def ready(self) -> bool:
        """Return whether every run is there and was read to the end."""
        return all(shown.reading.whole for shown in self.runs.values())

    def scraped(self) -> list[Scraped]:
        """All runs that are there, for the metrics."""
        found = [shown.scraped(self.clock(shown.reading.run_dir)) for shown in self.runs.values()]
        return [run for run in found if run is not None]

    def _follow(self) -> None:
        while not self._done.is_set():
            if self.turn():
                self.on_change()
            busy = any(shown.reading.opened and not shown.reading.whole for shown in self.runs.values())
            self._wake.wait(0.005 if busy else _POLL_S)


def _due(now_s: float, next_s: float, every_s: float) -> bool:
    """Whether it is time; also after the clock was set back, as it is when a run begins to say its own."""
    return now_s >= next_s or now_s < next_s - every_s


def _nothing() -> None:
    return None
