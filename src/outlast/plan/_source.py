"""Where failures come from: renewal draws, or a recorded trace replayed. The simulator asks only for the next one.

Times are operational seconds of the full fleet: `advance(dt, scale)` runs them faster or slower as machines and rates
change, exactly. Invariant: one seed, one sequence.
"""

from __future__ import annotations

from math import gamma
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outlast.core.reliability import LogNormal

from ._model import FailureClass

__all__ = ["Floats", "Ints", "Renewals", "Replayed", "ReplayedTimes", "LossSource"]

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


class LossSource(Protocol):
    """Failures of `size` replications."""

    def peek(self, scale: Floats, now: Floats) -> tuple[Floats, Ints]:
        """Seconds until the next failure at the present scale, and its class; both (size,)."""

    def advance(self, spent: Floats) -> None:
        """Operational seconds (dt x scale) that passed."""

    def consume(self, rows: Ints, kinds: Ints) -> None:
        """The failures of these rows have happened."""

    def repair_s(self, rows: Ints, kinds: Ints) -> Floats:
        """Seconds until the machines that these failures took are back (inf: never, 0: not taken)."""


class Renewals:
    """Independent renewal processes per class: Weibull times between the fleet's failures (exponential at shape 1)."""

    def __init__(self, classes: tuple[FailureClass, ...], mean_s: Floats, size: int, rng: np.random.Generator) -> None:
        self._rng, self._classes = rng, classes
        self._shapes = [c.shape for c in classes]
        shape = np.array(self._shapes)
        self._power = None if (shape == 1).all() else 1 / shape
        self._scale = mean_s / np.array([gamma(1 + 1 / s) for s in shape])
        self._repair = np.array([c.repair for c in classes])
        laws = [
            LogNormal.from_median_mean(c.repair_median_h, max(c.repair_mean_h, c.repair_median_h * 1.0001))
            for c in classes
        ]
        self._mu, self._sigma = np.array([law.mu for law in laws]) + np.log(3600), np.array([law.sigma for law in laws])
        self._columns = np.arange(size)
        draws = rng.standard_exponential((len(classes), size))
        self._left = self._scale[:, None] * (draws if self._power is None else draws ** self._power[:, None])

    def peek(self, scale: Floats, now: Floats) -> tuple[Floats, Ints]:
        kinds = self._left.argmin(axis=0)
        return self._left[kinds, self._columns] / scale, kinds

    def advance(self, spent: Floats) -> None:
        self._left -= spent

    def consume(self, rows: Ints, kinds: Ints) -> None:
        if len(rows) == 1 and self._shapes[kinds.item()] == 1:  # plain numbers: the fixed cost of arrays is the cost
            self._left[kinds.item(), rows.item()] = self._scale[kinds.item()] * self._rng.standard_exponential()
            return
        draws = self._rng.standard_exponential(len(rows))
        if self._power is not None:
            draws = draws ** self._power[kinds]
        self._left[kinds, rows] = self._scale[kinds] * draws

    def repair_s(self, rows: Ints, kinds: Ints) -> Floats:
        taken = self._rng.random(len(rows)) < self._repair[kinds]
        normal = self._rng.standard_normal(len(rows))
        if not taken.any():
            return np.zeros(len(rows))
        return np.where(taken, np.exp(self._mu[kinds] + self._sigma[kinds] * normal), 0.0)


class Replayed:
    """One recorded history for all replications: times (n,) increasing, seconds from the start; kinds; repairs."""

    def __init__(self, times_s: Floats, kinds: Ints, repairs_s: Floats, size: int) -> None:
        self._times = np.append(np.asarray(times_s, dtype=np.float64), np.inf)
        self._kinds = np.append(np.asarray(kinds, dtype=np.intp), 0)
        self._repairs = np.append(np.asarray(repairs_s, dtype=np.float64), 0.0)
        self._next = np.zeros(size, dtype=np.intp)
        self._last = np.zeros(size, dtype=np.intp)

    def peek(self, scale: Floats, now: Floats) -> tuple[Floats, Ints]:
        return np.maximum(self._times[self._next] - now, 0.0), self._kinds[self._next]

    def advance(self, spent: Floats) -> None:
        """A recorded history does not depend on how many machines run."""

    def consume(self, rows: Ints, kinds: Ints) -> None:
        self._last[rows] = self._next[rows]
        self._next[rows] += 1

    def repair_s(self, rows: Ints, kinds: Ints) -> Floats:
        return self._repairs[self._last[rows]]


class ReplayedTimes(Replayed):
    """A recorded history of which it is not known for how long machines are away: that is drawn by `law`, anew in each
    replication."""

    def __init__(self, times_s: Floats, kinds: Ints, law: LossSource, size: int) -> None:
        super().__init__(times_s, kinds, np.zeros(len(times_s)), size)
        self._law = law

    def repair_s(self, rows: Ints, kinds: Ints) -> Floats:
        return self._law.repair_s(rows, kinds)
