"""When the next save pays, from the times between losses so far, and how sure they make us of rate and shape.

Between two losses the hazard is Weibull's: rho * k * age**(k - 1). For a fixed shape k the powers t**k of the times are
exponential with rate rho, so a Gamma prior of rho stays one; the prior is a row of such Gammas, because a stated mean
time may be wrong by a factor of ten. Cells (shape, Gamma) are weighed by how well each explains the record (the
marginal likelihood), so before the first loss the stated prior speaks, and what has not failed so far; after a few
losses the record does. What is minimised is the expected waste over that of someone who knew the cell, not seconds:
those would all go to the worst cell. Saves are then placed with density sqrt(hazard / (2 cost)), the variational
optimum, whatever the hazard's course; a whole number of them fits what is left of the run. Pure, floats only; seconds.
Sources: Gelman et al., Bayesian Data Analysis (3rd ed.), 2.6; Ling, Mi, Lin, IEEE Trans. Computers 50(7), 2001 (the
density of checkpoints); Young, CACM 17(9), 1974, which it is for a constant hazard; Savage, JASA 46, 1951 (regret).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from outlast.errors import ConfigError

__all__ = ["Course", "LossState", "Losses", "next_save_s"]

_SHAPES = (0.4, 0.6, 0.8, 1.0, 1.2)
_SHAPE_MEAN, _SHAPE_SPREAD = 0.8, 0.25  # the prior of the shape: published fleets lie between 0.5 and 1
_STEPS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # the prior's Gammas, in its spreads from the stated mean time
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
_NEGLIGIBLE = 1e-4  # of the hazard: shapes that explain so little of it are left out
_FULL = 300.0  # squared: where the best would waste less than some 17 saves are worth, seconds count, not their ratio
_FEW = 12.0  # saves left in the run from which on their whole number matters little


class Course(NamedTuple):
    """The hazard as believed now, per second: the sum of scale * age**power over `terms`, times a factor by age."""

    terms: tuple[tuple[float, float], ...]
    factors: tuple[float, ...]

    def at(self, age_s: float) -> float:
        """At an age above 0."""
        log_age = math.log(age_s)
        return self.factors[_band(age_s)] * sum(scale * math.exp(power * log_age) for scale, power in self.terms)


class _Cell(NamedTuple):
    """One Gamma of the prior for one shape: rho ~ Gamma(weight, beta); log_prior: its odds times beta**weight."""

    log_prior: float
    beta: float


class LossState(NamedTuple):
    """What `Losses` has seen: how many, the sum of their ages' logarithms, how many in each band of ages, and for each
    shape the exposure in each band."""

    num: int
    log_sum: float
    seen: list[int]
    spent: list[list[float]]


@dataclass(kw_only=True, slots=True)
class Losses:
    """The record of what the run lost work to. prior_s: mean time between losses before any was seen; weight: how many
    losses' worth of evidence that is, once its scale is settled; spread: the factor it may well be wrong by (one
    standard deviation); shapes: those considered (1: no memory). ConfigError where one makes no sense."""

    prior_s: float
    weight: float = 3.0
    spread: float = 4.0
    shapes: tuple[float, ...] = _SHAPES
    _num: int = 0
    _log_sum: float = 0.0
    _seen: list[int] = field(default_factory=lambda: [0] * (len(_EDGES) - 1))
    _spent: list[list[float]] = field(default_factory=list)
    _prior: list[list[_Cell]] = field(default_factory=list)

    def __post_init__(self) -> None:
        least_of = {"prior_s": 0.0, "weight": 0.5, "spread": 1.0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if not least < value < math.inf:
                raise ConfigError(f"{name} = {value}", remedy=f"{name} must be above {least} and finite")
        if not self.shapes or not all(0 < k < 10 for k in self.shapes):
            raise ConfigError(f"shapes = {self.shapes}", remedy="one shape or more, each above 0 and below 10")
        self._spent = [[0.0] * (len(_EDGES) - 1) for _ in self.shapes]
        self._prior = [[self._cell(k, step) for step in _STEPS] for k in self.shapes]

    def _cell(self, k: float, step: float) -> _Cell:
        beta = self.weight * (self.prior_s * self.spread**step / math.gamma(1 + 1 / k)) ** k
        odds = -(step**2) / 2 - ((k - _SHAPE_MEAN) / _SHAPE_SPREAD) ** 2 / 2
        return _Cell(odds + self.weight * math.log(beta), beta)

    def observe(self, after_s: float) -> None:
        """A loss came `after_s` > 0 after the one before (or after the start)."""
        after_s = max(after_s, 1e-3)
        self._num += 1
        self._log_sum += math.log(after_s)
        self._seen[_band(after_s)] += 1
        for k, spent in zip(self.shapes, self._spent, strict=True):
            for band in range(_band(after_s) + 1):
                spent[band] += min(after_s, _EDGES[band + 1]) ** k - _EDGES[band] ** k

    def state(self) -> LossState:
        """Return what was seen, for `restore`."""
        return LossState(self._num, self._log_sum, list(self._seen), [list(spent) for spent in self._spent])

    def restore(self, state: LossState) -> None:
        """Go on from the state of a record with the same prior. Raises msgspec.ValidationError where it has other
        shapes or bands."""
        if [len(state.seen), *map(len, state.spent)] != [len(self._seen)] * (1 + len(self.shapes)):
            raise msgspec.ValidationError("a record of losses with other shapes or bands")
        self._num, self._log_sum = state.num, state.log_sum
        self._seen, self._spent = list(state.seen), [list(spent) for spent in state.spent]

    @property
    def num(self) -> int:
        """Losses so far."""
        return self._num

    def hazard_at(self, age_s: float) -> float:
        """Losses per second as believed now, `age_s` > 0 after the last one."""
        return self.course(age_s).at(age_s)

    def next_save_s(self, **state: float) -> float:
        """`next_save_s` of this record: the form that a policy calls on records of one run or of many."""
        return next_save_s(self, **state)

    def rates(self) -> list[tuple[float, float, float]]:
        """The prior of the rate where there is no memory: (share, shape, rate in seconds) of each Gamma it mixes."""
        odds = [math.exp(-(step**2) / 2) for step in _STEPS]
        return [
            (part / sum(odds), self.weight, self.weight * self.prior_s * self.spread**step)
            for part, step in zip(odds, _STEPS, strict=True)
        ]

    def course(self, age_s: float, floor: float = 0.0) -> Course:
        """The hazard to plan for, as believed `age_s` after the last loss; the open interval counts.

        Each cell weighs by its odds over sqrt(rate + floor), to which the least waste that its mean rate leaves is
        proportional; inside a cell that takes up to half a loss off the Gamma's (E sqrt(rho) / E 1/sqrt(rho))."""
        age_s, alpha = max(age_s, 0.0), self.weight + self._num
        cells: list[tuple[float, int, float]] = []
        for i, (k, spent, prior) in enumerate(zip(self.shapes, self._spent, self._prior, strict=True)):
            evidence = self._num * math.log(k) + (k - 1) * self._log_sum
            exposure, log_mean = sum(spent) + age_s**k, math.lgamma(1 + 1 / k)
            for cell in prior:
                beta = cell.beta + exposure
                rate = math.exp(math.log(alpha / beta) / k - log_mean)
                log_odds = evidence + cell.log_prior - alpha * math.log(beta) - math.log(rate + floor) / 2
                cells.append((log_odds, i, (alpha - rate / (rate + floor) / 2) / beta))
        top, total, rhos = max(cells)[0], 0.0, [0.0] * len(self.shapes)
        for log_odds, i, rho in cells:
            odds = math.exp(log_odds - top)
            total += odds
            rhos[i] += odds * rho
        return self._course([rho / total for rho in rhos])

    def _course(self, rhos: list[float]) -> Course:
        """From each shape's share of rho; where the record departs from what that makes due, the factors follow."""
        factors = [1.0] * len(self._seen)
        if self._num:
            due = [sum(r * s for r, s in zip(rhos, band, strict=True)) for band in zip(*self._spent, strict=True)]
            factors = [(_STIFFNESS + n) / (_STIFFNESS + d) for n, d in zip(self._seen, due, strict=True)]
        least = _NEGLIGIBLE * max(rho * self.prior_s**k for rho, k in zip(rhos, self.shapes, strict=True))
        terms = [(rho * k, k - 1) for rho, k in zip(rhos, self.shapes, strict=True) if rho * self.prior_s**k > least]
        return Course(tuple(terms), tuple(factors))


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
    course = losses.course(age_s, _FULL * 2 * cost_s / left_s**2)

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
    """The integral of the density over [start, start + span]; the substitution x**3 tames the hazard's pole at age
    0."""
    return span * sum(3 * x * x * w * density(start + span * x**3) for x, w in zip(_NODES, _WEIGHTS, strict=True))


def _invert(saves: Callable[[float], float], density: Callable[[float], float], start: float, wanted: float) -> float:
    """The span from `start` that is worth `wanted` saves: Newton on logarithms, where a power law is a line."""
    span = wanted / density(max(start, 1.0))
    span = wanted / density(start + span / 3)
    for _ in range(_ROUNDS):
        have = saves(span)
        slope = span * density(start + span) / have
        step = math.log(wanted / have) / slope
        span *= math.exp(max(-3.0, min(3.0, step)))
        if abs(step) < 1e-3:
            break
    return span
