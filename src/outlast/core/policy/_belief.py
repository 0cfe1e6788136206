"""What is believed of each failure class: a Gamma posterior of its rate per machine, and the shape of its hazard.

One record for both times: at run time the numbers are floats and nothing is imported; at plan time `alpha` and
`exposure_s` are arrays, one entry per replication, and the same code runs. Invariant: the posterior is the prior plus
what was observed, nothing else; `observe` and `expose` return a new belief and commute.
Source: Gelman et al., Bayesian Data Analysis (3rd ed.), 2.6 (Gamma-Poisson).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gamma
from typing import Any, Protocol

from outlast.errors import ConfigError, nearest

__all__ = ["Belief", "ClassPrior", "LossRecord"]


class LossRecord(Protocol):
    """What a run lost work to, and when: `Losses` of one run, or `LossArrays` of many."""

    def hazard_at(self, age_s: Any) -> Any:
        """Losses per second as believed now, `age_s` > 0 after the last one."""

    def next_save_s(self, *, age_s: Any, cost_s: Any, least_s: Any, extra: Any, left_s: Any) -> Any:
        """Seconds of training until the next save pays; see `outlast.core.policy.next_save_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassPrior:
    """What is thought of a class before the run: its rate, and how many failures' worth of evidence that is.

    rate: failures per machine-second; weight: prior strength in failures (1 is weak, 100 is nearly certain);
    shape: Weibull shape of the time between a fleet's failures (1 no memory, below 1 bursts).
    """

    rate: float
    weight: float = 1.0
    shape: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("weight", self.weight), ("shape", self.shape)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"prior {name} = {value}", remedy=f"{name} must be above zero and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Belief:
    """Posterior Gamma(alpha[k], beta_s[k] + exposure_s) of class k's rate per machine-second.

    alpha: one entry per class, each a float or an array of shape (replications,); beta_s: prior exposure in
    machine-seconds; exposure_s: observed since, a float or an array. losses: the record of lost work, of which only
    the adaptive interval asks.
    """

    classes: tuple[str, ...]
    alpha: Sequence[Any]
    beta_s: tuple[float, ...]
    shape: tuple[float, ...]
    exposure_s: Any = 0.0
    losses: LossRecord | None = None

    @classmethod
    def from_priors(cls, priors: Mapping[str, ClassPrior]) -> Belief:
        """The belief before anything was seen."""
        if not priors:
            raise ConfigError("a belief needs at least one failure class", remedy="name the classes and their priors")
        return cls(
            classes=tuple(priors),
            alpha=tuple(p.weight for p in priors.values()),
            beta_s=tuple(p.weight / p.rate for p in priors.values()),
            shape=tuple(p.shape for p in priors.values()),
        )

    def index(self, name: str) -> int:
        """The position of a class; an unknown name is refused with the nearest known one."""
        if name in self.classes:
            return self.classes.index(name)
        raise ConfigError(f"no failure class {name!r} in this belief", remedy=nearest(name, self.classes))

    def observe(self, name: str, count: float = 1.0) -> Belief:
        """`count` failures of a class."""
        k = self.index(name)
        if count < 0:
            raise ConfigError(f"{count} failures of {name!r}", remedy="a count is zero or more")
        return replace(self, alpha=(*self.alpha[:k], self.alpha[k] + count, *self.alpha[k + 1 :]))

    def expose(self, machine_seconds: Any) -> Belief:
        """Running machines times seconds since the last call (a float, or an array of shape (replications,))."""
        return replace(self, exposure_s=self.exposure_s + machine_seconds)

    def rate(self, k: int) -> Any:
        """Posterior mean rate of class k, per machine-second."""
        return self.alpha[k] / (self.beta_s[k] + self.exposure_s)

    def total(self, weights: Sequence[float]) -> Any:
        """Sum over classes of weights[k] x rate(k), per machine-second."""
        parts = [w * self.rate(k) for k, w in enumerate(weights) if w]
        return sum(parts[1:], parts[0]) if parts else 0.0

    def upper(self, k: int, z: float = 1.645) -> Any:
        """The rate that class k stays below with the normal deviate's confidence (Wilson-Hilferty, error < 1 %)."""
        a = self.alpha[k]
        cube = 1 - 1 / (9 * a) + z / (3 * a**0.5)
        return self.rate(k) * cube**3

    def hazard(self, k: int, machines: Any, since_s: Any) -> Any:
        """The fleet's hazard of class k, per second, `since_s` > 0 after its last failure: Weibull of the same mean."""
        shape, mean_rate = self.shape[k], self.rate(k) * machines
        if shape == 1:
            return mean_rate
        scale = 1 / (mean_rate * gamma(1 + 1 / shape))
        return shape / scale * (since_s / scale) ** (shape - 1)
