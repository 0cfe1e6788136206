"""When the next save pays, from the times between losses so far, and how sure they make us of the hazard's shape.

Between two losses the hazard is Weibull's: rho * k * age**(k - 1). For a fixed shape k the powers t**k of the times are
exponential with rate rho, whose posterior is Gamma's; a grid of shapes is weighed by how well each explains the record
(the marginal likelihood), so before the first loss the stated prior speaks, after a few the record does. Saves are
then placed with density sqrt(hazard / (2 cost)), the variational optimum, whatever the hazard's course; a whole number
of them fits what is left of the run. Pure, floats only; all times in seconds.
Sources: Gelman et al., Bayesian Data Analysis (3rd ed.), 2.6; Ling, Mi, Lin, IEEE Trans. Computers 50(7), 2001 (the
density of checkpoints); Young, CACM 17(9), 1974, which it is for a constant hazard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from outlast.errors import ConfigError

__all__ = ["Course", "Losses", "next_save_s"]

_SHAPES = tuple(0.3 + 0.05 * i for i in range(19))  # 0.3 to 1.2
_SHAPE_MEAN, _SHAPE_SPREAD = 0.8, 0.25  # the prior of the shape: published fleets lie between 0.5 and 1
_EDGES = (0.0, *(4.0**i for i in range(1, 13)), math.inf)  # ages in which the record may depart from Weibull's course
_STIFFNESS = 3.0  # losses' worth of trust in that course within each of them
_NODES = (
    0.0198550718,
    0.1016667613,
    0.2372337950,
    0.4082826788,
    0.5917173212,
    0.7627662050,
    0.8983332387,
    0.9801449282,
)
_WEIGHTS = (
    0.0506142681,
    0.1111905172,
    0.1568533229,
    0.1813418917,
    0.1813418917,
    0.1568533229,
    0.1111905172,
    0.0506142681,
)
_ROUNDS = 30
_FEW = 12.0  # saves left in the run from which on their whole number matters little


class Course(NamedTuple):
    """The hazard as believed now, per second: rho * shape * age**(shape - 1), times a factor by age."""

    rho: float
    shape: float
    factors: tuple[float, ...]

    def at(self, age_s: float) -> float:
        """At an age above 0."""
        return self.factors[_band(age_s)] * self.rho * self.shape * math.pow(age_s, self.shape - 1)


@dataclass(kw_only=True, slots=True)
class Losses:
    """The record of what the run lost work to. prior_s: mean time between losses before any was seen; weight: how many
    losses' worth of evidence that is. ConfigError if one is not above zero and finite."""

    prior_s: float
    weight: float = 1.0
    _num: int = 0
    _log_sum: float = 0.0
    _seen: list[int] = field(default_factory=lambda: [0] * (len(_EDGES) - 1))
    _spent: list[list[float]] = field(default_factory=lambda: [[0.0] * (len(_EDGES) - 1) for _ in _SHAPES])
    _betas: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, value in (("prior_s", self.prior_s), ("weight", self.weight)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} = {value}", remedy=f"{name} must be above zero and finite")
        self._betas = [self.weight * (self.prior_s / math.gamma(1 + 1 / k)) ** k for k in _SHAPES]

    def observe(self, after_s: float) -> None:
        """A loss came `after_s` > 0 after the one before (or after the start)."""
        after_s = max(after_s, 1e-3)
        self._num += 1
        self._log_sum += math.log(after_s)
        self._seen[_band(after_s)] += 1
        for k, spent in zip(_SHAPES, self._spent, strict=True):
            for band in range(_band(after_s) + 1):
                spent[band] += min(after_s, _EDGES[band + 1]) ** k - _EDGES[band] ** k

    def course(self, age_s: float) -> Course:
        """The hazard as believed `age_s` after the last loss: posterior means; the open interval counts."""
        age_s, alpha, logs = max(age_s, 0.0), self.weight + self._num, []
        for k, spent, beta in zip(_SHAPES, self._spent, self._betas, strict=True):
            evidence = self._num * math.log(k) + (k - 1) * self._log_sum
            evidence += self.weight * math.log(beta) - alpha * math.log(beta + sum(spent) + age_s**k)
            logs.append(evidence - ((k - _SHAPE_MEAN) / _SHAPE_SPREAD) ** 2 / 2)
        top = max(logs)
        odds = [math.exp(value - top) for value in logs]
        mean = sum(w * k for w, k in zip(odds, _SHAPES, strict=True)) / sum(odds)
        best = min(range(len(_SHAPES)), key=lambda i: abs(_SHAPES[i] - mean))
        rho = alpha / (self._betas[best] + sum(self._spent[best]) + age_s ** _SHAPES[best])
        due = [rho * spent for spent in self._spent[best]]
        factors = tuple((_STIFFNESS + n) / (_STIFFNESS + d) for n, d in zip(self._seen, due, strict=True))
        return Course(rho, _SHAPES[best], factors)


def _band(age_s: float) -> int:
    return 0 if age_s < _EDGES[1] else min(int(math.log(age_s, 4.0) + 1e-9), len(_EDGES) - 2)


def next_save_s(
    losses: Losses,
    *,
    age_s: float,
    cost_s: float,
    least_s: float = 0.0,
    share: float = 1.0,
    extra: float = 0.0,
    left_s: float = math.inf,
) -> float:
    """Seconds of training from a save to the next one; inf if none pays before the end.

    age_s: since the last loss; cost_s: what a save takes from training; least_s: never sooner (the time until a save
    is durable, an overhead cap: CheckFreq's bound); share: of the losses that the nearer tiers do not absorb; extra:
    further hazard per second, such as rewinds while training is unstable; left_s: training left in the run.
    """
    if cost_s <= 0:
        return least_s
    course = losses.course(age_s)

    def density(age: float) -> float:
        return math.sqrt((extra + share * course.at(age)) / (2 * cost_s))

    def saves(span: float) -> float:
        return _integral(density, age_s, span)

    wanted = 1.0
    if left_s < math.inf:
        due = saves(left_s)
        if due < _FEW:
            parts = _whole(due)
            if parts == 1:
                return math.inf
            wanted = due / parts
    return max(least_s, _invert(saves, density, age_s, wanted))


def _whole(due: float) -> int:
    """Into how many parts to cut a span worth `due` saves: n parts cost (n - 1) saves and lose due**2 / n saves."""
    low = max(1, math.floor(due))
    return min((low, low + 1), key=lambda n: n - 1 + due * due / n)


def _integral(density: Callable[[float], float], start: float, span: float) -> float:
    """Of the density over [start, start + span]; the substitution x**3 tames the hazard's pole at age 0."""
    return span * sum(3 * x * x * w * density(start + span * x**3) for x, w in zip(_NODES, _WEIGHTS, strict=True))


def _invert(saves: Callable[[float], float], density: Callable[[float], float], start: float, wanted: float) -> float:
    """The span from `start` that is worth `wanted` saves: Newton on logarithms, where a power law is a line."""
    span = wanted / density(max(start, 1.0))
    for _ in range(_ROUNDS):
        have = saves(span)
        slope = span * density(start + span) / have
        step = math.log(wanted / have) / slope
        span *= math.exp(max(-3.0, min(3.0, step)))
        if abs(step) < 1e-4:
            break
    return span
