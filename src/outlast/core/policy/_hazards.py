"""`Losses` of many runs at once: the same belief and the same next save, one entry a replication.

Role: the simulator's form of `_hazard.py`, whose text says why each step is as it is; the names here are the same.
Invariant: every entry equals, to rounding, what `Losses` says of that run alone (a test holds them equal on drawn
records). numpy is imported here and by nothing that a coordinator loads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._hazard import _EDGES, _FEW, _FULL, _NEGLIGIBLE, _NODES, _ROUNDS, _STIFFNESS, _WEIGHTS, Losses

__all__ = ["LossArrays"]

_Floats = NDArray[np.float64]
_LOW, _HIGH = np.array(_EDGES[:-1]), np.array(_EDGES[1:])
_AT, _SHARE = np.array(_NODES)[:, None], np.array(_WEIGHTS)[:, None]


def _band(age_s: _Floats) -> NDArray[np.intp]:
    safe = np.log(np.maximum(age_s, _EDGES[1])) / math.log(4.0)
    return np.where(age_s < _EDGES[1], 0, np.minimum((safe + 1e-9).astype(np.intp), len(_EDGES) - 2))


class _Courses:
    """`Course` of many: scales (shapes, size), powers (shapes,), factors (bands, size)."""

    def __init__(self, scales: _Floats, powers: _Floats, factors: _Floats) -> None:
        self.scales, self.powers, self.factors = scales, powers[:, None], factors
        self._columns = np.arange(scales.shape[1])

    def at(self, age_s: _Floats) -> _Floats:
        """At ages above 0; (size,) or (anything, size)."""
        log_age = np.log(age_s)
        total = np.zeros_like(log_age)
        for scale, power in zip(self.scales, self.powers, strict=True):
            total += scale * np.exp(power * log_age)
        return np.asarray(self.factors[_band(age_s), np.broadcast_to(self._columns, age_s.shape)] * total)


class LossArrays:
    """The records of `size` runs that began with one prior. `rows` everywhere: which of them."""

    def __init__(self, prior: Losses, size: int) -> None:
        self.prior, self.shapes = prior, np.array(prior.shapes)
        bands = len(_LOW)
        self.num, self.log_sum = np.zeros(size), np.zeros(size)
        self.seen, self.spent = np.zeros((bands, size)), np.zeros((len(self.shapes), bands, size))

    def observe(self, rows: NDArray[np.intp], after_s: _Floats) -> None:
        """In each of these runs, once each, a loss came `after_s` after the one before."""
        after_s = np.maximum(after_s, 1e-3)
        band = _band(after_s)
        self.num[rows] += 1
        self.log_sum[rows] += np.log(after_s)
        self.seen[band, rows] += 1
        reached = np.arange(len(_LOW))[:, None] <= band
        for k, shape in enumerate(self.shapes):
            more = np.minimum(after_s, _HIGH[:, None]) ** shape - (_LOW**shape)[:, None]
            self.spent[k][:, rows] += np.where(reached, more, 0.0)

    def of(self, rows: NDArray[np.intp]) -> LossArrays:
        """The records of these runs."""
        found = object.__new__(LossArrays)
        found.prior, found.shapes = self.prior, self.shapes
        found.num, found.log_sum = self.num[rows], self.log_sum[rows]
        found.seen, found.spent = self.seen[:, rows], self.spent[:, :, rows]
        return found

    def one(self, row: int) -> Losses:
        """The record of one run, in plain numbers."""
        p = self.prior
        found = Losses(prior_s=p.prior_s, weight=p.weight, spread=p.spread, shapes=p.shapes)
        found._num, found._log_sum = int(self.num[row]), float(self.log_sum[row])
        found._seen = [int(n) for n in self.seen[:, row]]
        found._spent = self.spent[:, :, row].tolist()
        return found

    def course(self, age_s: _Floats, floor: Any = 0.0) -> _Courses:
        """As `Losses.course`."""
        prior = self.prior
        age_s, alpha = np.maximum(age_s, 0.0), prior.weight + self.num
        odds, rhos = [], []
        for k, spent, cells in zip(prior.shapes, self.spent, prior._prior, strict=True):
            evidence = self.num * math.log(k) + (k - 1) * self.log_sum
            exposure, log_mean = spent.sum(axis=0) + age_s**k, math.lgamma(1 + 1 / k)
            for cell in cells:
                beta = cell.beta + exposure
                rate = np.exp(np.log(alpha / beta) / k - log_mean)
                odds.append(evidence + cell.log_prior - alpha * np.log(beta) - np.log(rate + floor) / 2)
                rhos.append((alpha - rate / (rate + floor) / 2) / beta)
        weighed = np.exp(np.array(odds) - np.max(odds, axis=0))
        weighed /= weighed.sum(axis=0)
        by_shape = (weighed * np.array(rhos)).reshape(len(prior.shapes), -1, len(age_s)).sum(axis=1)
        return self._course(by_shape)

    def _course(self, rhos: _Floats) -> _Courses:
        due = np.einsum("ks,kbs->bs", rhos, self.spent)
        factors = np.where(self.num > 0, (_STIFFNESS + self.seen) / (_STIFFNESS + due), 1.0)
        explained = rhos * (self.prior.prior_s**self.shapes)[:, None]
        kept = explained > _NEGLIGIBLE * explained.max(axis=0)
        return _Courses(np.where(kept, rhos * self.shapes[:, None], 0.0), self.shapes - 1, factors)

    def hazard_at(self, age_s: _Floats) -> _Floats:
        """As `Losses.hazard_at`."""
        return self.course(age_s).at(age_s)

    def next_save_s(
        self,
        *,
        age_s: Any,
        cost_s: Any,
        least_s: Any = 0.0,
        share: float = 1.0,
        extra: Any = 0.0,
        left_s: Any = math.inf,
    ) -> _Floats:
        """As `outlast.core.policy.next_save_s`; cost_s above 0."""
        size = len(self.num)
        age, cost, extra_s, left = (np.broadcast_to(np.asarray(x, float), size) for x in (age_s, cost_s, extra, left_s))
        course = self.course(age, _FULL * 2 * cost / left**2)

        def density(at: _Floats) -> _Floats:
            return np.asarray(np.sqrt((extra_s + share * course.at(at)) / (2 * cost)))

        def saves(span: _Floats) -> _Floats:
            found = 3 * _AT * _AT * _SHARE * density(age + span * _AT**3)
            return np.asarray(span * found.sum(axis=0))

        ends = left < math.inf
        due = np.where(ends, saves(np.where(ends, left, 1.0)), math.inf)
        few = due < _FEW
        low = np.maximum(1.0, np.floor(np.where(few, due, 1.0)))
        square = np.where(few, due, 1.0) ** 2
        parts = np.where(low - 1 + square / low <= low + square / (low + 1), low, low + 1)
        span = _invert(saves, density, age, np.where(few, due / parts, 1.0))
        return np.asarray(np.where(few & (parts == 1), math.inf, np.maximum(least_s, span)))


def _invert(saves: Any, density: Any, start: _Floats, wanted: _Floats) -> _Floats:
    span = wanted / density(np.maximum(start, 1.0))
    span = wanted / density(start + span / 3)
    moving = np.ones(len(span), dtype=np.bool_)
    for _ in range(_ROUNDS):
        have = saves(span)
        step = np.log(wanted / have) / (span * density(start + span) / have)
        span = np.where(moving, span * np.exp(np.clip(step, -3.0, 3.0)), span)
        moving &= np.abs(step) >= 1e-3
        if not moving.any():
            break
    return np.asarray(span)
