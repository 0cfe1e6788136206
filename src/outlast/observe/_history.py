"""How a run went over steps and over time, in a fixed number of points, however long it was.

Role: the curves of the page. Pure. Invariants: memory and work a point are bounded; where there are more values than
points, neighbours share one and its mean, lowest and highest value are kept; what was done twice is told as it was
done the last time. Not for sums: those are `_accounting`'s.
"""

from __future__ import annotations

import math

import msgspec

from outlast.core import events as ev
from outlast.observe._accounting import AccountingFold
from outlast.observe.story_events import StoryFold

__all__ = ["USES", "History", "LossCurve", "TimeCurve"]

USES = ("productive", "degraded", "checkpoint", "recovery", "lost", "stalled", "idle")
"""What time is used for, as `Progress.seconds` names it; in this order they are stacked."""

_POINTS = 600
_FIRST_WIDTH_S = 0.5


class LossCurve:
    """Loss over steps; at most twice `points` points."""

    def __init__(self, points: int = _POINTS) -> None:
        self._points, self._stride = points, 1
        self._cells: list[list[float]] = []  # index, count, sum, low, high; count is of finite values

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
        if len(cells) >= 2 * self._points:
            self._halve()

    def _halve(self) -> None:
        self._stride *= 2
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

    def data(self) -> dict[str, object]:
        """`steps`, `mean`, `low`, `high`: one number a point; null where no value was finite. `stride`: steps each."""
        cells = self._cells
        return {
            "stride": self._stride,
            "steps": [int(cell[0]) * self._stride for cell in cells],
            "mean": [cell[2] / cell[1] if cell[1] else None for cell in cells],
            "low": [cell[3] if cell[1] else None for cell in cells],
            "high": [cell[4] if cell[1] else None for cell in cells],
        }


class TimeCurve:
    """Steps committed, and seconds by use, over time; at most twice `points` points of one width."""

    def __init__(self, points: int = _POINTS) -> None:
        self._points, self._width_s = points, _FIRST_WIDTH_S
        self._cells: list[list[float]] = []  # steps, then seconds by use

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

    def data(self) -> dict[str, object]:
        """`width_s`; `steps`: committed in each stretch; `uses`: the names, in order; `seconds`: for each use, in each
        stretch."""
        return {
            "width_s": self._width_s,
            "steps": [cell[0] for cell in self._cells],
            "uses": list(USES),
            "seconds": [[cell[1 + place] for cell in self._cells] for place in range(len(USES))],
        }


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
        data = self.losses.data()
        pairs = zip(data["steps"], data["mean"], strict=True)  # type: ignore[call-overload]
        return [(step, math.nan if mean is None else mean) for step, mean in pairs]

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
