"""Whether an alarm of a device is acted upon, and how: the costs of `_prognosis.py`, and what the run was told.

One object decides in the run, under the adversary and for the plan's classes of failures that are foretold. Invariant:
nothing is done where waiting is expected to cost least, or where alarms are only to be told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from outlast.errors import ConfigError

from ._prognosis import ActionCosts, Outlook, choose_action

__all__ = ["AlarmBelief", "AlarmDecision", "AlarmPolicy", "AlarmState"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmBelief:
    """What is believed of a kind of alarm: the probability that one is true, and the mean delay of its failure."""

    p: float
    delay_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmState:
    """Now: seconds since the alarm, seconds of work that no checkpoint has, what each action costs (their `period_s` is
    the policy's), and whether the device's work can go elsewhere."""

    costs: ActionCosts
    unsaved_s: float
    since_s: float = 0.0
    can_move: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmDecision:
    """What costs least, and whether it is done: not where that is to wait, or where alarms are only told."""

    outlook: Outlook
    acts: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmPolicy:
    """`kind`: act, or only tell what that would be. `weighings`: decisions in the mean time between an alarm and its
    failure."""

    kind: Literal["act", "tell"] = "act"
    weighings: float = 8.0

    def __post_init__(self) -> None:
        if self.kind not in {"act", "tell"} or not self.weighings > 0:
            raise ConfigError(f"alarms {self.kind!r}, {self.weighings} weighings", remedy="act or tell; more than none")

    def again_s(self, belief: AlarmBelief) -> float:
        """Seconds from one decision about an open alarm to the next."""
        return belief.delay_s / self.weighings

    def decide(self, belief: AlarmBelief, state: AlarmState) -> AlarmDecision:
        """What to do about one open alarm."""
        costs = replace(state.costs, period_s=self.again_s(belief))
        found = choose_action(belief.p, belief.delay_s, state.since_s, state.unsaved_s, costs, can_move=state.can_move)
        return AlarmDecision(outlook=found, acts=self.kind == "act" and found.action != "wait")
