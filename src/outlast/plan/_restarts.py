"""What a run's roster keeps of its replacements, for a batch of replications: how many, and when the job went back.

Role: the restart policy says which of the places that a failure empties are filled again, and after which delay; here
it is asked as the coordinator asks it. Invariant: what is counted is what `Roster` counts: each process that takes a
dead one's place, none that takes the place of one that was asked to go; deaths of the last `window_s` only.
"""

from __future__ import annotations

import numpy as np

from outlast.core.policy import RestartPolicy

from ._source import Floats, Ints

__all__ = ["Restarts"]


class Restarts:
    """`used` is (replications,); `recent` (replications, k), grown when a job goes back more often in one window."""

    def __init__(self, policy: RestartPolicy, size: int) -> None:
        self.policy = policy
        self.used = np.zeros(size)
        self.recent = np.full((size, 2), -np.inf)

    def unfilled(self, rows: Ints, num: Floats) -> Floats:
        """How many of the `num` places of each row that a failure empties are not filled again; (rows,)."""
        if num.max() <= 1:
            decided = self.policy.decide(deaths=np.zeros(len(rows)), restarts=self.used[rows])
            filled = np.where(decided.start, num, 0.0)
        else:  # one after the other, as a roster goes through its slots
            each = np.arange(num.max())
            restarts = self.used[rows, None] + each
            decided = self.policy.decide(deaths=np.zeros(restarts.shape), restarts=restarts)
            filled = ((each < num[:, None]) & decided.start).sum(axis=1).astype(np.float64)
        self.used[rows] += filled
        return num - filled

    def unfilled_one(self, num: float) -> float:
        """`unfilled` of one replication, in plain numbers where one place is emptied."""
        if num > 1:
            return float(self.unfilled(np.zeros(1, dtype=np.intp), np.array([num])).item())
        start = num and self.policy.decide(deaths=0, restarts=self.used.item()).start
        self.used[0] += num if start else 0.0
        return 0.0 if start else num

    def delay_s(self, rows: Ints, now: Floats) -> Floats:
        """The jobs of these rows go back now: how long they wait before they start."""
        recent = self.recent[rows]
        deaths = 1 + (now[:, None] - recent < self.policy.window_s).sum(axis=1)
        if deaths.max() > self.recent.shape[1]:
            self.recent = np.hstack([self.recent, np.full_like(self.recent, -np.inf)])
            recent = self.recent[rows]
        self.recent[rows, recent.argmin(axis=1)] = now
        return np.asarray(self.policy.decide(deaths=deaths, restarts=self.used[rows]).delay_s, dtype=np.float64)
