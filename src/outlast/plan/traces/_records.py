"""A failure trace: what happened to which machine, when, until when; and what of the log could not be used.

Invariant: rows read = rows used + rows skipped on purpose + rows with a problem; nothing is dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from outlast.core.reliability.check import FloatArray
from outlast.errors import ConfigError

__all__ = ["Failure", "TraceProblem", "RawEvent", "Trace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawEvent:
    """One usable row: `what` is down, up, or hit (a failure with no record of the repair)."""

    row: int
    time_h: float
    node: str
    what: str
    kind: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceProblem:
    """A row that cannot be used, and why; `column` is empty when it is the row as a whole."""

    row: int
    column: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}" + (f", column {self.column!r}" if self.column else "") + f": {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failure; up_h is None while it is not known when the machine came back (then it is censored at the end)."""

    down_h: float
    up_h: float | None
    node: str
    kind: str
    repair_known: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Failures in order of time, hours since the start, over `hours` on `num_nodes` machines (more than appear)."""

    name: str
    hours: float
    num_nodes: int
    failures: tuple[Failure, ...]
    problems: tuple[TraceProblem, ...] = ()
    rows_read: int = 0
    rows_used: int = 0
    rows_skipped: int = 0
    notes: tuple[str, ...] = field(default=())
    machine_hours: float = 0.0
    """Hours that machines were there to fail; 0: all of them, all the time."""
    joined: tuple[tuple[float, str], ...] = ()
    """(when, who) of machines that joined and were not seen before, in order; of a fleet that machines join (spot)."""

    def __post_init__(self) -> None:
        if self.hours <= 0 or self.num_nodes < len({f.node for f in self.failures}):
            raise ConfigError(
                f"{self.num_nodes} machines over {self.hours:g} h cannot hold this trace",
                remedy="give at least as many machines as appear in it, and its true length",
            )
        if self.rows_read != self.rows_used + self.rows_skipped + len(self.problems):
            raise AssertionError("rows went missing between reading and reporting")

    @property
    def exposure_h(self) -> float:
        """Machine-hours watched."""
        return self.machine_hours or self.num_nodes * self.hours

    def times_h(self) -> FloatArray:
        """Failure times."""
        return np.array([f.down_h for f in self.failures], dtype=np.float64)

    def repairs_h(self) -> tuple[FloatArray, np.ndarray[tuple[int], np.dtype[np.bool_]], FloatArray]:
        """(hours down, whether the end was seen, start) of failures whose repair the log records."""
        known = [f for f in self.failures if f.repair_known]
        spans = [(f.up_h if f.up_h is not None else self.hours) - f.down_h for f in known]
        seen = np.array([f.up_h is not None for f in known], dtype=np.bool_)
        return np.array(spans, dtype=np.float64), seen, np.array([f.down_h for f in known], dtype=np.float64)

    def cut(self, start_h: float, end_h: float) -> Trace:
        """The part that somebody watching from start_h to end_h would have seen: later ends are unknown."""
        part = tuple(
            Failure(
                down_h=f.down_h - start_h,
                node=f.node,
                kind=f.kind,
                repair_known=f.repair_known,
                up_h=f.up_h - start_h if f.up_h is not None and f.up_h <= end_h else None,
            )
            for f in self.failures
            if start_h <= f.down_h < end_h
        )
        name = f"{self.name} [{start_h:.0f}, {end_h:.0f}) h"
        share = (end_h - start_h) / self.hours
        hours = self.machine_hours * share
        joined = tuple((at - start_h, node) for at, node in self.joined if start_h <= at < end_h)
        return Trace(
            name=name, hours=end_h - start_h, num_nodes=self.num_nodes, failures=part, machine_hours=hours,
            joined=joined,
        )  # fmt: skip

    def by_place(self) -> Trace:
        """The same failures, of places in the fleet instead of machines. In a fleet that machines join, who is taken
        away does not come back: the next one that joins fills the place that is empty longest, and with no place empty
        the fleet grows by one. A trace of machines that come back by themselves is returned as it is."""
        if not self.joined:
            return self
        ended = sorted((number for number, f in enumerate(self.failures)), key=lambda n: self.failures[n].down_h)
        up_h = [failure.up_h for failure in self.failures]
        place: dict[str, str] = {}
        empty: list[int] = []
        for at_h, node in self.joined:
            while ended and self.failures[ended[0]].down_h <= at_h:
                empty.append(ended.pop(0))
                _place_of(self.failures[empty[-1]].node, place)
            if empty:
                left = empty.pop(0)
                up_h[left], place[node] = at_h, place[self.failures[left].node]
            else:
                _place_of(node, place)
        failures = tuple(
            replace(failure, node=_place_of(failure.node, place), up_h=up)
            for failure, up in zip(self.failures, up_h, strict=True)
        )
        return replace(self, failures=failures)


def _place_of(node: str, places: dict[str, str]) -> str:
    """The machine's place; a new one if it has none yet."""
    return places.setdefault(node, f"place {1 + len(set(places.values())):04}")
