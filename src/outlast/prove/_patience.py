"""How long a run may show nothing, on a machine that does other things as well: all that follow one ask here.

A run hangs that makes no step, and whose processes neither work nor wait for a processor. One that works, or writes to
its journal, is given longer; one whose processes are kept waiting for a processor by others' work is given longer
still, for then even a process's start takes minutes. Nothing here reads a clock, so that a test has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from outlast.core import events as ev
from outlast.prove._process_tree import Running, processor_s, queued_s, state_of

__all__ = ["HANG_S", "Patience", "Reading", "RunWait", "read_processor"]

HANG_S = 40.0
"""For a run with the settings that it has by itself: longer than a view may take to form, the longest that such a run
waits for one of its own that is silent (`formation_s`)."""
_LOOK_S = 10.0
_IF_WORKS, _IF_STARVES = 4.0, 16.0  # times as long; both where both are so
# Shares of one processor. A fleet of four that waits uses 0.01 of one, and is kept waiting for one for 0.09 on two
# processors that ten others want.
_WORKS, _STARVES = 0.05, 0.5

Reading: TypeAlias = Callable[[Running], tuple[float, float]]
"""(seconds of a processor that it has used so far, seconds that it had to wait for one)."""


def read_processor(running: Running) -> tuple[float, float]:
    """By the kernel, now."""
    return processor_s(running), queued_s(running)


class Patience:
    """`hang_s`: for a run on a machine of its own. `read`: what is known of a process."""

    def __init__(self, hang_s: float, read: Reading = read_processor) -> None:
        self._hang_s, self._read = hang_s, read
        self._from_s = 0.0
        self._worked_s = self._starved_s = -2 * _LOOK_S
        self._before: dict[Running, tuple[float, float]] = {}
        self._used: dict[Running, float] | None = None  # of a processor, in the newest look

    def look(self, now_s: float, alive: Iterable[Running]) -> None:
        """From time to time: what the run's processes did lately. `alive` is gone through only when it is time."""
        if now_s - self._from_s <= _LOOK_S:
            return
        seen = {running: self._read(running) for running in alive}
        past_s = now_s - self._from_s
        worked, queued = (
            {running: sums[kind] - self._before.get(running, (0.0, 0.0))[kind] for running, sums in seen.items()}
            for kind in (0, 1)
        )
        if sum(worked.values()) > _WORKS * past_s or not self._before.keys() <= seen.keys():
            self._worked_s = now_s  # who has ended since the last look is not there to be counted
        if sum(queued.values()) > _STARVES * past_s:
            self._starved_s = now_s
        self._before, self._from_s, self._used = seen, now_s, worked

    def begin(self, now_s: float, alive: Iterable[Running]) -> None:
        """What its processes did until now counts for nothing."""
        self._before, self._from_s = {running: self._read(running) for running in alive}, now_s
        self._worked_s = self._starved_s = now_s - 2 * _LOOK_S

    def wrote(self, now_s: float) -> None:
        """It said something that is no step: as good as work."""
        self._worked_s = now_s

    def seconds(self, now_s: float) -> float:
        """How long it may show nothing just now."""
        longer = _IF_WORKS if self._works(now_s) else 1.0
        return self._hang_s * longer * (_IF_STARVES if self._starves(now_s) else 1.0)

    def words(self, now_s: float) -> str:
        """What its processes did lately, for who reads that it hangs."""
        said = ["worked"] * self._works(now_s) + ["waited for a processor"] * self._starves(now_s)
        told = f"its processes {' and '.join(said) or 'did nothing'}"
        if self._used is None:
            return told
        each = [f"{seen.name} {state_of(seen) or 'gone'} {used_s:.1f} s" for seen, used_s in self._used.items()]
        return f"{told}; state, and processor time in the last {_LOOK_S:g} s: {', '.join(each) or 'no process'}"

    def _works(self, now_s: float) -> bool:
        return now_s - self._worked_s <= _LOOK_S

    def _starves(self, now_s: float) -> bool:
        return now_s - self._starved_s <= _LOOK_S


class RunWait:
    """A wait for something of a run, from `now_s` on, when `step` was its newest. `renewed`: each new step begins it
    anew; else steps are work as any other, for what a run that makes steps without end may never do."""

    def __init__(
        self, hang_s: float, now_s: float, step: int, alive: Iterable[Running], *, renewed: bool = True,
        read: Reading = read_processor,
    ) -> None:  # fmt: skip
        self._patience, self._renewed = Patience(hang_s, read), renewed
        self._patience.begin(now_s, alive)
        self._moved_s, self._step = now_s, step
        self._newest: tuple[float, str] | None = None  # of the journal, but for what it merely remarks

    def look(self, now_s: float, told: Sequence[ev.AnyEvent], alive: Iterable[Running]) -> str:
        """Nothing while it may go on; else how long it has shown nothing, and what was seen last. `told`: events since
        the last look."""
        self._patience.look(now_s, alive)
        for event in told:
            if not isinstance(event, ev.Notice):
                self._newest = now_s, str(type(event).__struct_config__.tag)
                self._patience.wrote(now_s)
        step = max((e.losses[-1][0] for e in told if isinstance(e, ev.ProgressMade) and e.losses), default=-1)
        if step > self._step:
            self._step = step
            self._moved_s = now_s if self._renewed else self._moved_s
        if now_s - self._moved_s <= self._patience.seconds(now_s):
            return ""
        return self._words(now_s)

    def _words(self, now_s: float) -> str:
        for_s = f"for {now_s - self._moved_s:.0f} s"
        still = f"no step {for_s}" if self._renewed else f"it was awaited {for_s}"
        made = f"the newest is {self._step}" if self._step >= 0 else "none was made before"
        wrote = "nothing was written to the journal meanwhile"
        if self._newest is not None:
            wrote = f"its journal's newest is {self._newest[1]}, {now_s - self._newest[0]:.0f} s old"
        return f"{still}, {made}; {wrote}; {self._patience.words(now_s)}"
