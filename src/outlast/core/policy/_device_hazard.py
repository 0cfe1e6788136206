"""How likely a device is to fail soon, from its past alone: how often it failed, how lately, and how old it is.

Three things make a past telling. Few devices make most failures: a device's rate is a draw from a Gamma distribution,
and its own record updates that (Gamma-Poisson). A failure that was not mended returns: each one raises the hazard for a
while (Hawkes 1971), by `excite` further failures in all, over a mean of `decay_s`. And devices have a childhood and an
age (the bathtub): `ages` multiplies the rate, band by band. All are updated with every failure and every second without
one; with no record at all the hazard is the stated prior. Pure: it looks at no clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outlast.errors import ConfigError

__all__ = ["DeviceHazard", "DeviceHistory", "learn_ages", "learn_recency"]

_HOUR, _YEAR = 3600.0, 365.25 * 86400.0
_BANDS_S = (0.0, 100 * _HOUR, 1000 * _HOUR, *(_YEAR * each / 4 for each in range(1, 41)))
_EXCITES, _DECAYS_D = (0.1, 0.2, 0.35, 0.5), (1.0, 3.0, 10.0, 30.0)
_NEIGHBOUR = 10.0  # failures that what its neighbour says is worth to a band
_GAIN = 3.0  # what a course of recency must explain more than none, in logarithms of likelihood


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHistory:
    """What a device did: how long it worked, and at which ages, in seconds of work, it failed."""

    observed_s: float
    failed_s: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHazard:
    """`mean_rate`: failures a second of a device that nothing is known of; `shape`: of the Gamma distribution over
    devices, small where few make most failures. `excite` 0 leaves recency out. `ages`: (seconds of work from which on,
    factor), by age; none leaves age out."""

    mean_rate: float
    shape: float = 1.0
    excite: float = 0.0
    decay_s: float = 86400.0
    ages: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("mean_rate", "shape", "decay_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}", remedy="above zero and finite")
        if not 0 <= self.excite < 1:
            raise ConfigError(
                f"excite = {self.excite}", remedy="from 0 to below 1: a failure that brings one or more never ends"
            )
        starts = [start for start, _ in self.ages]
        if (starts and starts[0] != 0) or starts != sorted(set(starts)) or any(not f > 0 for _, f in self.ages):
            raise ConfigError(f"ages = {self.ages}", remedy="(age, factor) by rising age from 0 on, factors above zero")

    def exposure(self, observed_s: float) -> float:
        """Seconds of work up to an age, each as heavy as the age it was worked at."""
        total, worked = 0.0, max(observed_s, 0.0)
        for (start, factor), (end, _) in itertools.pairwise((*(self.ages or ((0.0, 1.0),)), (math.inf, 1.0))):
            if worked <= start:
                break
            total += factor * (min(worked, end) - start)
        return total

    def factor(self, observed_s: float) -> float:
        """What an age multiplies the rate with."""
        return next((factor for start, factor in reversed(self.ages) if start <= max(observed_s, 0.0)), 1.0)

    def base(self, num_failures: int, observed_s: float) -> float:
        """The device's own rate a second, after so many failures in so long, without recency."""
        return self._own(num_failures, observed_s) * self.factor(observed_s)

    def _own(self, num_failures: int, observed_s: float) -> float:
        rate = (self.shape + num_failures) / (self.shape / self.mean_rate + self.exposure(observed_s))
        return rate * (1 - self.excite)

    def rate(self, failed_at_s: Sequence[float], now_s: float, observed_s: float) -> float:
        """The hazard a second. `failed_at_s`: on the clock of `now_s`; later ones are not known yet, and left out."""
        past = [now_s - at_s for at_s in failed_at_s if at_s <= now_s]
        recent = sum(math.exp(-ago / self.decay_s) for ago in past)
        return self.base(len(past), observed_s) + self.excite / self.decay_s * recent

    def chance(self, failed_at_s: Sequence[float], now_s: float, observed_s: float, within_s: float) -> float:
        """Probability of a failure within so long of work."""
        past = [now_s - at_s for at_s in failed_at_s if at_s <= now_s]
        fade = -math.expm1(-within_s / self.decay_s)
        recent = self.excite * fade * sum(math.exp(-ago / self.decay_s) for ago in past)
        ahead = self.exposure(observed_s + within_s) - self.exposure(observed_s)
        return -math.expm1(-(self._own(len(past), observed_s) * ahead + recent))

    def log_likelihood(self, history: DeviceHistory) -> float:
        """The log-likelihood of one device's course, as a point process that is updated with each failure; exact, no
        grid of times."""
        total, before, past = 0.0, 0.0, sorted(t for t in history.failed_s if t <= history.observed_s)
        prior = self.shape / self.mean_rate
        for number, age in enumerate((*past, history.observed_s)):
            until = self.exposure(age)
            total -= (self.shape + number) * math.log((prior + until) / (prior + before)) * (1 - self.excite)
            if number < len(past):
                total += math.log(self.rate(past[:number], age, age))
            before = until
        return total + self.excite * sum(math.expm1((t - history.observed_s) / self.decay_s) for t in past)


def learn_recency(histories: Sequence[DeviceHistory], prior: DeviceHazard) -> DeviceHazard:
    """With how much a failure raises the hazard, and for how long, as devices' courses make it likeliest.

    As `prior` has it where they say too little."""
    telling = [history for history in histories if history.failed_s]  # the others are the same by how long they worked
    quiet = sum(
        prior.shape * math.log1p(prior.exposure(history.observed_s) * prior.mean_rate / prior.shape)
        for history in histories
        if not history.failed_s
    )
    best, most = prior, _explained(prior, telling, quiet) + _GAIN
    for excite, days in ((0.0, 1.0), *itertools.product(_EXCITES, _DECAYS_D)):
        tried = replace(prior, excite=excite, decay_s=86400.0 * days)
        found = _explained(tried, telling, quiet)
        if found > most:
            best, most = tried, found
    return best


def _explained(hazard: DeviceHazard, telling: Sequence[DeviceHistory], quiet: float) -> float:
    return sum(map(hazard.log_likelihood, telling)) + quiet * hazard.excite


def learn_ages(histories: Sequence[DeviceHistory], prior: DeviceHazard) -> DeviceHazard:
    """With a factor for each band of ages that a device has worked in.

    A band begins with its younger neighbour's, as if that had been seen in ten failures, so that few move it little.
    """
    failed, worked = [0] * len(_BANDS_S), [0.0] * len(_BANDS_S)
    for history in histories:
        for band, (start, end) in enumerate(itertools.pairwise((*_BANDS_S, math.inf))):
            if history.observed_s <= start:
                break
            worked[band] += min(history.observed_s, end) - start
            failed[band] += sum(start <= t < end for t in history.failed_s)
    if not sum(failed):
        return prior
    mean = sum(failed) / sum(worked)
    found, factor = [], 1.0
    for start, count, seconds in zip(_BANDS_S, failed, worked, strict=True):
        if not seconds:
            break
        factor = (_NEIGHBOUR * factor + count) / (_NEIGHBOUR + mean * seconds)
        found.append((start, factor))
    return replace(prior, ages=tuple(found))
