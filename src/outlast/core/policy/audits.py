"""What share of microbatches to compute twice, so that silent corruption is found early but cheaply.

A corrupting device keeps corrupting: at audit rate a, of one bad machine among `machines`, an audit hits it once in
about machines_hit / a steps, and all work since is lost; the audit itself costs a share a of all compute.
Minimising a + rate x step_s / a gives a = sqrt(rate x step_s x damage). Invariant: a in [min_rate, max_rate].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from outlast.errors import ConfigError

from ._arithmetic import clamp
from ._belief import Belief, ClassPrior

__all__ = ["AuditDecision", "AuditPolicy", "AuditState", "audit_share", "silent_belief"]

_SILENT_RATE = 6 / (54 * 86400 * 16384)  # Llama 3 (2024), table 5: 6 silent corruptions, 54 days, 16,384 accelerators
_PRIOR_WEIGHT = (
    1e-3  # incidents; Hochschild et al., Cores that don't count (2021): few cores in several thousand machines
)
_BUDGET = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditState:
    """Now: machines exposed, seconds a step takes, fixed seconds that finding a corruption costs besides lost steps."""

    machines: Any
    step_s: float
    recovery_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditDecision:
    """Share of microbatches computed twice, expected seconds from corruption to detection, expected total overhead."""

    rate: Any
    detection_s: Any
    overhead: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditPolicy:
    """weights[k]: the share of class k that corrupts silently (0: never). `fixed`: a rate held whatever is believed."""

    weights: tuple[float, ...] = ()
    min_rate: float = 1e-4
    max_rate: float = 1.0
    fixed: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.min_rate <= self.max_rate <= 1:
            raise ConfigError(f"audit rates {self.min_rate} to {self.max_rate}", remedy="0 < min <= max <= 1")
        if self.fixed is not None and not 0 < self.fixed <= 1:
            raise ConfigError(f"audit rate {self.fixed}", remedy="a share: above 0, at most 1")

    def decide(self, belief: Belief, state: AuditState) -> AuditDecision:
        """The rate with the least expected overhead: audits computed plus work lost until one hits."""
        silent = belief.total(self.weights) * state.machines if self.weights else 0.0 * state.machines
        best = (silent * state.step_s) ** 0.5
        rate = clamp(best, self.min_rate, self.max_rate) if self.fixed is None else self.fixed + 0 * best
        detection_s = state.step_s / rate
        return AuditDecision(
            rate=rate, detection_s=detection_s, overhead=rate + silent * (detection_s + state.recovery_s)
        )


def silent_belief(found: float = 0.0, looked_at_s: float = 0.0) -> Belief:
    """What is believed of silent corruption in a run that found `found` incidents in `looked_at_s` machine-seconds of
    work that was computed twice. Prior: the rate of one large fleet, worth a thousandth of an incident, because it
    comes from one device in about a thousand: a device that was wrong here says far more than that fleet's mean."""
    belief = Belief.from_priors({"silent": ClassPrior(rate=_SILENT_RATE, weight=_PRIOR_WEIGHT)})
    return belief.observe("silent", found).expose(looked_at_s)


def audit_share(audit: float | str, machines: int, step_s: float = 1.0, belief: Belief | None = None) -> float:
    """The share of microbatches to compute twice: the number given, or for "auto" the policy's choice from `belief`
    (default: before anything was seen) within a budget of 5 %; "auto:0.1" is another budget. ConfigError for anything
    else."""
    budget = _budget(audit)
    if budget is not None:
        belief = belief if belief is not None else silent_belief()
        policy = AuditPolicy(weights=(1.0,) * len(belief.classes), min_rate=min(1e-4, budget), max_rate=budget)
        return float(policy.decide(belief, AuditState(machines=machines, step_s=step_s)).rate)
    share = _number(audit)
    if not 0.0 <= share <= 1.0:
        raise ConfigError(
            f"audit={audit!r} is no share",
            remedy='0 (none) to 1 (every microbatch twice), "auto", or "auto:0.1" for a budget of a tenth',
        )
    return share


def _budget(audit: object) -> float | None:
    """What "auto" may cost; None if something else is given."""
    kind, _, budget = audit.partition(":") if isinstance(audit, str) else ("", "", "")
    if kind != "auto":
        return None
    share = _number(budget or _BUDGET)
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"audit={audit!r} has no budget", remedy='a share above 0 and at most 1: "auto:0.1"')
    return share


def _number(audit: object) -> float:
    """As the command line, the environment or a script gives it; NaN for what is no number."""
    try:
        return float(audit) if isinstance(audit, int | float | str) and not isinstance(audit, bool) else math.nan
    except ValueError:
        return math.nan
