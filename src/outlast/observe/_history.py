"""How a run went over steps and over time, in a fixed number of points, however long it was.

Role: the curves of the page. Pure. Invariants: memory and work a point are bounded; where there are more values than
points, neighbours share one and its mean, lowest and highest value are kept; what was done twice is told as it was
done the last time. A curve has one who follows it (`news`): the rows before the first that it names are as they were
at the call before. Not for sums: those are `_accounting`'s.
"""

from __future__ import annotations

import math

import msgspec

from outlast.core import events as ev
from outlast.observe._accounting import AccountingFold
from outlast.observe.story_events import StoryFold

__all__ = ["USES", "CurveRow", "History", "LossCurve", "TimeCurve"]

CurveRow = list[float | None]

USES = ("productive", "degraded", "checkpoint", "recovery", "lost", "stalled", "idle")
"""What time is used for, as `Progress.seconds` names it; in this order they are stacked."""

_POINTS = 600
_FIRST_WIDTH_S = 0.5
_NOTHING = (None, None, None)


class LossCurve:
    """Loss over steps; at most twice `points` points."""

    def __init__(self, points: int = _POINTS) -> None:
        self._points, self._stride = points, 1
        self._cells: list[list[float]] = []  # index, count, sum, low, high; count is of finite values
        self._fresh = 0  # the first cell that may have changed since `news`

    def add(self, step: int, loss: float) -> None:
        """One step's loss. A step below the newest one was done again: what followed it is forgotten."""
        index = step // self._stride
        cells = self._cells
        redone = bool(cells) and index < cells[-1][0]
        while cells and cells[-1][0] > index:
            cells.pop()
        if redone and cells and cells[-1][0] == index:
            cells.pop()
        if not cells or cells[-1][0] != index:
            cells.append([index, 0, 0.0, math.inf, -math.inf])
        elif self._stride == 1:
            cells[-1] = [index, 0, 0.0, math.inf, -math.inf]
        cell = cells[-1]
        if math.isfinite(loss):
            cell[1] += 1
            cell[2] += loss
            cell[3], cell[4] = min(cell[3], loss), max(cell[4], loss)
        self._fresh = min(self._fresh, len(cells) - 1)
        if len(cells) >= 2 * self._points:
            self._halve()

    def _halve(self) -> None:
        self._stride *= 2
        self._fresh = 0
        old, self._cells = self._cells, []
        for index, count, total, low, high in old:
            half = index // 2
            if self._cells and self._cells[-1][0] == half:
                cell = self._cells[-1]
                cell[1] += count
                cell[2] += total
                cell[3], cell[4] = min(cell[3], low), max(cell[4], high)
            else:
                self._cells.append([half, count, total, low, high])

    def dump(self) -> bytes:
        """Return all that was added, for `load`."""
        return msgspec.msgpack.encode((self._points, self._stride, self._cells))

    def load(self, data: bytes | msgspec.Raw) -> None:
        """Go on from what `dump` returned. Raises msgspec.MsgspecError."""
        kind = tuple[int, int, list[list[float]]]
        self._points, self._stride, self._cells = msgspec.msgpack.decode(data, type=kind)
        self._fresh = 0

    @property
    def head(self) -> dict[str, object]:
        """Return `stride`: the steps of a row."""
        return {"stride": self._stride}

    def rows(self, first: int = 0) -> list[CurveRow]:
        """Return step, mean, lowest and highest loss of each point from the row `first` on; None where no value was
        finite."""
        return [
            [int(index) * self._stride, total / count, low, high] if count else [int(index) * self._stride, *_NOTHING]
            for index, count, total, low, high in self._cells[first:]
        ]

    def news(self) -> tuple[int, list[CurveRow]]:
        """Return the first row that may have changed since the last call, and all rows from it on."""
        first, self._fresh = self._fresh, len(self._cells)
        return first, self.rows(first)


class TimeCurve:
    """Steps committed, and seconds by use, over time; at most twice `points` points of one width."""

    def __init__(self, points: int = _POINTS) -> None:
        self._points, self._width_s = points, _FIRST_WIDTH_S
        self._cells: list[list[float]] = []  # steps, then seconds by use
        self._fresh = 0  # the first cell that may have changed since `news`

    def add(self, event: ev.ProgressMade, start_s: float) -> None:
        """Spread what an event counts over the time that it speaks of."""
        seconds = [event.seconds.get(use, 0.0) for use in USES]
        span_s, end_s = math.fsum(seconds), event.committed_at_s - start_s
        begin_s = max(0.0, end_s - span_s)
        values = [float(max(0, event.committed - event.first)), *seconds]
        if end_s <= begin_s:
            return
        self._reach(end_s)
        first, last = int(begin_s / self._width_s), int(end_s / self._width_s)
        self._fresh = min(self._fresh, first)
        if first == last:
            cell = self._cells[first]
            for place, value in enumerate(values):
                cell[place] += value
            return
        for index in range(first, last + 1):
            low, high = max(begin_s, index * self._width_s), min(end_s, (index + 1) * self._width_s)
            share = max(0.0, high - low) / (end_s - begin_s)
            cell = self._cells[index]
            for place, value in enumerate(values):
                cell[place] += value * share

    def _reach(self, end_s: float) -> None:
        while end_s / self._width_s >= 2 * self._points:
            self._width_s *= 2
            self._fresh = 0
            pairs = zip(self._cells[::2], [*self._cells[1::2], self._empty()], strict=False)
            self._cells = [[x + y for x, y in zip(a, b, strict=True)] for a, b in pairs]
        while len(self._cells) <= int(end_s / self._width_s):
            self._cells.append(self._empty())

    def _empty(self) -> list[float]:
        return [0.0] * (1 + len(USES))

    def dump(self) -> bytes:
        """Return all that was added, for `load`."""
        return msgspec.msgpack.encode((self._points, self._width_s, self._cells))

    def load(self, data: bytes | msgspec.Raw) -> None:
        """Go on from what `dump` returned. Raises msgspec.MsgspecError."""
        kind = tuple[int, float, list[list[float]]]
        self._points, self._width_s, self._cells = msgspec.msgpack.decode(data, type=kind)
        self._fresh = 0

    @property
    def head(self) -> dict[str, object]:
        """Return `width_s`: the seconds of a row; `uses`: the names of uses, in a row's order."""
        return {"width_s": self._width_s, "uses": list(USES)}

    def rows(self, first: int = 0) -> list[CurveRow]:
        """Return the steps committed in each stretch of time from the row `first` on, and the seconds for each use."""
        return [[*cell] for cell in self._cells[first:]]

    def news(self) -> tuple[int, list[CurveRow]]:
        """Return the first row that may have changed since the last call, and all rows from it on."""
        first, self._fresh = self._fresh, len(self._cells)
        return first, self.rows(first)


class History:
    """The folds that need a run's whole history: accounts, curves, steps committed, what a story is told from. `seq`:
    the last entry taken."""

    def __init__(self) -> None:
        self.accounts, self.losses, self.times = AccountingFold(), LossCurve(), TimeCurve()
        self.story = StoryFold()
        self.steps_committed = self.seq = 0

    @property
    def points(self) -> list[tuple[int, float]]:
        """Return (step, loss) as `losses` has them; of a long run means of neighbours."""
        return [(int(step or 0), math.nan if mean is None else mean) for step, mean, *_ in self.losses.rows()]

    def take(self, event: ev.AnyEvent, seq: int) -> None:
        """Fold one event in, the entry `seq`. Every event once, in the journal's order, from the first."""
        self.seq = seq
        self.accounts.take(event)
        self.story.take(event, seq)
        if isinstance(event, ev.ProgressMade):
            for step, loss in event.losses:
                self.losses.add(step, loss)
            if event.committed >= 0:
                self.times.add(event, self.accounts.start_s)
                self.steps_committed += max(0, event.committed - event.first)
