"""The fleet's machines in a batch of replications: running, spare, in repair; who fills a place, who comes back.

Invariant: running + spare + in repair = wanted + spares, in every replication at all times. The spares policy decides
between shrinking and waiting; the decision here is only carried out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.core.policy import Belief, SparesPolicy, SparesState

from ._model import Job
from ._source import Floats, Ints

__all__ = ["Machines", "Taken"]

_Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Masks over the rows handed to `take`: a spare came in, or the job shrinks."""

    swapped: _Flags
    shrunk: _Flags


class Machines:
    """State arrays are (replications,); repairs are slots (replications, k), grown when they run out."""

    def __init__(self, job: Job, policy: SparesPolicy, prior: Belief, size: int) -> None:
        self.job, self.policy = job, policy
        self.wanted = float(job.num_nodes)
        self.running, self.spare = np.full(size, self.wanted), np.full(size, float(job.spares))
        self.waiting: _Flags = np.zeros(size, dtype=np.bool_)
        self.waits = np.zeros(size, dtype=np.intp)
        self.back_at, self.back_num = np.full((size, 8), np.inf), np.zeros((size, 8))
        self.soonest = np.full(size, np.inf)
        self.crew_free = np.zeros((size, job.crews)) if job.crews else None
        self.running_share, self.work_share = np.ones(size), np.ones(size)
        self.missing = self.any_out = False

    def next_back(self) -> Floats:
        """When the next machine returns to a job that misses some; never where none is missing."""
        return np.where(self.running < self.wanted, self.soonest, np.inf)

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

    def take(self, rows: Ints, num: Floats, now: Floats, repair_s: Floats, belief: Belief) -> Taken:
        """`num` machines of each row go to repair; spares fill in; what is then missing shrinks or stops the job."""
        num = np.minimum(num, self.running[rows])
        done = self._finish_s(rows, now, repair_s)
        self._book(rows, done, num)
        filled = np.minimum(self.spare[rows], num)
        self.spare[rows] -= filled
        self.running[rows] -= num - filled
        short = self.running[rows] < self.wanted
        shrunk = np.zeros(len(rows), dtype=np.bool_)
        if short.any():
            state = SparesState(
                running=self.running[rows],
                wanted=self.wanted,
                expected_wait_s=self.soonest[rows] - now,
                reshape_s=self.job.reshape_s,
            )
            allowed = np.asarray(self.policy.decide(belief, state).shrink) & (self.job.min_share < 1)
            newly = short & ~self.waiting[rows]
            shrunk = newly & allowed
            stops = newly & ~allowed
            self.waiting[rows[stops]] = True
            self.waits[rows[stops]] += 1
        self._shares()
        return Taken(swapped=filled > 0, shrunk=shrunk)

    def _book(self, rows: Ints, done: Floats, num: Floats) -> None:
        slot = self.back_at[rows].argmax(axis=1)  # an empty slot holds inf
        if np.isfinite(self.back_at[rows, slot]).any():
            size, slots = self.back_at.shape
            self.back_at = np.hstack([self.back_at, np.full((size, slots), np.inf)])
            self.back_num = np.hstack([self.back_num, np.zeros((size, slots))])
            slot = self.back_at[rows].argmax(axis=1)
        self.back_at[rows, slot], self.back_num[rows, slot] = done, num
        self.soonest[rows] = np.minimum(self.soonest[rows], done)
        self.any_out = True

    def come_back(self, now: Floats) -> tuple[Ints, Ints]:
        """Returned machines fill places, then the spare pool. (rows that stop waiting, rows that grow running)."""
        rows = (self.soonest <= now).nonzero()[0]
        empty = rows[:0]
        if not len(rows):
            return empty, empty
        slots = self.back_at[rows]
        done = slots <= now[rows, None]
        self.spare[rows] += (self.back_num[rows] * done).sum(axis=1)
        slots[done] = np.inf
        self.back_at[rows] = slots
        self.soonest[rows] = slots.min(axis=1)
        if not self.missing:
            return empty, empty
        filled = np.minimum(self.spare[rows], self.wanted - self.running[rows])
        self.spare[rows] -= filled
        self.running[rows] += filled
        was_waiting = self.waiting[rows]
        enough = self.running[rows] >= self.job.min_share * self.wanted
        woken, grown = rows[was_waiting & enough], rows[~was_waiting & (filled > 0)]
        self.waiting[woken] = False
        self._shares()
        return woken, grown
