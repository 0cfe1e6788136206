"""How long a struck run may show nothing, on a machine that does other things as well.

A run hangs whose processes neither work nor wait for a processor. One that works is given longer; one whose processes
are kept waiting for a processor by others' work is given longer still, for then even a process's start takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from outlast.prove._process_tree import Running, processor_s, queued_s

__all__ = ["Patience"]

_LOOK_S = 10.0
_IF_WORKS, _IF_STARVES = 4.0, 16.0  # times as long; both where both are so
_WORKS, _STARVES = 0.05, 0.5  # shares of one processor


class Patience:
    """`hang_s`: for a run on a machine of its own."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._from_s = 0.0
        self._worked_s = self._starved_s = -2 * _LOOK_S
        self._before: dict[Running, tuple[float, float]] = {}

    def look(self, now_s: float, alive: Iterable[Running]) -> None:
        """From time to time: what the run's processes did lately."""
        if now_s - self._from_s <= _LOOK_S:
            return
        seen = {running: (processor_s(running), queued_s(running)) for running in alive}
        past_s = now_s - self._from_s
        worked, queued = (
            sum(sums[kind] - self._before.get(running, (0.0, 0.0))[kind] for running, sums in seen.items())
            for kind in (0, 1)
        )
        if worked > _WORKS * past_s:
            self._worked_s = now_s
        if queued > _STARVES * past_s:
            self._starved_s = now_s
        self._before, self._from_s = seen, now_s

    def seconds(self, now_s: float) -> float:
        """How long it may show nothing just now."""
        works, starves = now_s - self._worked_s <= _LOOK_S, now_s - self._starved_s <= _LOOK_S
        return self._hang_s * (_IF_WORKS if works else 1.0) * (_IF_STARVES if starves else 1.0)
