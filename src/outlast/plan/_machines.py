"""The fleet's machines in a batch of replications: running, spare, in repair; who fills a place, who comes back.

Invariant: running + spare + in repair + gone = wanted + spares, in every replication at all times; `gone` are those
whose places the restart policy does not fill again. Where the run chooses its spares (`hold`), one that is not wanted
any more leaves once it is not in repair. The vacancy policy decides whether to go on with fewer, to wait or
to stop; the decision here is only carried out. A job that stops is started again once all its machines are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.core.policy import Replacements, VacancyPolicy, VacancyState

from ._model import Job
from ._source import Floats, Ints

__all__ = ["Machines", "Taken"]

_Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Masks over the rows handed to `take`: a spare came in, the job shrinks, or it stops."""

    swapped: _Flags
    shrunk: _Flags
    stopped: _Flags


class Machines:
    """State arrays are (replications,); repairs are slots (replications, k), grown when they run out."""

    def __init__(self, job: Job, policy: VacancyPolicy, size: int) -> None:
        self.job, self.policy = job, policy
        self.wanted = float(job.num_nodes)
        self.running, self.spare = np.full(size, self.wanted), np.full(size, float(job.spares))
        self.waiting: _Flags = np.zeros(size, dtype=np.bool_)
        self.stopped: _Flags = np.zeros(size, dtype=np.bool_)
        self.waits, self.gone = np.zeros(size, dtype=np.intp), np.zeros(size)
        self.since, self.patience_ends = np.zeros(size), np.full(size, np.inf)  # of a wait
        self.back_at, self.back_num = np.full((size, 8), np.inf), np.zeros((size, 8))
        self.out_since = np.full((size, 8), np.nan)  # of machines that died; NaN of others
        self.num_filled, self.filled_s = np.zeros(size), np.zeros(size)  # of those that died: back, and after how long
        self.soonest = np.full(size, np.inf)
        self.crew_free = np.zeros((size, job.crews)) if job.crews else None
        self.running_share, self.work_share = np.ones(size), np.ones(size)
        self.missing = self.any_out = False

    def next_back(self) -> Floats:
        """When the next machine returns to a job that misses some, or its patience ends."""
        return np.where(self.running < self.wanted, np.minimum(self.soonest, self.patience_ends), np.inf)

    def _shares(self) -> None:
        self.running_share = self.running / self.wanted
        self.missing = bool((self.running < self.wanted).any() or self.waiting.any())
        self.work_share = self.running_share

    def _finish_s(self, rows: Ints, now: Floats, repair_s: Floats) -> Floats:
        if self.crew_free is None:
            return now + repair_s
        crew = self.crew_free[rows].argmin(axis=1)
        done: Floats = np.maximum(now, self.crew_free[rows, crew]) + repair_s
        self.crew_free[rows, crew] = done
        return done

    def take(
        self, rows: Ints, num: Floats, now: Floats, repair_s: Floats, gone: Floats, died: _Flags | None = None
    ) -> Taken:
        """`num` machines of each row go to repair, `gone` of them for good; spares fill in; what is then missing
        shrinks or stops the job, or makes it wait. `died`: they were not asked to go, so how long they are out counts.
        """
        num = np.minimum(num, self.running[rows])
        self.gone[rows] += gone
        back = num > gone
        done = self._finish_s(rows[back], now[back], repair_s[back])
        self._book(rows[back], done, (num - gone)[back], np.where(False if died is None else died, now, np.nan)[back])
        filled = np.minimum(self.spare[rows], num)
        self.spare[rows] -= filled
        self.running[rows] -= num - filled
        short = (self.running[rows] < self.wanted) & ~self.stopped[rows]
        shrunk, stopped = np.zeros(len(rows), dtype=np.bool_), np.zeros(len(rows), dtype=np.bool_)
        if short.any():
            shrink, stop = self._decide(rows[short], now[short])
            shrunk[short], stopped[short] = shrink, stop
        self._shares()
        return Taken(swapped=filled > 0, shrunk=shrunk, stopped=stopped)

    def _decide(self, rows: Ints, now: Floats, late_s: float = 0.0) -> tuple[_Flags, _Flags]:
        """What jobs that miss some do, or do from now on: which of them go on with fewer, and which stop. The others
        wait, or wait on. `late_s`: added to how long each has waited."""
        waited = self.waiting[rows]
        waited_s = np.where(waited, now - self.since[rows] + late_s, 0.0)
        shrink, stop, wait_s = self._asked(rows, now, waited_s)
        begins = rows[~waited & ~shrink]
        self.since[begins] = now[~waited & ~shrink]
        self.waits[begins] += 1
        self.waiting[rows] = ~shrink
        self.patience_ends[rows] = np.where(shrink | stop, np.inf, now + wait_s)
        self.stopped[rows] = stop
        return shrink, stop

    def _asked(self, rows: Ints, now: Floats, waited_s: Floats) -> tuple[_Flags, _Flags, Floats]:
        belief = Replacements(
            expected_s=self.soonest[rows] - now, reshape_s=self.job.reshape_s, restart_s=self.job.planned_stop_s
        )
        state = VacancyState(
            running=self.running[rows],
            wanted=self.wanted,
            least=self.job.min_share * self.wanted,
            waited_s=waited_s,
            some_come=np.isfinite(self.soonest[rows]),
        )
        found = self.policy.decide(belief, state)
        return np.asarray(found.shrink), np.asarray(found.stop), np.asarray(found.wait_s)

    def give_up(self, now: Floats) -> tuple[Ints, Ints]:
        """Jobs whose patience is over decide again. (rows that shrink, rows that stop)."""
        rows = (self.waiting & (self.patience_ends <= now)).nonzero()[0]
        if not len(rows):
            return rows, rows
        shrink, stop = self._decide(rows, now[rows], 1e-6)  # however sums round, the patience is over
        self._shares()
        return rows[shrink], rows[stop]

    def hold(self, number: Floats, now: Floats, start_s: float) -> None:
        """So many spares are wanted from now on: those that are more leave, those that are fewer come in `start_s`."""
        coming = np.where(np.isfinite(self.back_at), self.back_num, 0.0).sum(axis=1)
        over = self.running + self.spare + coming + self.gone - self.wanted - number
        self.spare -= np.clip(over, 0.0, self.spare)
        rows = (over < 0).nonzero()[0]
        if len(rows):
            self._book(rows, now[rows] + start_s, -over[rows], np.full(len(rows), np.nan))

    def _book(self, rows: Ints, done: Floats, num: Floats, since: Floats) -> None:
        slot = self.back_at[rows].argmax(axis=1)  # an empty slot holds inf
        if np.isfinite(self.back_at[rows, slot]).any():
            size, slots = self.back_at.shape
            self.back_at = np.hstack([self.back_at, np.full((size, slots), np.inf)])
            self.back_num = np.hstack([self.back_num, np.zeros((size, slots))])
            self.out_since = np.hstack([self.out_since, np.full((size, slots), np.nan)])
            slot = self.back_at[rows].argmax(axis=1)
        self.back_at[rows, slot], self.back_num[rows, slot], self.out_since[rows, slot] = done, num, since
        self.soonest[rows] = np.minimum(self.soonest[rows], done)
        self.any_out = True

    def come_back(self, now: Floats) -> tuple[Ints, Ints, Ints]:
        """Returned machines fill places, then the spare pool; who waits and still misses some decides again. (rows that
        stop waiting, rows that grow running, rows that stop)."""
        rows = (self.soonest <= now).nonzero()[0]
        empty = rows[:0]
        if not len(rows):
            return empty, empty, empty
        slots = self.back_at[rows]
        done = slots <= now[rows, None]
        self.spare[rows] += (self.back_num[rows] * done).sum(axis=1)
        dead = done & np.isfinite(self.out_since[rows])
        self.num_filled[rows] += (self.back_num[rows] * dead).sum(axis=1)
        self.filled_s[rows] += np.where(dead, self.back_num[rows] * (slots - self.out_since[rows]), 0.0).sum(axis=1)
        slots[done] = np.inf
        self.back_at[rows] = slots
        self.soonest[rows] = slots.min(axis=1)
        if not self.missing:
            return empty, empty, empty
        filled = np.minimum(self.spare[rows], self.wanted - self.running[rows])
        self.spare[rows] -= filled
        self.running[rows] += filled
        was_waiting = self.waiting[rows]
        whole = self.running[rows] >= self.wanted
        woken, grown, stopped = rows[was_waiting & whole], rows[~was_waiting & (filled > 0)], empty
        self.waiting[woken] = self.stopped[woken] = False
        self.patience_ends[woken] = np.inf
        asked = rows[was_waiting & ~whole & ~self.stopped[rows]]
        if len(asked):
            shrink, stop = self._decide(asked, now[asked])
            woken, stopped = np.concatenate((woken, asked[shrink])), asked[stop]
        self._shares()
        return woken, grown, stopped
