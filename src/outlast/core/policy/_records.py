"""`RunRecord` of many runs at once, for the simulator: what each of them believes, one entry a replication.

Role: what `_record.py` folds from a journal is told here by name, with the rows that it befell. Invariant: the belief
and the state of every entry equal, to rounding, those of a `RunRecord` that was told the same (a test holds them equal
on drawn runs and on simulated ones). Loss bands and audits of numbers have no part in it: nothing is computed there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._belief import Belief
from ._hazard import Losses
from ._hazards import LossArrays
from ._interval import IntervalState
from ._record import RunPrior
from ._spares import REPLACED_S, SparesDecision, SparesPolicy, SparesState

__all__ = ["RunRecords"]

_Floats = NDArray[np.float64]
_Rows = NDArray[np.intp]


class RunRecords:
    """Begins at time 0 of each run. `rows` everywhere: which of them; times are theirs, (len(rows),)."""

    def __init__(self, size: int, prior: RunPrior | None = None) -> None:
        self.prior = prior or RunPrior()
        self.losses = LossArrays(Losses(prior_s=self.prior.fleet_s), size)
        self._replicas = Belief.from_priors({"replica": self.prior.replica})
        self.deaths, self.loss_s, self.last_s = np.zeros(size), np.zeros(size), np.zeros(size)
        self.blocked_s, self.durable_s, self.measured = np.zeros(size), np.zeros(size), np.zeros(size, dtype=np.bool_)
        self.num_filled, self.filled_s = np.zeros(size), np.zeros(size)

    def died(self, rows: _Rows, num: Any = 1.0) -> None:
        """So many machines of each of these died."""
        self.deaths[rows] += num

    def filled(self, rows: _Rows, num: Any, seconds: Any) -> None:
        """So many places of each are filled again, after so many seconds in all."""
        self.num_filled[rows] += num
        self.filled_s[rows] += seconds

    def rewound(self, rows: _Rows, now_s: _Floats) -> None:
        """All work since the last save was lost."""
        self.losses.observe(rows, now_s - self.loss_s[rows])
        self.loss_s[rows] = now_s

    def began(self, rows: _Rows, now_s: _Floats) -> None:
        """A save was taken."""
        self.last_s[rows] = now_s

    def saved(self, rows: _Rows, blocked_s: Any, durable_s: Any) -> None:
        """A save was published, and what it cost."""
        self.blocked_s[rows], self.durable_s[rows], self.measured[rows] = blocked_s, durable_s, True

    def belief(self, rows: _Rows, exposed_s: Any) -> Belief:
        """`exposed_s`: machine-seconds so far."""
        return replace(self._rates(rows, exposed_s), losses=self.losses.of(rows))

    def _rates(self, rows: _Rows, exposed_s: Any) -> Belief:
        belief = replace(self._replicas, alpha=(self._replicas.alpha[0] + self.deaths[rows],))
        return belief.expose(exposed_s)

    def spares(
        self, rows: _Rows, exposed_s: Any, wanted: float, held: Any, policy: SparesPolicy | None = None
    ) -> SparesDecision:
        """How many spares are worth holding beside `wanted` machines, where `held` are."""
        repair_s = (REPLACED_S + self.filled_s[rows]) / (1 + self.num_filled[rows])
        state = SparesState(wanted=wanted, repair_s=repair_s, held=held)
        return (policy or SparesPolicy()).decide(self._rates(rows, exposed_s), state)

    def state(self, rows: _Rows, now_s: Any, machines: Any, ends_s: float) -> IntervalState:
        """`machines`: how many train, 0 where the death of one is a loss of work; ends_s: of the run."""
        since_s = np.maximum(self.last_s[rows], self.loss_s[rows])
        return IntervalState(
            machines=machines,
            write_s=self.blocked_s[rows],
            durable_s=self.durable_s[rows],
            age_s=np.maximum(1.0, since_s - self.loss_s[rows]),
            now_age_s=np.maximum(1.0, now_s - self.loss_s[rows]),
            left_s=np.maximum(1.0, ends_s - since_s),
            measured=self.measured[rows],
        )
