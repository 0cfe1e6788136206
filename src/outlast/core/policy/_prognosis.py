"""What follows from an alarm of a device: how likely a failure is, how soon, and what costs least.

Model. An alarm of a kind is followed by a failure of its device with probability p, after a delay that is exponential
with mean tau; otherwise it means nothing. Both are learned online, from a stated prior: Beta for p, Gamma for tau.
While nothing happens an alarm loses weight: after t seconds without a failure it was a true one with the odds
p exp(-t / tau) / (1 - p). For learning it is closed as false after five mean delays, whatever p is: closing sooner what
is thought to be false would make it so.

Actions are compared in seconds of work, by dynamic programming over the time since the alarm, in periods: wait, save
now, or move the device's work to another (a planned view: nothing is lost). Pure: it looks at no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from outlast.errors import ConfigError

__all__ = ["ActionCosts", "AlarmKind", "Outlook", "Prognosis", "alarm_name", "choose_action", "prior_of", "wilson"]

Action = Literal["wait", "save", "move"]
_PERIODS = 32
_NEGLIGIBLE = 0.001
_PARTS = 16  # of a period, to which unsaved work is told: whole ones were all or nothing for a job that saves often
_DELAYS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmKind:
    """What is known of one kind of alarm. The prior is `prior_true` of `prior_alarms` alarms true, and one delay of
    `prior_delay_s`; the rest was observed."""

    prior_true: float = 0.5
    prior_alarms: float = 2.0
    prior_delay_s: float = 1800.0
    num_true: float = 0.0
    num_false: float = 0.0
    delays_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.prior_true < self.prior_alarms < math.inf:
            raise ConfigError(
                f"a prior of {self.prior_true:g} true alarms in {self.prior_alarms:g}",
                remedy="more than none, and fewer than all",
            )
        if not 0 < self.prior_delay_s < math.inf:
            raise ConfigError(f"a prior delay of {self.prior_delay_s:g} s", remedy="above zero and finite")

    @property
    def p(self) -> float:
        """Posterior mean of the probability that an alarm is true."""
        return (self.prior_true + self.num_true) / (self.prior_alarms + self.num_true + self.num_false)

    @property
    def delay_s(self) -> float:
        """Posterior mean of the delay of a true one."""
        return (self.prior_delay_s + self.delays_s) / (1 + self.num_true)

    @property
    def closes_after_s(self) -> float:
        """After so long without a failure an alarm was false: one in 150 true ones is mistaken for that."""
        return _DELAYS * max(self.delay_s, self.prior_delay_s)


_PRIORS: Mapping[str, AlarmKind] = {
    "notice": AlarmKind(prior_true=4.5, prior_alarms=5.0, prior_delay_s=120.0),
    "fatal": AlarmKind(prior_true=1.6, prior_alarms=2.0, prior_delay_s=600.0),
    "warning": AlarmKind(prior_true=0.2, prior_alarms=2.0, prior_delay_s=3600.0),
}
"""By severity, before anything was observed. A cloud that says it takes a host away does so, in about two minutes; what
a device does not come back from ends it soon; of warnings few come true (published precision of such signals is low).
"""


def alarm_name(severity: str, evidence: str) -> str:
    """The kind of alarm that is learned as one: its severity and the reading that it was about ("fatal xid.fatal")."""
    return f"{severity} {evidence.split(':')[0].split(' ')[0]}"


def prior_of(name: str) -> AlarmKind:
    """What is believed of a kind of alarm, as `alarm_name` has it, before the first of it."""
    return _PRIORS.get(name.partition(" ")[0], AlarmKind())


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionCosts:
    """In seconds of the whole run's work. `failure_s`: what an unplanned failure costs apart from lost work;
    `exposure`: share of failures that lose what was not saved (in a fleet that outlasts them, few); `move_s`: a planned
    view; `idle_s`: having a device that is well out of work until it was tested; `period_s`: between decisions."""

    failure_s: float
    save_s: float
    move_s: float
    idle_s: float = 0.0
    exposure: float = 1.0
    period_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("failure_s", "save_s", "move_s", "idle_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}", remedy="a cost is zero or more, and finite")
        if not (0 <= self.exposure <= 1 and 0 < self.period_s < math.inf):
            raise ConfigError(
                f"exposure = {self.exposure}, period_s = {self.period_s}", remedy="a share, and more than 0 s"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What was decided: the action, what it is expected to cost, and what each would."""

    action: Action
    chance: float
    cost_s: float
    costs: Mapping[Action, float]


def choose_action(
    p: float, delay_s: float, since_s: float, unsaved_s: float, costs: ActionCosts, *, can_move: bool = True
) -> Outlook:
    """The action of least expected cost, `since_s` after an alarm that is true with probability `p`, with `unsaved_s`
    seconds of work that no checkpoint has."""
    truth = _truth(p, delay_s, since_s)
    if truth < _NEGLIGIBLE:
        return Outlook(action="wait", chance=truth, cost_s=0.0, costs={"wait": 0.0})
    unsaved = max(0, round(unsaved_s / costs.period_s * _PARTS)) / _PARTS
    rows = dict(_values(round(truth, 3), delay_s, costs, can_move, unsaved))
    action = min(rows, key=lambda name: rows[name])
    return Outlook(action=action, chance=truth, cost_s=rows[action], costs=rows)


def _truth(p: float, delay_s: float, since_s: float) -> float:
    alive = p * math.exp(-max(0.0, since_s) / delay_s)
    return alive / (alive + 1 - p) if alive + 1 - p > 0 else 1.0


@lru_cache(maxsize=4096)
def _values(
    truth: float, delay_s: float, costs: ActionCosts, can_move: bool, unsaved: float
) -> tuple[tuple[Action, float], ...]:
    """Expected cost of each action now, if what follows is best. Backwards over periods; the state is how long ago the
    last save was: it only matters since now, or since what was unsaved before."""
    fail, truths = _periods(truth, delay_s, costs.period_s)
    later = [0.0] * (_PERIODS + 1)  # by the period before which the last save was; the last of them: before the alarm
    for n in range(_PERIODS - 1, -1, -1):
        # The same whenever the last save was.
        anew: dict[Action, float] = {"save": costs.save_s + fail[n] * costs.failure_s + (1 - fail[n]) * later[n]}
        if can_move:
            anew["move"] = costs.move_s + (1 - truths[n]) * costs.idle_s
        least = min(anew.values())
        for saved in (-1, *range(n + 1)):
            age = (n - saved if saved >= 0 else n + unsaved) * costs.period_s
            wait = fail[n] * (costs.failure_s + costs.exposure * age) + (1 - fail[n]) * later[saved]
            if n == 0:
                return (("wait", wait), *anew.items())
            later[saved] = min(wait, least)
    raise AssertionError("a period has a value")


def _periods(truth: float, delay_s: float, period_s: float) -> tuple[list[float], list[float]]:
    """(probability of a failure in each period given none before it, of the alarm being true at its begin)."""
    hit = -math.expm1(-period_s / delay_s)
    fail, truths = [], []
    for _ in range(_PERIODS):
        truths.append(truth)
        fail.append(truth * hit)
        alive = truth * (1 - hit)
        truth = alive / (alive + 1 - truth) if alive + 1 - truth > 0 else 1.0
    return fail, truths


@dataclass(frozen=True, kw_only=True, slots=True)
class Prognosis:
    """Learns from alarms and failures of all devices; a new one after each event. `open`: alarms whose end is not yet
    known, by device: (kind, when). `failures`, `foretold`: how many there were, and how many an alarm was open for.
    `empty`: devices that work was moved away from."""

    kinds: Mapping[str, AlarmKind] = field(default_factory=dict)
    open: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    failures: int = 0
    foretold: int = 0
    empty: frozenset[str] = frozenset()

    def kind(self, name: str) -> AlarmKind:
        return self.kinds.get(name) or prior_of(name)

    def alarm(self, device: str, kind: str, at_s: float) -> Prognosis:
        """An alarm of a device; a second one of a device while one is open adds nothing."""
        known = self.closed(at_s)
        if device in known.open:
            return known
        return replace(known, open={**known.open, device: (kind, at_s)})

    def failed(self, device: str, at_s: float) -> Prognosis:
        """A device failed."""
        known = self.closed(at_s)
        if device not in known.open:
            return replace(known, failures=known.failures + 1)
        name, since_s = known.open[device]
        kind = known.kind(name)
        kind = replace(kind, num_true=kind.num_true + 1, delays_s=kind.delays_s + max(0.0, at_s - since_s))
        rest = {other: row for other, row in known.open.items() if other != device}
        return replace(
            known,
            kinds={**known.kinds, name: kind},
            open=rest,
            failures=known.failures + 1,
            foretold=known.foretold + 1,
            empty=known.empty - {device},
        )

    def cleared(self, device: str) -> Prognosis:
        """A device was tested and is well: its open alarm was false."""
        if device not in self.open:
            return self
        return replace(self, empty=self.empty - {device})._closed({device})

    def closed(self, now_s: float) -> Prognosis:
        """Alarms that nothing followed for long enough were false."""
        over = {d for d, (name, at_s) in self.open.items() if now_s - at_s > self.kind(name).closes_after_s}
        return self._closed(over) if over else self

    def emptied(self, device: str) -> Prognosis:
        """Work was moved away from a device: that it does not fail then is no proof that its alarm was false. (It would
        be if it counted: alarms that are acted on would seem false, and be acted on no more.)"""
        return replace(self, empty=self.empty | {device})

    def _closed(self, over: set[str]) -> Prognosis:
        kinds = dict(self.kinds)
        for device in over - self.empty:
            name = self.open[device][0]
            kind = kinds.get(name) or prior_of(name)
            kinds[name] = replace(kind, num_false=kind.num_false + 1)
        rest = {d: row for d, row in self.open.items() if d not in over}
        return replace(self, kinds=kinds, open=rest, empty=self.empty - over)

    def share(self, z: float = 1.96) -> tuple[float, float, float]:
        """(share of failures that were foretold, its interval by Wilson): (0, 0, 1) before any failure."""
        return wilson(self.foretold, self.failures, z)


def wilson(count: int, of: int, z: float = 1.96) -> tuple[float, float, float]:
    """(share, low, high) of `count` in `of` draws (Wilson 1927); (0, 0, 1) of none."""
    if not of:
        return 0.0, 0.0, 1.0
    middle = (count + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * math.sqrt(count * (of - count) / of + z * z / 4)
    return count / of, max(0.0, middle - half), min(1.0, middle + half)
